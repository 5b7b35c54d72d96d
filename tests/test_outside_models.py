"""Models of transformers as a depth: the laws, to the precision that they compute in, and a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from slow import slow_where
from tolerances import assert_close, assert_tensors_close

from glissando.cli import main
from glissando.compare.measure import read_measured
from glissando.compare.plan import Amount, Comparison
from glissando.config import from_dict
from glissando.depth import DEPTHS
from glissando.errors import ConfigError
from glissando.imports import import_file
from glissando.loading import load
from glissando.model import LanguageModel, ModelConfig

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1},
    "mamba2": {"num_heads": 2, "head_dim": 16, "state_size": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "qwen3_next": {
        "layer_types": ["linear_attention"], "intermediate_size": 24, "mlp_only_layers": [0], "num_experts": 0,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    },
}  # fmt: skip


FILE = Path(__file__).parent.parent / "examples" / "outside_models.py"


def options_of(kind: str, **changes: Any) -> dict[str, Any]:
    config = {"model_type": kind, "hidden_size": 16, "num_hidden_layers": 1} | CONFIGS.get(kind, {}) | changes
    return {"hidden_size": 16, "final_norm": False, "depth": {"kind": "transformers", "config": config}}


def outside(kind: str, **changes: Any) -> LanguageModel:
    if "transformers" not in DEPTHS:
        import_file(FILE)
    torch.manual_seed(0)
    return LanguageModel(from_dict(ModelConfig, {**options_of(kind, **changes), "vocab_size": 11}, "model")).eval()


@pytest.mark.parametrize("kind", slow_where({"qwen3_next"}, CONFIGS))
def test_it_obeys_the_laws_to_its_own_precision(kind: str):
    model = outside(kind)
    ids = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    whole = model(ids, mask=mask)[0]
    pieces, state = [], model.init_state(3)
    for part, real in zip(ids.split([4, 1, 4], 1), mask.split([4, 1, 4], 1), strict=True):
        logits, state = model(part, state, mask=real)
        pieces.append(logits)
    joined = torch.cat(pieces, 1)
    assert_close(joined[mask], whole[mask], "split")
    for row, length in enumerate(mask.sum(1).tolist()):
        assert_close(whole[row : row + 1, :length], model(ids[row : row + 1, :length])[0], "batch")
    grads = []
    for logits in (joined, whole):
        model.zero_grad()
        logits[mask].square().sum().backward(retain_graph=True)
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert all(bool(grad.abs().max() > 0) for grad in grads[-1].values())
    assert_tensors_close(*grads, "gradient of")


def test_it_starts_as_its_own_library_starts_it():
    """A_log of Mamba-2 is the logarithm of 1 to H, and no matrix has our scale."""
    mixer = outside("mamba2").depth.body.layers[0].mixer
    assert_close(mixer.A_log.exp().detach(), torch.tensor([1.0, 2.0]))
    assert float(mixer.out_proj.weight.detach().std()) > 0.04


def test_what_cannot_be_used_is_refused():
    with pytest.raises(ConfigError, match="reads tokens that come later"):
        outside("bert", intermediate_size=24, num_attention_heads=2)
    with pytest.raises(ConfigError, match="cannot build a 'lama'"):
        outside("lama")
    with pytest.raises(ConfigError, match="TransformersDepth reads its whole past"):
        outside("mamba2").require_constant_state("training.carry")


def test_the_example_files_are_of_the_baselines_size(tmp_path):
    import_file(FILE)
    files = [str(FILE.parent / "models" / f"{name}.yaml") for name in ("mamba2", "gated-delta")]
    Comparison(["transformer-plus-nano", *files], tmp_path / "out", Amount("steps", 1)).check()


@pytest.mark.slow
def test_a_comparison_with_it(tmp_path):
    small = ["--model.vocab_size", "256", "--data.cut", "true", "--data.seq_len", "32", "--data.valid_rows", "2"]
    for name in ("llama", "mamba2"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"model": options_of(name)}))
    command = ["compare", str(tmp_path / "llama.yaml"), str(tmp_path / "mamba2.yaml"), "--import", str(FILE)]
    out = tmp_path / "out"
    options = ["--budget", "steps=2", "--contexts", "8", "--allow_unequal", "--out", str(out)]
    assert main([*command, *options, *small]) == 0
    for name in ("llama", "mamba2"):
        run = out / "runs" / name / "lr-0.002-seed-0"
        assert read_measured(run) is not None
        assert load(run).depth.body.config.model_type == name
    speed = json.loads((out / "speed.json").read_bytes())["models"]
    assert speed["mamba2"]["decode"] == {}  # it would read its whole past at each token
    assert speed["mamba2"]["train"]["median"] > 0
