"""A series model as one file of ONNX, which computes what the model streams."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from test_series_forecast import trained, visits

from glissando.cli import main
from glissando.errors import Refused
from glissando.export.series import METADATA, Check, Observer, _observations, export_series
from glissando.series.forecast import SeriesRun, probabilities
from glissando.series.stream import observe

MIXERS: dict[str, Any] = {
    "liquid": "liquid",
    "impulses": {"kind": "liquid", "input": "impulse"},
    "delta": {"kind": "delta", "heads": 2},
    "spectral": "spectral",
    "attention": {"kind": "attention", "heads": 2, "window": 4, "forget_gate": True},
}


def session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


class Device:
    """What a program without glissando does with the file: it reads the metadata, and keeps the state."""

    def __init__(self, path: Path) -> None:
        self.session = session(path)
        self.about = json.loads(self.session.get_modelmeta().custom_metadata_map[METADATA])
        self.state = {
            part["input"]: np.full([1, *part["shape"][1:]], part["start"], part["dtype"])
            for part in self.about["state"]
        }

    def step(self, **inputs: Any) -> dict[str, np.ndarray]:
        types = {each.name: each.type for each in self.session.get_inputs()}
        kinds = {"tensor(float)": np.float32, "tensor(bool)": bool, "tensor(int64)": np.int64}
        feeds = {name: np.asarray([x], kinds[types[name]]) for name, x in inputs.items()}
        found = dict(
            zip(
                [each.name for each in self.session.get_outputs()],
                self.session.run(None, feeds | self.state),
                strict=True,
            )
        )
        self.state = {part["input"]: found.pop(part["output"]) for part in self.about["state"]}
        return {name: part[0] for name, part in found.items()}


def rows_of(frame: pandas.DataFrame, count: int = 20) -> list[dict[str, Any]]:
    return [row.to_dict() for _, row in frame[frame["who"] == "p1"].head(count).iterrows()]


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(("dt", "scale"), [("log", "series"), pytest.param("input", "all", marks=pytest.mark.slow)])
def test_the_form_that_is_traced_computes_what_the_model_does(
    name: str, dt: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(visits(people=4), folder=tmp_path, scale=scale, model={"mixer": MIXERS[name], "dt": dt})
    run = SeriesRun(run.model.float(), run.encoding, run.data)
    observer = Observer(run)
    names = list(observer.inputs)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    steps, state, found = list(_observations(run.model, names)), observer.start(2), []
    with torch.no_grad():
        for given in steps:
            _, parameters, *state = observer(*given.values(), *state)
            found.append(parameters)
    monkeypatch.undo()
    assert [tuple(x.shape[1:]) for x in state] == [leaf.shape for leaf in observer.leaves]
    whole: dict[str, Any] = {
        n: steps[0][n] if n == "static" else torch.stack([each[n] for each in steps], 1) for n in names
    }
    with torch.no_grad():
        expected = run.model(whole.pop("values"), **whole)[0]
    scale = run.model.output_scale.unsqueeze(-1)
    assert ((torch.stack(found, 1) - expected).abs() / (scale + expected.abs())).max() < 1e-5


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_classes_of_series_are_those_of_all_steps_so_far(pooling: str, tmp_path: Path) -> None:
    frame = visits(people=4)
    frame["kind"] = np.where(frame["who"].isin(["p0", "p2"]), "x", "y")
    run = trained(
        frame, folder=tmp_path, target=["kind"], task="classification", model={"pooling": pooling, "head": "point"}
    )
    found = probabilities(run, run.read(frame))
    live = None
    for row in rows_of(frame, 40):
        logits, live = observe(run, live, row)
    assert np.allclose(logits.softmax(-1).numpy(), found[1], atol=1e-6)
    run = SeriesRun(run.model.float(), run.encoding, run.data)
    observer = Observer(run)
    state, own = observer.start(2), []
    with torch.no_grad():
        for given in _observations(run.model, list(observer.inputs)):
            p, *state = observer(*given.values(), *state)
            own.append(given)
        whole: dict[str, Any] = {
            n: own[0][n] if n == "static" else torch.stack([each[n] for each in own], 1) for n in observer.inputs
        }
        y = run.model(whole.pop("values"), **whole)[0]
    expected = run.model.pooled(y, torch.ones(y.shape[:2], dtype=torch.bool)).softmax(-1)
    assert torch.allclose(p, expected, atol=1e-6)


@pytest.mark.parametrize("mixer", ["attention", "tau"])
def test_a_state_that_grows_is_refused(mixer: str, tmp_path: Path) -> None:
    run = trained(visits(people=4), folder=tmp_path, model={"mixer": {"kind": mixer, "heads": 2}})
    with pytest.raises(Refused, match=f"{mixer}.*keeps every observation.*--model.mixer.window"):
        export_series(run, tmp_path / "step.onnx")
    assert not (tmp_path / "step.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_a_file_streams_as_the_model_does(name: str, tmp_path: Path) -> None:
    frame = visits(seed=1, people=2)
    frame["kind"] = np.where(frame["a"] > 100, "high", "low")
    run = trained(frame, folder=tmp_path, categorical=["kind"], model={"mixer": MIXERS[name]})
    run = SeriesRun(run.model.float(), run.encoding, run.data)
    check = export_series(run, tmp_path / "step.onnx")
    assert check.largest < 1e-5
    device, live, sizes = Device(tmp_path / "step.onnx"), None, set()
    assert device.about["columns"] == ["a", "b"]
    assert device.about["time"] == {"column": "when", "form": "date", "unit": "s"}
    assert device.about["head_parameters"] == ["location", "scale", "degrees of freedom"]
    names, before = device.about["columns"], None
    for row in rows_of(frame):
        horizon, ahead = [3600.0, 7200.0], [[row["hour"] + 1], [row["hour"] + 2]]
        expected, live = observe(run, live, row, torch.tensor(horizon), torch.tensor(ahead, dtype=torch.float64))
        known = device.about["categories"]["kind"]
        now = pandas.Timestamp(row["when"])
        given: dict[str, Any] = {
            "static": [row["age"]], "future": [row["hour"]], "horizon": horizon, "ahead": ahead,
        }  # fmt: skip
        if before is None:
            device.step(values=[0, 0], observed=[False, False], dt=0, codes=[0], **given)
        found = device.step(
            values=[row[n] for n in names], observed=[row[n] == row[n] for n in names],
            dt=0 if before is None else (now - before).total_seconds(), codes=[known.index(row["kind"])], **given,
        )  # fmt: skip
        before = now
        scale = run.model.output_scale.numpy()
        assert np.abs((found["value"] - run.model.distribution.mean(expected).numpy()) / scale).max() < 1e-5
        assert np.allclose(found["parameters"], expected.numpy(), rtol=1e-5, atol=1e-5)
        sizes.add(sum(part.nbytes for part in device.state.values()))
    assert len(sizes) == 1


def test_the_command_writes_a_file_that_the_export_verb_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(visits(people=4), folder=tmp_path)
    run.save(tmp_path / "run")
    made: list[Path] = []

    def write(run: SeriesRun, out: Path, status: object) -> Check:
        made.append(Path(out))
        return Check(48, 1e-7)

    monkeypatch.setattr("glissando.export.series.export_series", write)
    assert main(["series", "export", str(tmp_path / "run"), "--out", str(tmp_path / "step.onnx")]) == 0
    assert made == [tmp_path / "step.onnx"]
    assert "48 generated observations" in capsys.readouterr().out
    for arguments, message in {
        ("--out", str(tmp_path / "step")): "ends in .onnx",
        (): "--out is missing",
        ("--out", "a.onnx", "--horizon", "1"): "--horizon is not an option of `series export`",
    }.items():
        assert main(["series", "export", str(tmp_path / "run"), *arguments]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), "--to", "onnx", "--out", str(tmp_path / "folder")]) == 1
    assert "glissando series export" in capsys.readouterr().err


@pytest.mark.slow
def test_the_pages_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(visits(people=4), folder=tmp_path, static=[], future=[], model={"head": "point"})
    export_series(run, tmp_path / "step.onnx")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "export.md").read_text()
    program: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], program)
    assert program["value"].shape == (2, 2)
    row = {"who": "p", "when": "2026-01-31", "a": 1.2, "b": None}
    expected, _ = observe(run, None, row, torch.tensor([0.5, 1.0]))
    assert np.allclose(program["value"], expected[..., 0].numpy(), rtol=1e-4)
