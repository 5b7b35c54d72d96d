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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from glissando.errors import Refused
from glissando.export import onnx
from glissando.export.graph import BATCH, HORIZONS, Leaf, Step, filled, grows, named, prepared
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
#: the largest difference of an answer from the model's, over its size and the output's deviation together
TOLERANCE = 1e-4
_ROWS, _STEPS, _ASKED = 2, 24, 3


class _OneStep(SeriesModel):
    """One step of the model, whose questions are answered together, so that their number is free."""

    def __init__(self, model: SeriesModel) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(model))

    def _answers(self, h: Tensor, units: Own, horizon: Tensor, facts: Tensor, ahead: Tensor | None) -> Tensor:
        number = horizon.shape[2]
        units = map_state(lambda part: part.expand(-1, number, -1), units)
        ahead = None if ahead is None else ahead[:, 0]
        return self._answer(h.expand(-1, number, -1), units, horizon[:, 0], facts, ahead).unsqueeze(1)


class Observer(Step):
    """A step of a run as a function of tensors alone. Raises Refused for a state that grows."""

    model: SeriesModel

    def __init__(self, run: SeriesRun) -> None:
        model = copy.deepcopy(run.model).float()
        if grows(model):
            kinds = ", ".join(dict.fromkeys(MIXERS.kind_of(options) for options in model.config.mixers))
            raise Refused(
                f"the state of this model ({kinds}) keeps every observation, and an exported one has one size: train "
                "attention with --model.mixer.window N, or another mixer, such as the default liquid"
            )
        step = _OneStep(prepared(model, 2))
        for part in step.modules():
            if isinstance(part, FixedAttention):
                part.timed = step._duration(torch.ones(1)) is not None
        super().__init__(step)
        self.run, self.sums, config = run, averages(run), model.config
        sizes: dict[str, list[str | int]] = {
            "values": [config.inputs], "observed": [config.inputs], "dt": [], "codes": [len(config.categories)],
            "static": [config.static], "static_codes": [len(config.static_categories)], "future": [config.future],
        }  # fmt: skip
        asked: list[str | int] = [HORIZONS] if config.forecast else []
        if asked:
            sizes |= {"horizon": asked, "ahead": [*asked, config.future]}
        self.inputs = {name: [BATCH, *shape] for name, shape in sizes.items() if 0 not in shape}
        self.outputs = {"value": [BATCH, *asked, config.outputs]}
        if run.encoding.classes:
            self.outputs = {"probabilities": [BATCH, config.outputs]}
        elif config.head != "point":
            self.outputs["parameters"] = [BATCH, *asked, config.outputs, step.distribution.width]
        if self.sums:
            self.leaves.append(Leaf("logits", torch.float32, (model.config.outputs,), 0.0))

    def forward(self, values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(self.inputs, (values, *rest), strict=False))
        flat = rest[len(self.inputs) - 1 :]
        parts: dict[str, Any] = {
            name: part if name.startswith("static") else part.unsqueeze(1) for name, part in inputs.items()
        }
        state = filled(self.tree, iter(flat), None)
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

    def metadata(self) -> dict[str, Any]:
        """What a program needs to know to run the graph."""
        from glissando import __version__

        run, encoding, config = self.run, self.run.encoding, self.model.config
        names = {"gaussian": ["mean", "deviation"], "student": ["location", "scale", "degrees of freedom"]}
        parameters = (
            [f"q{level:g}" for level in config.levels] if config.head == "quantiles" else names.get(config.head)
        )
        known, facts = (
            {name: ["missing", "unknown", *each] for name, each in categories.items()}
            for categories in (encoding.categorical, encoding.static_categorical)
        )
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


class Check(NamedTuple):
    """largest  difference of an answer from the model's, over its size and the output's deviation together"""

    observations: int
    largest: float

    def lines(self) -> list[str]:
        return [
            f"checked with ONNX Runtime on {self.observations} generated observations: answers differ from the model's "
            f"by at most {self.largest:.1e} of their size"
        ]


def export_series(run: SeriesRun, out: str | Path, status: Callable[[str], None] = lambda _: None) -> Check:
    """Write the step of a run as the ONNX file `out`, in float32, once its check has passed.

    status  takes what begins: the three phases of `--to onnx`

    Raises RunError where there is a file, Refused for a model that cannot be exported and for a check that fails,
    MissingExtraError where a package is missing.
    """
    out = require_absent(out)
    onnx.require_installed()
    observer = Observer(run)
    model = onnx.translated(observer, status)
    model.metadata_props[METADATA] = json.dumps(observer.metadata())
    import onnx_ir

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.onnx"
        onnx_ir.save(model, path)
        status("checking the graph against the model")
        outcome = _checked(observer, path)
        write_atomic(out, path.read_bytes())
    return outcome


def _checked(observer: Observer, path: Path) -> Check:
    """Raises Refused where the file does not compute what the model does."""
    exported = onnx.OnnxRuntime(path)
    model = copy.deepcopy(observer.run.model).float().eval()
    state, initial, largest = observer.start(_ROWS), model.init_state(_ROWS), 0.0
    total = torch.zeros(_ROWS, model.config.outputs)
    for number, inputs in enumerate(_observations(model, list(observer.inputs))):
        answers = exported(*inputs.values(), *state)
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
        return (torch.rand(_ROWS, len(sizes), generator=draw) * torch.tensor(sizes)).long()

    def times(*shape: int) -> Tensor:
        return model.time_scale * torch.empty(shape).exponential_(generator=draw)

    static = normal(model.static_mean, model.static_scale, _ROWS)
    static[:1, :1] = torch.nan
    facts = {"static": static, "static_codes": codes(config.static_categories)}
    for step in range(_STEPS):
        values = normal(model.input_mean, model.input_scale, _ROWS)
        observed = torch.rand(values.shape, generator=draw) < (0.7 if step else 0.0)
        inputs = {
            "values": values.where(observed, torch.nan), "observed": observed, "dt": times(_ROWS) * (step > 1),
            "codes": codes(config.categories), **facts,
            "future": normal(model.future_mean, model.future_scale, _ROWS), "horizon": times(_ROWS, _ASKED),
            "ahead": normal(model.future_mean, model.future_scale, _ROWS, _ASKED),
        }  # fmt: skip
        yield {name: inputs[name] for name in names}
