"""A series model as one file of ONNX: an observation and the state in, the forecasts and the new state out.

    values (B, K), observed (B, K) bool, dt (B)         what was observed, and the time since the observation before
    codes (B, Q), static (B, P), static_codes (B, R), future (B, U)      where the model has such columns
    horizon (B, J), ahead (B, J, U)                     of a model that forecasts: the times asked about
    state.NAME -> next.NAME                             zeros before the first observation
    value, parameters (B, J, O, ...), or probabilities (B, C)

B and J are free. Names of columns, units, categories and shapes are in the file's metadata, `METADATA`, as JSON. The
state has one size however long a series is: a mixer whose state grows is refused.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.errors import Refused
from glissando.export import onnx
from glissando.export.forms import grows, prepared
from glissando.export.graph import BATCH, Leaf, filled, leaf_of, named, traced
from glissando.mixers import MIXERS
from glissando.mixers.attention.export import FixedAttention
from glissando.series.forecast import SeriesRun, require_absent
from glissando.series.history import Own
from glissando.series.model import SeriesModel
from glissando.series.stream import averages
from glissando.state import map_state
from glissando.storage import write_atomic

#: the key of the file's metadata
METADATA = "glissando.series"
#: the free axis of the times that are asked about
HORIZONS = "horizons"
#: the largest difference of an answer from the model's, over its size and the output's deviation together
TOLERANCE = 1e-4
_ROWS, _STEPS, _ASKED = 2, 24, 3
_TYPES = {"observed": torch.bool, "codes": torch.int64, "static_codes": torch.int64}


class _Step(SeriesModel):
    """One step of the model, whose questions are answered together, so that their number is free."""

    def __init__(self, model: SeriesModel) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(model))

    def _answers(self, h: Tensor, units: Own, horizon: Tensor, facts: Tensor, ahead: Tensor | None) -> Tensor:
        number = horizon.shape[2]
        units = map_state(lambda part: part.expand(-1, number, -1), units)
        ahead = None if ahead is None else ahead[:, 0]
        return self._answer(h.expand(-1, number, -1), units, horizon[:, 0], facts, ahead).unsqueeze(1)


class Observer(nn.Module):
    """A step of a run as a function of tensors alone. Raises Refused for a state that grows."""

    def __init__(self, run: SeriesRun) -> None:
        super().__init__()
        self.run = run
        model = copy.deepcopy(run.model).float()
        if grows(model):
            kinds = ", ".join(dict.fromkeys(MIXERS.kind_of(options) for options in model.config.mixers))
            raise Refused(
                f"the state of this model ({kinds}) keeps every observation, and an exported one has one size: train "
                "attention with --model.mixer.window N, or another mixer, such as the default liquid"
            )
        self.model = _Step(prepared(model, 2))
        timed = self.model._duration(torch.ones(1)) is not None
        for part in self.model.modules():
            if isinstance(part, FixedAttention):
                part.timed = timed
        self._tree = self.model.init_state(1)
        self.sums = averages(run)
        self.leaves = [leaf_of(name, value) for name, value in named(self._tree)]
        if self.sums:
            self.leaves.append(Leaf("logits", torch.float32, (model.config.outputs,), 0.0))

    def forward(self, values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(self.inputs, (values, *rest), strict=False))
        flat = rest[len(self.inputs) - 1 :]
        parts: dict[str, Any] = {
            name: part if name.startswith("static") else part.unsqueeze(1) for name, part in inputs.items()
        }
        state = filled(self._tree, iter(flat), None)
        y, after = self.model(parts.pop("values"), state, **parts)
        assert after is not None
        following = [value for _, value in named(after)]
        if self.sums:
            following.append(flat[-1] + y[:, 0])
            y = (following[-1] / after.position.unsqueeze(-1)).unsqueeze(1)
        return *self._answer(y[:, 0]), *following

    def _answer(self, y: Tensor) -> tuple[Tensor, ...]:
        model = self.model
        if self.run.encoding.classes:
            return (y.softmax(-1),)
        return (y,) if model.config.head == "point" else (model.distribution.mean(y), y)

    # ------------------------------------------------------------------ names and shapes

    @property
    def inputs(self) -> dict[str, list[str | int]]:
        """Shapes of the inputs beside the state, by name."""
        config = self.model.config
        asked: list[str | int] = [BATCH, HORIZONS]
        sizes: dict[str, tuple[list[str | int], bool]] = {
            "values": ([BATCH, config.inputs], True),
            "observed": ([BATCH, config.inputs], True),
            "dt": ([BATCH], True),
            "codes": ([BATCH, len(config.categories)], bool(config.categories)),
            "static": ([BATCH, config.static], bool(config.static)),
            "static_codes": ([BATCH, len(config.static_categories)], bool(config.static_categories)),
            "future": ([BATCH, config.future], bool(config.future)),
            "horizon": (asked, config.forecast),
            "ahead": ([*asked, config.future], config.forecast and bool(config.future)),
        }
        return {name: shape for name, (shape, taken) in sizes.items() if taken}

    @property
    def outputs(self) -> dict[str, list[str | int]]:
        """Shapes of the outputs beside the state, by name."""
        config, head = self.model.config, self.model.distribution
        if self.run.encoding.classes:
            return {"probabilities": [BATCH, config.outputs]}
        shape: list[str | int] = [BATCH, *([HORIZONS] if config.forecast else []), config.outputs]
        return {"value": shape} | ({} if config.head == "point" else {"parameters": [*shape, head.width]})

    def metadata(self) -> dict[str, Any]:
        """What a program needs to know to run the graph."""
        from glissando import __version__

        run, encoding, config = self.run, self.run.encoding, self.model.config
        names = {"gaussian": ["mean", "deviation"], "student": ["location", "scale", "degrees of freedom"]}
        parameters = (
            [f"q{level:g}" for level in config.levels] if config.head == "quantiles" else names.get(config.head)
        )
        known = {name: ["missing", "unknown", *each] for name, each in encoding.categorical.items()}
        facts = {name: ["missing", "unknown", *each] for name, each in encoding.static_categorical.items()}
        first = "call once with nothing observed and dt 0, for what does not vary, before the first observation"
        return {
            "format": 1, "made_by": f"glissando {__version__}", "task": encoding.task, "label": encoding.label,
            "parameters": self.model.num_parameters(),
            "time": {"column": run.data.time, "form": encoding.time_form, "unit": encoding.unit},
            "columns": encoding.columns, "target": encoding.target, "categories": known, "static": encoding.static,
            "static_categories": facts, "future": encoding.future, "classes": encoding.classes,
            "head": None if encoding.classes else config.head, "head_parameters": parameters,
            "inputs": self.inputs, "outputs": self.outputs, "state": [leaf.described for leaf in self.leaves],
            "begin": first if config.forecast else "a series begins with its first observation and dt 0",
        }  # fmt: skip

    # ------------------------------------------------------------------ tracing and running

    def start(self, rows: int) -> list[Tensor]:
        """The state of so many rows before the first observation."""
        return [torch.full((rows, *leaf.shape), leaf.start, dtype=leaf.dtype) for leaf in self.leaves]

    def trace(self) -> torch.export.ExportedProgram:
        """Raises Refused for a model whose forward cannot be traced."""
        batch, horizons = torch.export.Dim(BATCH, min=1), torch.export.Dim(HORIZONS, min=1)
        # Sizes of an example are those that no other axis has, and not 1, which PyTorch would take for fixed.
        sizes = {BATCH: 3, HORIZONS: 5}
        arguments = [
            torch.ones([sizes.get(str(n), n) for n in shape], dtype=_TYPES.get(name, torch.float32))  # type: ignore[arg-type]
            for name, shape in self.inputs.items()
        ]
        free = {BATCH: batch, HORIZONS: horizons}
        axes = [{i: free[n] for i, n in enumerate(shape) if isinstance(n, str)} for shape in self.inputs.values()]
        state = self.start(3)
        return traced(self, (*arguments, *state), [*axes, *({0: batch} for _ in state)])


class Check(NamedTuple):
    """largest  difference of an answer from the model's, over its size and the output's deviation together"""

    observations: int
    largest: float

    def lines(self) -> list[str]:
        return [
            f"checked with ONNX Runtime on {self.observations} generated observations: answers differ from the model's "
            f"by at most {self.largest:.1e} of their size"
        ]


def export_series(run: SeriesRun, out: str | Path) -> Check:
    """Write the step of a run as the ONNX file `out`, in float32, once its check has passed.

    Raises RunError where there is a file, Refused for a model that cannot be exported and for a check that fails,
    MissingExtraError where a package is missing.
    """
    out = require_absent(out)
    onnx.require_installed()
    observer = Observer(run)
    states: onnx.Shapes = {leaf.input: [BATCH, *leaf.shape] for leaf in observer.leaves}
    following: onnx.Shapes = {leaf.output: [BATCH, *leaf.shape] for leaf in observer.leaves}
    model = onnx.translated(observer.trace(), observer.inputs | states, observer.outputs | following)
    model.metadata_props[METADATA] = json.dumps(observer.metadata())
    import onnx_ir

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.onnx"
        onnx_ir.save(model, path)
        outcome = _checked(observer, path)
        write_atomic(out, path.read_bytes())
    return outcome


def _checked(observer: Observer, path: Path) -> Check:
    """Raises Refused where the file does not compute what the model does."""
    session, names = onnx.session(path), list(observer.inputs)
    model = copy.deepcopy(observer.run.model).float().eval()
    state, initial, largest = observer.start(_ROWS), model.init_state(_ROWS), 0.0
    total = torch.zeros(_ROWS, model.config.outputs)
    for number, inputs in enumerate(_observations(model, names)):
        feeds = {**inputs, **{leaf.input: value for leaf, value in zip(observer.leaves, state, strict=True)}}
        answers = [torch.from_numpy(part) for part in session.run(None, {n: x.numpy() for n, x in feeds.items()})]
        state = answers[len(observer.outputs) :]
        parts: dict[str, Any] = {n: x if n.startswith("static") else x.unsqueeze(1) for n, x in inputs.items()}
        with torch.no_grad():
            y, after = model(parts.pop("values"), initial, **parts)
            assert after is not None
            y, initial, total = y[:, 0], after, total + y[:, 0] if observer.sums else total
            expected = observer._answer(total / (number + 1) if observer.sums else y)
        scale = torch.ones(()) if observer.run.encoding.classes else model.output_scale
        for one, other, unit in zip(expected, answers, (scale, scale.unsqueeze(-1)), strict=False):
            size = one.abs() + unit
            largest = max(largest, float(((other - one).abs() / size).nan_to_num(nan=torch.inf).max()))
    if not largest <= TOLERANCE:
        raise Refused(
            f"the check failed, so that nothing was written; this is a defect, please report it: answers differ by "
            f"{largest:.1e} of their size"
        )
    return Check(_ROWS * _STEPS, largest)


def _observations(model: SeriesModel, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Inputs like those of training, by the model's scales: first nothing, then values of which some are missing."""
    config, draw = model.config, torch.Generator().manual_seed(0)

    def normal(mean: Tensor, scale: Tensor, *shape: int) -> Tensor:
        return mean + scale * torch.randn(*shape, len(mean), generator=draw)

    def codes(sizes: list[int]) -> Tensor:
        return torch.stack([torch.randint(size, (_ROWS,), generator=draw) for size in sizes], 1)

    def times(*shape: int) -> Tensor:
        return model.time_scale * torch.empty(shape).exponential_(generator=draw)

    static = normal(model.static_mean, model.static_scale, _ROWS)
    static[:1, :1] = torch.nan
    facts = {"static": static, "static_codes": codes(config.static_categories) if config.static_categories else None}
    for step in range(_STEPS):
        values = normal(model.input_mean, model.input_scale, _ROWS)
        observed = torch.rand(values.shape, generator=draw) < (0.7 if step else 0.0)
        inputs = {
            "values": values.where(observed, torch.nan), "observed": observed, "dt": times(_ROWS) * (step > 1),
            "codes": codes(config.categories) if config.categories else None, **facts,
            "future": normal(model.future_mean, model.future_scale, _ROWS), "horizon": times(_ROWS, _ASKED),
            "ahead": normal(model.future_mean, model.future_scale, _ROWS, _ASKED),
        }  # fmt: skip
        yield {name: part for name, part in inputs.items() if name in names and part is not None}
