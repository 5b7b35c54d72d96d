"""The matrix of docs/choose.md says what the code says, in every column."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import glissando.mixers
from glissando.depth import DEPTHS
from glissando.errors import Refused
from glissando.events.model import EventConfig
from glissando.export.graph import Stepper
from glissando.mixers import MIXERS
from glissando.mixers.base import Mixer
from glissando.model import LanguageModel
from glissando.presets import RECOMMENDED, load_preset
from glissando.series.model import SeriesConfig
from glissando.state import state_bytes

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "choose.md").read_text()
COLUMNS = ("time steps", "constant state", "compiled step", "GPU kernel", "export", "recall of 8 pairs", "status")
ROWS = {
    cells[0]: dict(zip(COLUMNS, cells[1:], strict=True))
    for cells in (
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in re.findall(r"^\| `\w+` \|.*", PAGE, re.M)
    )
}
PRESETS = {"attention": "transformer-plus", "spectral": "continuous-transformer", "liquid": "liquid-ssm"}
PRESETS |= {"delta": "delta", "tau": "tauformer"}


def model_of(kind: str, **mixer: object) -> LanguageModel:
    changed = {"mixer": mixer} if mixer else {}
    return LanguageModel.from_preset(f"{PRESETS[kind]}-nano", depth={"layers": 1}, **changed)


def mixer_of(kind: str, **options: object) -> Mixer:
    return next(part for part in model_of(kind, **options).modules() if isinstance(part, Mixer))


def is_constant(model: LanguageModel) -> bool:
    few, more = (state_bytes(model(torch.zeros(1, n, dtype=torch.int64), model.init_state(1))[1]) for n in (16, 32))
    return few == more


def says(kind: str, column: str) -> bool:
    return ROWS[kind][column].split(",")[0] == "yes"


def test_the_page_names_every_mixer_and_depth():
    heading = re.search(r"^\| mixer \|(.*)\|$", PAGE, re.M)
    assert [cell.strip() for cell in heading[1].split("|")] == list(COLUMNS)
    assert set(ROWS) == set(PRESETS) == set(MIXERS)
    depths = re.search(r"The depth is another choice: .*", PAGE)
    assert set(re.findall(r"`(\w+)`", depths[0])) == set(DEPTHS)


@pytest.mark.parametrize("kind", PRESETS)
def test_time_constant_state_and_compiled_step(kind):
    model, mixer = model_of(kind), mixer_of(kind)
    assert says(kind, "time steps") == ("dt" in mixer.accepts)
    assert says(kind, "constant state") == is_constant(model)
    assert says(kind, "compiled step") == hasattr(mixer, "lower")


def test_the_exceptions_of_time_and_constant_state():
    assert ROWS["attention"]["constant state"] == "no, but with a window"
    assert is_constant(model_of("attention", window=8))
    assert ROWS["delta"]["time steps"] == "no, but with `input: impulse` or keys of its own"
    assert "dt" in mixer_of("delta", input="impulse").accepts
    assert "dt" in mixer_of("delta", keys="own").accepts


@pytest.mark.parametrize("kind", PRESETS)
def test_the_kernel_on_a_gpu(kind):
    """Triton's: the family has one, or takes the scan's, which has."""
    folder = Path(glissando.mixers.__file__).parent / kind
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    triton = (folder / "triton.py").exists() or "from glissando.kernels.scan import" in source
    other = "PyTorch's" if "scaled_dot_product_attention" in source else "tensor code"
    assert ROWS[kind]["GPU kernel"].split(",")[0] == ("Triton" if triton else other)


@pytest.mark.parametrize("kind", PRESETS)
def test_export(kind):
    """test_export.py traces each."""
    assert says(kind, "export")
    Stepper(model_of(kind), 8)


@pytest.mark.parametrize("option", ["filter", "phase_gate"])
def test_what_export_of_spectral_refuses(option):
    assert ROWS["spectral"]["export"] == "yes, but not filter and phase gate"
    with pytest.raises(Refused):
        Stepper(model_of("spectral", **{option: True}), 8)


def test_recall_is_that_of_the_pages_with_the_runs():
    table = (ROOT / "docs" / "attention.md").read_text()

    def accuracies(name: str, after: str = "") -> list[float]:
        row = table[table.index(f"| `{name}", table.index(after)) :].split("\n")[0]
        return [float(cell) for cell in re.findall(r"[01]\.\d{3}", row)]

    def span(values: list[float]) -> str:
        low, high = (f"{round(1000 * value) / 1000 + 1e-9:.2f}" for value in (min(values), max(values)))
        return low if low == high else f"{low} to {high}"

    previous = re.findall(r"\| the same with `keys: previous` \|(.*)", table)
    for kind, others in zip(("attention", "tau"), previous, strict=True):
        best = min(map(float, re.findall(r"[01]\.\d{3}", others)))
        own = span(accuracies(f"{PRESETS[kind]}-nano", "| seed 0 |"))
        assert ROWS[kind]["recall of 8 pairs"] == f"{own}; {best:.2f} with `keys: previous"
    three = accuracies("transformer-nano", "| seed 0 |")
    assert [ROWS[kind]["recall of 8 pairs"] for kind in ("spectral", "liquid")] == [
        span([value]) for value in three[1:]
    ]


def test_status_is_what_commands_take_by_default():
    recommended = {
        each["kind"] if isinstance(each, dict) else each for each in load_preset(RECOMMENDED)["model"]["mixer"]
    }
    assert recommended == {
        kind for kind, row in ROWS.items() if row["status"] in ("recommended", "recommended beside delta")
    }
    for config in (SeriesConfig, EventConfig):
        default = next(each for each in fields(config) if each.name == "mixer").default_factory()
        assert ROWS[MIXERS.kind_of(default)]["status"] == "recommended for series and events"
    assert ROWS["attention"]["status"] == "the baseline"
