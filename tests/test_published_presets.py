"""The whole configuration of each published preset, beside its publication.

A preset's printed configuration is what its publication says, each option with the words that say it, and what the
publication leaves open or this library corrects. An option that neither names fails the test.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import programs
import pytest
import yaml

from glissando.cli import main
from glissando.config import flat
from glissando.presets import preset_note


class Publication(NamedTuple):
    """file: its text. says: option -> (value, the words that say it). open: the other options. sampling: as `says`."""

    file: str
    says: dict[str, tuple[Any, str]]
    open: dict[str, Any]
    sampling: dict[str, tuple[Any, str]] | None = None


# fmt: off
#: where a preset says nothing else
COMMON = {
    "model.block.conv_width": 0, "model.depth.shortcuts": False, "model.tied_head": False,
    "model.logit_scale": 1.0, "data.seed": 0, "training.steps": None, "training.epochs": None,
    "training.tokens": None, "training.seconds": None, "training.flops": None,
    "training.optimizer.kind": "adamw",
    "training.optimizer.release": None, "training.clip": 1.0, "training.precision": "32-true",
    "training.compile": False, "training.freeze": [], "training.neutral_kl": 0.0,
    "training.early_stopping": None, "training.seed": 0, "training.devices": 1,
    "training.accelerator": "auto",
    "training.strategy": "auto",
    "model.block.order": "pre", "model.block.mixer_scale": None, "model.block.mixer_dropout": 0.0,
    "model.block.mlp.hidden": None, "model.depth.kind": "discrete", "model.norm": "layer",
    "model.final_norm": True, "model.init": "torch", "model.representation": "real",
    "data.tokenizer.kind": "bytes", "training.optimizer.beta2": 0.999, "training.optimizer.weight_decay": 0.01,
    "training.schedule.warmup_steps": 0, "training.accumulate": 1, "training.carry": 0.0,
    "training.gradient_checkpointing": False, "training.validate_every": None, "training.save_every": None,
    "training.sample_every": None, "training.log_every": 10,
}
ATTENTION = {
    "model.mixer.kv_heads": None, "model.mixer.head_size": None, "model.mixer.keys": "own",
    "model.mixer.scale": None, "model.mixer.window": None, "model.mixer.bias": True,
    "model.mixer.forget_gate": False,
}
PUBLISHED = {
    "continuous-transformer": Publication("continuous-transformer.txt", {
        "model.hidden_size": (1024, "DIM = 1024"), "model.vocab_size": (256, "VOCAB_SIZE = 256"),
        "model.depth.kind": ("tied", "Recursive operator application"), "model.depth.n_steps": (6, "DEPTH = 6"),
        "model.representation": ("complex", "to complex space"), "model.mixer.kind": ("spectral", "SpectralField"),
        "model.mixer.filter": (True, "Rational field parameters"),
        "model.mixer.phase_gate": (True, "Position coefficient"),
        "model.block.mixer_scale": (0.1, "Integration timestep"),
        "data.kind": ("text", "TinyStoriesV2-GPT4-train.txt"), "data.seq_len": (8192, "SEQ_LENGTH = 8192"),
        "data.batch_size": (1, "BATCH_SIZE = 1"), "data.stride": (512, "stride: int = 512"),
        "data.ascii_only": (True, "Keep only ASCII characters"), "data.tokenizer.kind": ("bytes", "Character level"),
        "training.steps": (None, "while True"), "training.optimizer.kind": ("adamw", "AdamW"),
        "training.optimizer.learning_rate": (0.0003, "BASE_LR = 3e-4"),
        "training.optimizer.weight_decay": (0.01, "WEIGHT_DECAY = 0.01"),
        "training.schedule.kind": ("homeostatic", "homeostatic learning rate"),
        "training.clip": (1.0, "GRAD_CLIP = 1.0"),
        "training.gradient_checkpointing": (True, "USE_CHECKPOINT = True"),
        "training.log_every": (100, "PRINT_EVERY = 100"), "training.save_every": (1000, "CHECKPOINT_EVERY = 1000"),
        "training.sample_every": (1000, "CHECKPOINT_EVERY = 1000"),
    }, {
        # no MLP; P is the complex norm of a tied step; nothing is held out there, and everything is scored in training
        "model.mixer.projections": False, "model.mixer.channels": None,
        "model.block.order": "post",
        "model.block.mlp_dropout": 0.0, "model.block.mlp.kind": "none", "model.block.mlp.bias": False,
        "model.depth.layers": 1, "model.depth.gated": [], "model.norm": "complex", "model.final_norm": False,
        "model.head_bias": True, "model.max_length": None,
        "data.max_valid_bytes": 1000000, "data.path": None, "data.valid_path": None, "data.valid_fraction": 0.01,
        "training.validate_every": 1000,
    }, {
        "max_tokens": (200, "GEN_LENGTH = 200"), "temperature": (0.8, "GEN_TEMPERATURE = 0.8"),
        "top_p": (0.9, "GEN_TOP_P = 0.9"),
    }),
    "minimal-transformer": Publication("minimal-transformer.txt", {
        "model.hidden_size": (4, "d_model=4"), "model.vocab_size": (256, "vocab_size=256"),
        "model.depth.layers": (2, "n_layers=2"), "model.mixer.kind": ("attention", "causal self-attention"),
        "model.mixer.heads": (2, "n_heads=2"), "model.mixer.rope": (True, "Rotary Positional Embedding"),
        "model.mixer.rope_width": (4, "10000^(2*i/d_model)"), "model.block.order": ("post-shared", "post-norm"),
        "model.block.mixer_dropout": (0.0078125, r"\min(0.1, 0.5 \times \frac{d_{\text{model}}}{256})"),
        "model.block.mlp_dropout": (0.0078125, r"\min(0.1, 0.5 \times \frac{d_{\text{model}}}{256})"),
        "model.block.mlp.kind": ("relu", "relu"), "model.block.mlp.hidden": (8, "d_ff=8"),
        "model.norm": ("layer", "layer normalization"), "data.kind": ("shift", "shift each character by +1"),
        "training.optimizer.kind": ("adamw", "Adam optimizer"),
        "training.optimizer.weight_decay": (0.0, "Adam optimizer"),
        "training.optimizer.learning_rate": (0.001, "lr=1e-3"), "training.clip": (1.0, "gradient_clip_val=1.0"),
    }, ATTENTION | {
        # the shapes of pairs and batches; values are rotated as the text beside the code has it
        "model.mixer.rope_on_value": True, "model.mixer.dropout": 0.0, "model.block.mlp.bias": True,
        "model.depth.gated": [], "model.depth.mean_gate": False, "model.final_norm": False, "model.head_bias": True,
        "model.max_length": None, "data.seq_len": 32, "data.batch_size": 128,
        "data.length": 12, "data.valid_rows": 512, "training.schedule.kind": "constant",
    }),
    "hybrid-ode": Publication("hybrid-ode-transformer.txt", {
        "model.hidden_size": (256, "d_model=256"), "model.max_length": (128, "max_seq_len=128"),
        "model.mixer.kind": ("attention", "CausalSelfAttention"),
        "model.mixer.heads": (4, "n_heads=4"), "model.mixer.dropout": (0.1, "dropout=0.1"),
        "model.block.mlp_dropout": (0.1, "dropout=0.1"), "model.block.mlp.kind": ("gelu", "gelu"),
        "model.depth.kind": ("flow", "Neural ODE"), "model.depth.layers": (4, "(replacing 2-3)"),
        "model.depth.n_steps": (4, "n_steps=4"), "model.depth.control": (["u0", "u1", "u2", "u3"], "control_dim=4"),
        "model.depth.method": ("euler", "method='euler'"), "model.depth.alpha": (0.1, "initialized to 0.1"),
        "model.norm": ("layer", "LayerNorm"), "model.head_bias": (False, "bias=False"),
    }, ATTENTION | {
        # 3e-4 and 32 rows of 64 are of its authors' notebook; the article names no text, and its adjoint is not exact
        "model.mixer.rope": False, "model.mixer.rope_width": None, "model.mixer.rope_on_value": False,
        "model.block.mlp.bias": True, "model.depth.control_trained": None,
        "model.vocab_size": 50257, "data.kind": "stories", "data.seq_len": 64,
        "data.batch_size": 32, "data.valid_rows": 16, "data.labelled": False, "data.cut": True,
        "training.optimizer.learning_rate": 0.0003, "training.schedule.kind": "constant",
    }),
    "gpt": Publication("hybrid-ode-transformer.txt", {
        "model.hidden_size": (256, "d_model=256"), "model.max_length": (128, "max_seq_len=128"),
        "model.mixer.kind": ("attention", "CausalSelfAttention"),
        "model.mixer.heads": (4, "n_heads=4"), "model.mixer.dropout": (0.1, "dropout=0.1"),
        "model.block.mlp_dropout": (0.1, "dropout=0.1"), "model.block.mlp.kind": ("gelu", "gelu"),
        "model.depth.layers": (6, "n_layers=6"), "model.norm": ("layer", "LayerNorm"),
        "model.head_bias": (False, "bias=False"),
    }, ATTENTION | {
        # as hybrid-ode
        "model.mixer.rope": False, "model.mixer.rope_width": None, "model.mixer.rope_on_value": False,
        "model.block.mlp.bias": True, "model.depth.gated": [], "model.depth.mean_gate": False,
        "model.vocab_size": 50257, "data.kind": "stories", "data.seq_len": 64, "data.batch_size": 32,
        "data.valid_rows": 16, "data.labelled": False, "data.cut": True,
        "training.optimizer.learning_rate": 0.0003, "training.schedule.kind": "constant",
    }),
    "tauformer": Publication("tauformer.txt", {
        "model.hidden_size": (384, "Embedding size (n_embd) 384"),
        "model.vocab_size": (30522, "Vocabulary size (vocab_size) 30522"),
        "model.depth.layers": (6, "Layers (n_layer) 6"), "model.mixer.kind": ("tau", "Tauformer"),
        "model.mixer.heads": (6, "Heads (n_head) 6"), "model.mixer.rope": (True, "RoPE"),
        "data.kind": ("jsonl", "Local JSONL file train.jsonl"),
        "data.seq_len": (1024, "Sequence length (seq_len) 1024"),
        "data.valid_fraction": (0.05, "every 20th batch is used for validation"),
        "data.tokenizer.vocab_size": (30522, "Vocabulary size (vocab_size) 30522"),
        "data.batch_size": (128, "total_tokens=655360000"), "training.optimizer.kind": ("adamw", "Optimizer AdamW"),
        "training.optimizer.learning_rate": (0.0005, "Base learning rate 5e-4"),
        "training.schedule.kind": ("plateau", "plateau-triggered LR scaling"),
        "training.schedule.warmup_steps": (100, "Warmup 100 steps"),
        "model.mixer.calibration": ("start", "on (re)start"), "training.validate_every": (100, "At step 100"),
    }, {
        # RMS norms, ReLU^2 and the chain are of the author's crate; T is learned, from 0.01 instead of 1.
        # No tokenizer of 30,522 words is named, and no field of train.jsonl
        "model.mixer.head_size": 64, "model.mixer.key_size": None,
        "model.mixer.keys": "own", "model.mixer.rope_repeat": 1,
        "model.mixer.value_rotation": None, "model.mixer.value_width": None, "model.mixer.eps": 1e-06,
        "model.mixer.tau": 1.0, "model.mixer.laplacian": "chain", "model.mixer.laplacian_weights": "fixed",
        "model.mixer.temperature": 0.01, "model.mixer.importance": False, "model.mixer.forget_gate": False,
        "model.mixer.horizons": [8.0, 1024.0], "model.mixer.output_gate": False, "model.block.mlp_dropout": 0.0,
        "model.block.mlp.kind": "relu2", "model.block.mlp.bias": False, "model.depth.gated": [],
        "model.depth.mean_gate": False,
        "model.norm": "rms", "model.head_bias": False, "model.init": "scaled",
        "model.max_length": None, "data.tokenizer.kind": "bpe", "data.path": None,
        "data.valid_path": None, "data.text_field": "text", "data.control_names": [],
        "training.accumulate": 32,
    }),
    "liquid-ssm-dense": Publication("liquid-ssm.txt", {
        "model.hidden_size": (256, "d_model = 256"), "model.vocab_size": (1000, "vocab_size = 1000"),
        "model.depth.layers": (4, "num_layers = 4"), "model.max_length": (512, "max_seq_len=512"),
        "model.mixer.kind": ("liquid", "Liquid"),
        "model.mixer.state_size": (128, "state_dim = 128"), "model.mixer.dropout": (0.1, "nn.Dropout(0.1)"),
        "model.norm": ("layer", "LayerNorm"),
        "model.init": ("xavier", "xavier"), "data.seq_len": (512, "max_seq_len=512"),
    }, {
        # a layer and its gates as published; no training is
        "model.mixer.dynamics": "dense", "model.mixer.layer": "published", "model.mixer.state_dependence": True,
        "model.mixer.adaptation": 0.1, "model.mixer.steps": None, "model.mixer.input": "held",
        "model.mixer.coupled": None, "model.mixer.turns": None, "model.block.mlp_dropout": 0.0,
        "model.block.mlp.kind": "none", "model.block.mlp.bias": False, "model.depth.gated": [],
        "model.depth.mean_gate": True, "model.head_bias": True, "data.kind": "stories", "data.batch_size": 1,
        "data.valid_rows": 8, "data.labelled": False, "data.cut": True, "training.optimizer.learning_rate": 0.001,
        "training.optimizer.beta2": 0.95, "training.optimizer.weight_decay": 0.1,
        "training.schedule.kind": "warmup-cosine", "training.schedule.warmup_steps": 50,
        "training.schedule.final_ratio": 0.1,
    }, {"temperature": (1.0, "temperature: float = 1.0"), "top_p": (0.95, "top_p: float = 0.95")}),
}
# fmt: on


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_whole_configuration_is_the_publications(name, capsys):
    publication = PUBLISHED[name]
    assert main(["train", "--preset", name, "--print_config"]) == 0
    printed = flat(yaml.safe_load(capsys.readouterr().out))
    says = {option: value for option, (value, _) in publication.says.items()}
    assert printed.pop("preset") == name
    assert printed == COMMON | publication.open | says
    sampling = {option: value for option, (value, _) in (publication.sampling or {}).items()}
    assert (preset_note(name, "sampling") or {}) == sampling


@pytest.mark.sources
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_publication_says_so(name):
    lines = programs.source(PUBLISHED[name].file).splitlines()
    text = " ".join(" ".join(line.removesuffix("|") for line in lines).split()).lower()
    said = PUBLISHED[name].says | (PUBLISHED[name].sampling or {})
    assert [words for _, words in said.values() if " ".join(words.lower().split()) not in text] == []


FETCHED = "--data.kind hub --data.train_split TinyStoriesV2-GPT4-train.txt"


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("continuous-transformer", rf"TinyStoriesV2-GPT4-train\.txt, 2\.2 GB \(fetched by {FETCHED}\)"),
        ("tauformer", r"train\.jsonl, each line an object with a field `text`"),
        ("tauformer-100m", r"train\.jsonl, each line an object with a field `text`"),
    ],
)
def test_a_published_text_is_asked_for_in_one_line(name, file, tmp_path, capsys):
    for command in (
        ["train", "--preset", name, "--training.steps", "1"],
        ["compare", name, "--budget", "steps=1"],
    ):
        assert main([*command, "--out", str(tmp_path / "run")]) == 1
        *before, line = capsys.readouterr().err.splitlines()
        assert command[0] == "compare" or not before
        assert re.search(file, line)
        assert line.endswith("--data.path FILE; or train on the built-in stories: --data.kind stories")
    assert not (tmp_path / "run").exists()


def test_the_published_windows_are_those_of_a_fetched_file_too(capsys):
    given = ["train", "--preset", "continuous-transformer", *FETCHED.split(), "--print_config"]
    assert main(given) == 0
    data = yaml.safe_load(capsys.readouterr().out)["data"]
    assert (data["kind"], data["stride"], data["ascii_only"]) == ("hub", 512, True)
    assert (data["train_split"], data["seq_len"]) == ("TinyStoriesV2-GPT4-train.txt", 8192)
    assert main([*given[:3], "--data.kind", "stories", "--print_config"]) == 0
    assert "stride" not in yaml.safe_load(capsys.readouterr().out)["data"]
