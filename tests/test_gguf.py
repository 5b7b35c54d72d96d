"""GGUF: what is written is what llama.cpp computes, and what it would compute otherwise is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tolerances import assert_close

import glissando
from benchmarks import gguf_file
from benchmarks.gguf_file import export, require_llama
from glissando.config import to_dict
from glissando.data.tokenizers import train_bpe
from glissando.export import Refused
from glissando.model import LanguageModel

TEXT = "Once upon a time there was a fox, and it's said that foxes don't sleep: 12 of 30 nights. " * 20


def saved(folder: Path, tokenizer: Any = None, **options: Any) -> Path:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "depth": {"layers": 2}, "mixer": {"kind": "attention", "heads": 4, "kv_heads": 2}}
    model = LanguageModel.from_config({**config, **options})
    if tokenizer is not None:
        model.tokenizer = tokenizer
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save(folder / "run")
    return folder / "run"


def exported(run: Path, folder: Path) -> LanguageModel:
    model = glissando.load(run)
    folder.mkdir()
    export(model, 64, folder / "model.gguf")
    return model


CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "untied": {"tied_head": False, "logit_scale": 1.5},
    "scaled": {"mixer": {"kind": "attention", "heads": 2, "head_size": 8, "scale": 0.6}},
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_it_and_agrees(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = exported(saved(tmp_path, **CASES[case]), tmp_path / "out")
    peer = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf").eval()
    ids = torch.randint(0, 256, (2, 20))
    with torch.no_grad():
        assert_close(model(ids)[0], peer(ids).logits, "logits", 1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mixer": "spectral"}, "a stack of attention blocks"),
        ({"mixer": {"kind": "attention", "window": 9}}, r"mixer.window is 9 where Llama has None"),
        ({"mixer": {"kind": "attention", "forget_gate": True}}, "mixer.forget_gate"),
        ({"block": {"conv_width": 4}}, "block.conv_width is 4"),
        ({"block": {"order": "post"}}, "block.order"),
        ({"norm": "layer"}, "norm is .layer"),
        ({"depth": {"gated": [1]}}, "depth.gated"),
        ({"depth": {"mean_gate": True}}, "depth.mean_gate"),
        ({"depth": {"shortcuts": True}}, "depth.shortcuts is True"),
        ({"depth": {"kind": "tied", "layers": 1, "n_steps": 2}}, "a stack"),
    ],
)
def test_other_computations_are_refused_by_the_option(options, named):
    with pytest.raises(Refused, match=named):
        require_llama(LanguageModel.from_config({"hidden_size": 16, **options}))


def test_the_presets_are_llama():
    for name in ("transformer", "transformer-nano"):
        require_llama(LanguageModel.from_preset(name))


def test_the_program_names_what_it_cannot_do(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gguf_file", "stories", "--out", str(tmp_path / "out.gguf")])
    with pytest.raises(SystemExit, match="a stack of attention blocks"):
        gguf_file.main()
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("case", [*CASES, "bpe", "preset"])
def test_llama_cpp_loads_it_and_agrees(case, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, which no extra installs")
    bpe = train_bpe(iter([TEXT]), 300) if case == "bpe" else None
    options = {"vocab_size": bpe.vocab_size} if bpe is not None else CASES.get(case, {})
    if case == "preset":
        options = to_dict(LanguageModel.from_preset("transformer-nano").config)
    run = saved(tmp_path, bpe, **options)
    model = exported(run, tmp_path / "out")
    # Keys and values in float32: by default llama.cpp keeps them in half precision.
    whole = {"type_k": 0, "type_v": 0, "n_ctx": 256, "logits_all": True, "verbose": False}
    theirs = llama_cpp.Llama(str(tmp_path / "out" / "model.gguf"), **whole)
    text = "Once upon a time, naïve foxes didn't sleep."
    tokenizer = model.tokenizer
    ids = [tokenizer.eos_id, *tokenizer.encode(text)]
    assert theirs.tokenize(text.encode()) == ids
    assert theirs.detokenize(ids[1:]).decode() == text
    theirs.eval(ids)
    with torch.no_grad():
        expected = model(torch.tensor([ids]))[0][0].numpy()
    found = np.array(theirs.scores[: len(ids)])[:, : expected.shape[1]]
    assert np.abs(found - expected).max() < 1e-4 * max(1, np.abs(expected).max())
    with torch.no_grad():
        for _ in range(16):
            ours = model(torch.tensor([ids]))[0][0, -1]
            token = int(np.argmax(theirs.scores[len(ids) - 1]))
            assert ours.max() - ours[token] < 1e-4, "a greedy token differs by more than a tie within rounding"
            ids.append(token)
            theirs.eval([token])
