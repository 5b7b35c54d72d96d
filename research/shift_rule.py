"""Can it learn the rule? Pairs `input TAB output`, every character shifted by one: exact answers on unseen inputs.

The Minimal Transformer's 2,648 parameters first, then larger ones. Its head size of 2 gives RoPE one frequency, one
radian a token, with which a position twelve back cannot be told from one six or eighteen back; the larger ones have a
head size of 8. With --memorise the answers are random, so that there is no rule and only memory helps: the
publication's own claim (about 500 short sequences).

    python -m research.shift_rule
    python -m research.shift_rule --memorise 128 256 512 1024
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import glissando
from glissando.data.corpora import build_corpus
from glissando.evaluation.pairs import exact_match_rate
from glissando.presets import load_preset
from glissando.training.fit import train
from research import fixed_pairs  # noqa: F401  registers `fixed-pairs`
from research.runs import configured, options_of


def shape(hidden_size: int, heads: int, head_size: int, ffn: int) -> dict[str, Any]:
    """The Minimal Transformer at another size."""
    return {
        "hidden_size": hidden_size,
        "block": {"mlp": {"hidden": ffn}},
        "mixer": {"kind": "attention", "heads": heads, "head_size": head_size, "rope_width": max(head_size, 4)},
    }


SHAPES = {
    "published": shape(4, 2, 2, 8),
    "d4": shape(4, 2, 8, 8),
    "d6": shape(6, 2, 8, 12),
    "d8": shape(8, 2, 8, 16),
    "d12": shape(12, 2, 8, 24),
    "d16": shape(16, 2, 8, 32),
    "d32": shape(32, 4, 8, 64),
}


def main() -> None:
    options = _options()
    print(f"{'shape':10}{'parameters':>11}{'pairs':>8}{'seed':>6}{'exact':>9}  95 % interval       characters")
    for name in options.shapes:
        for pairs in options.memorise or [None]:
            for seed in range(options.seeds):
                show(name, pairs, seed, answer(SHAPES[name], pairs, seed, options.steps))


def show(name: str, pairs: int | None, seed: int, result: dict[str, Any]) -> None:
    low, high = result["exact_match_95"]
    print(
        f"{name:10}{result['parameters']:>11,}{pairs or 'endless':>8}{seed:>6}{result['exact_match']:>9.1%}"
        f"  {low:6.1%} to {high:6.1%}    {result['characters_right']:.1%}",
        flush=True,
    )


def answer(shape: dict[str, Any], pairs: int | None, seed: int, steps: int) -> dict[str, Any]:
    """Train on endless pairs and answer unseen ones; or on `pairs` random pairs and answer those again."""
    preset = load_preset("minimal-transformer")
    fixed = {"kind": "fixed-pairs", "rule": "random", "train_pairs": pairs} if pairs else {"kind": "shift"}
    training = {
        "steps": steps,
        "seed": seed,
        "optimizer": {"learning_rate": 1e-2, "beta2": 0.99, "weight_decay": 0.0},
        "schedule": {"kind": "warmup-cosine", "warmup_steps": min(100, steps), "final_ratio": 0.05},
        "validate_every": steps,
        "sample_every": steps,
        "save_every": steps,
    }
    data = {"seq_len": 32, "batch_size": 128, "seed": seed, **fixed}
    config = configured(preset, {"model": shape, "data": data, "training": training})
    with tempfile.TemporaryDirectory() as folder:
        model = glissando.load(train(config, Path(folder) / "run").path)
    corpus: Any = build_corpus(config.data, model.tokenizer)
    pairs_to_answer = corpus.train_set if pairs else corpus.held_out(512)
    return exact_match_rate(model, pairs_to_answer) | {"parameters": model.num_parameters()}


def _options() -> Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--memorise", nargs="+", type=int, help="numbers of random pairs to memorise")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one shape, a few steps: shows that it runs")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.steps = ["d4"], 20
    return options


if __name__ == "__main__":
    main()
