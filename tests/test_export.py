"""Exported models compute what the model computes; what cannot be exported says so."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from slow import slow_where
from subjects import CASES, PRESETS, build, random_ids
from tolerances import assert_close

import glissando
from glissando.cli import main
from glissando.errors import ConfigError
from glissando.export import PHASES, Refused, export, onnx
from glissando.export.graph import Stepper, grows
from glissando.model import LanguageModel
from glissando.presets import preset_names
from glissando.quantisation import quantised, restored
from glissando.runs import Run

REFUSED = [
    name
    for name in CASES
    if "dense" in name
    or name in ("mixer:spectral-published", "mixer:spectral-everything", "preset:continuous-transformer")
]


def saved(folder: Path, name: str = "run", **options: Any) -> Path:
    """A small run with weights that matter."""
    torch.manual_seed(0)
    model = LanguageModel.from_config({"hidden_size": 16, "depth": {"layers": 2}, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save(folder / name)
    return folder / name


def run_command(*arguments: object) -> int:
    return main([*map(str, arguments)])


@pytest.fixture
def traced(monkeypatch):
    """What torch.export sees, without its cost: the same branches, and loops over time as plain ones."""

    def scan(combine, carry, inputs, constants):
        outputs = []
        for now in zip(*inputs, strict=True):
            *carry, y = combine(*carry, *now, *constants)
            outputs.append(y)
        return *carry, torch.stack(outputs)

    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(importlib.import_module("torch._higher_order_ops.scan"), "scan_op", scan)


# A form for export belongs to a mixer's variant, so that no case stands for another but for presets.
@pytest.mark.parametrize("case", slow_where(PRESETS, [case for case in CASES if case not in REFUSED]))
def test_the_form_that_is_traced_computes_what_the_model_does(case, traced, monkeypatch):
    model = build(case)
    stepper, ids = Stepper(model, capacity=9), random_ids(model, 2, 9, 1)
    control = [torch.randn(2, len(stepper.dials)).double()] if stepper.dials else []
    state = [x.double() if x.is_floating_point() else x for x in stepper.start(2)]
    with torch.no_grad():
        logits, *state = stepper(ids[:, :4], *control, *state)
        parts = [logits]
        for t in range(4, 7):
            logits, *state = stepper(ids[:, t : t + 1], *control, *state)
            parts.append(logits)
        logits, *state = stepper(ids[:, 7:], *control, *state)
    monkeypatch.undo()
    with torch.no_grad():
        expected = model(ids, control=control[0] if control else None)[0]
    assert_close(torch.cat([*parts, logits], 1), expected, case)
    assert [tuple(x.shape[1:]) for x in state] == [leaf.shape for leaf in stepper.leaves]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_says_which_part_and_what_to_do(case):
    with pytest.raises(
        Refused, match=r"mixer `(liquid` with mixer.dynamics `dense`|spectral` with mixer.filter).*cannot be exported"
    ):
        Stepper(build(case), capacity=9)


@pytest.mark.slow
def test_a_trace_drops_nothing_that_was_compiled():
    compiled = []

    def counting(graph, _):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=counting)
    model = LanguageModel.from_config({"hidden_size": 8, "mixer": "spectral", "depth": {"layers": 1}}).eval()
    for _ in range(2):
        function(torch.ones(2))
        function(torch.ones(2))
        Stepper(model, capacity=4).trace()
    assert len(compiled) == 1


def test_models_with_loops_over_time_are_traced_one_after_another():
    for mixer in ("delta", {"kind": "delta", "heads": 2}):
        model = LanguageModel.from_config({"hidden_size": 16, "mixer": mixer, "depth": {"layers": 1}}).eval()
        Stepper(model, capacity=9, one_row=True).trace()


@pytest.mark.parametrize("mixer", ["attention", "tau"])
def test_a_token_behind_the_last_slot_is_an_error(mixer, traced):
    model = LanguageModel.from_config({"hidden_size": 16, "mixer": mixer, "depth": {"layers": 1}}).eval()
    stepper = Stepper(model, capacity=4)
    _, *state = stepper(torch.zeros(1, 4, dtype=torch.int64), *stepper.start(1))
    with pytest.raises(RuntimeError, match="out of bounds"):
        stepper(torch.zeros(1, 1, dtype=torch.int64), *state)


@pytest.mark.slow
def test_onnx_from_the_command_to_the_example(tmp_path, capsys):
    run = saved(tmp_path, mixer=[{"kind": "attention", "heads": 2, "forget_gate": True}], depth={"layers": 1})
    out = tmp_path / "onnx"
    assert run_command("export", run, "--to", "onnx", "--out", out, "--capacity", 60) == 0
    printed = capsys.readouterr()
    assert "ONNX Runtime" in printed.out
    for phase in ("tracing the model", "translating the graph to ONNX", "checking the graph"):
        assert phase in printed.err
    assert len(printed.err.splitlines()) == PHASES["onnx"] + 1
    made = json.loads((out / "export.json").read_text())
    assert made["capacity"] == 60
    assert made["tokenizer"] == {"kind": "bytes", "file": "tokenizer.json", "end": 0}
    assert made["check"]["equal"] == made["check"]["tokens"] > 0
    assert abs(made["check"]["model"] - made["check"]["exported"]) < 1e-4
    names = {part["input"] for part in made["state"]}
    assert {"state.position", "state.depth.0.mixer.k"} <= names
    assert "state.depth.0.mixer.position" not in names
    import onnxruntime

    session = onnxruntime.InferenceSession(out / made["file"])
    assert {i.name for i in session.get_inputs()} == names | {"ids"}
    assert [i.shape[0] for i in session.get_inputs()] == ["batch"] * len(session.get_inputs())
    said = subprocess.run([sys.executable, out / "example.py", "Once"], capture_output=True, text=True, timeout=100)
    # The model is no writer: it goes on beyond its room, or ends.
    assert said.returncode == 0 or "holds 60 tokens" in said.stderr, said.stderr
    assert run_command("export", run, "--to", "onnx", "--out", out) == 1
    assert "nothing is overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_smaller_weights_load_again(precision, tmp_path, capsys):
    run, out = saved(tmp_path, mixer="liquid"), tmp_path / precision
    assert run_command("export", run, "--to", f"safetensors-{precision}", "--out", out) == 0
    printed = capsys.readouterr()
    assert "difference" in printed.out
    assert len(printed.err.splitlines()) == PHASES[f"safetensors-{precision}"] + 1  # what is written, at the end
    model, small, ids = glissando.load(run), glissando.load(out), torch.randint(256, (2, 20))
    weights = zip(model.named_parameters(), small.parameters(), strict=True)
    for (name, expected), found in weights:
        bound = {"bf16": 2**-8, "int8": 1 / 253}[precision] * expected.abs().max() if expected.ndim == 2 else 0
        assert (expected - found).abs().max() <= bound, name
    assert_close(small(ids)[0], model(ids)[0], tolerance=0.1)
    size = {"bf16": 0.65, "int8": 0.45}[precision]
    assert (out / "model.safetensors").stat().st_size < size * (run / "model.safetensors").stat().st_size
    assert run_command("evaluate", out, "--data.kind", "stories", "--data.valid_tokens", 2000) in (0, 2)
    assert glissando.generate(small, ["a"], max_tokens=3, seed=0)


def test_int8_is_within_half_a_step_and_keeps_rows_of_zeros():
    weight = torch.randn(5, 7)
    weight[2] = 0
    q, scale = quantised(weight)
    assert (weight - q * scale.unsqueeze(1)).abs().le(0.5001 * scale.unsqueeze(1)).all()
    assert restored({"a.int8": q, "a.int8_scale": scale, "b": scale})["a"][2].eq(0).all()


def test_options_that_would_do_nothing_are_refused(tmp_path, capsys):
    run, out = saved(tmp_path, mixer="spectral"), tmp_path / "out"
    for arguments, said in {
        ("--to", "onnx", "--capacity", "64"): "would do nothing",
        ("--to", "safetensors-int8", "--capacity", "64"): "would do nothing: it is for --to onnx and web",
        ("--to", "onx"): "Did you mean 'onnx'",
        (): "--to is missing",
    }.items():
        assert run_command("export", run, "--out", out, *arguments) == 2
        assert said in capsys.readouterr().err
    assert run_command("export", run, "--to", "onnx") == 2
    assert not out.exists()


def test_a_check_that_fails_writes_nothing(tmp_path, monkeypatch):
    class Wrong:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, *arguments: Any) -> list[Any]:
            return [torch.randn(*arguments[0].shape, 256), *arguments[1:]]

    monkeypatch.setattr(onnx, "translated", lambda step, status: None)
    monkeypatch.setattr("onnx_ir.save", lambda *_, **__: None)
    monkeypatch.setattr(onnx, "OnnxRuntime", Wrong)
    run = saved(tmp_path, mixer="spectral")
    with pytest.raises(Refused, match="the check failed, so that nothing was written"):
        export(glissando.load(run), Run.open(run), "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_a_state_that_grows_has_a_capacity():
    def of(mixer: Any) -> LanguageModel:
        return LanguageModel.from_config({"hidden_size": 16, "mixer": mixer, "depth": {"layers": 1}})

    assert grows(of("attention"))
    assert grows(of("tau"))
    assert not any(grows(of(m)) for m in ("spectral", "liquid", "delta", {"kind": "attention", "window": 4}))
    with pytest.raises(ConfigError, match="at least 2"):
        export(of("attention"), None, "onnx", "nowhere-yet", 1)  # type: ignore[arg-type]


def test_a_form_of_ones_own(monkeypatch):
    model = LanguageModel.from_config({"hidden_size": 16, "mixer": "attention", "depth": {"layers": 1}})

    def form(mixer: torch.nn.Module, capacity: int) -> torch.nn.Module:
        raise Refused(f"a form for {capacity}")

    monkeypatch.setattr(type(model.depth.blocks[0].mixer), "export_form", form)
    with pytest.raises(Refused, match="a form for 9"):
        Stepper(model, capacity=9)


SLOW = {
    **{f"mixer-{name}": {"mixer": name} for name in ("spectral", "liquid", "delta", "tau")},
    "pairs": {"mixer": {"kind": "spectral", "projections": False}},
    "window": {"mixer": {"kind": "attention", "window": 7, "keys": "previous", "forget_gate": True}},
    "delta-rotate": {"mixer": {"kind": "delta", "transition": "rotate", "writes": 2, "heads": 2}},
    "learned-positions": {"max_length": 100, "mixer": {"kind": "attention", "rope": False}},
    "tied": {"mixer": "spectral", "depth": {"kind": "tied", "layers": 1, "n_steps": 2}, "block": {"conv_width": 4}},
    "flow": {"mixer": "attention", "depth": {"kind": "flow", "layers": 2, "n_steps": 2, "control": ["mood"]}},
    "mean-gate": {"mixer": "liquid", "depth": {"layers": 2, "mean_gate": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_every_mixer_and_depth_in_its_runtime(case, tmp_path):
    run, out = saved(tmp_path, **SLOW[case]), tmp_path / "out"
    assert run_command("export", run, "--to", "onnx", "--out", out) == 0
    done = subprocess.run([sys.executable, out / "example.py", "Once"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 or "export with a larger --capacity" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in preset_names() if name.endswith("-nano")])
def test_every_nano_preset_in_onnx_runtime(preset, tmp_path):
    torch.manual_seed(0)
    LanguageModel.from_preset(preset).save(tmp_path / "run")
    out = tmp_path / "out"
    assert run_command("export", tmp_path / "run", "--to", "onnx", "--out", out) == 0
    made = json.loads((out / "export.json").read_text())
    assert made["check"]["equal"] == made["check"]["tokens"] > 0


def test_the_configuration_goes_along(tmp_path):
    run, out = saved(tmp_path, mixer="spectral"), tmp_path / "out"
    assert run_command("export", run, "--to", "safetensors-bf16", "--out", out) == 0
    given, kept = (yaml.safe_load((place / "config.yaml").read_text()) for place in (run, out))
    assert kept["model"] == given["model"]
