"""Models of numbers: the laws with gaps, masks, questions and a dial; what they refuse; the last real step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import slow_where
from tolerances import assert_close, assert_tensors_close
from torch import Tensor

import glissando
from glissando.errors import ConfigError, RunError
from glissando.mixers import MIXERS, ContextError
from glissando.model import LanguageModel
from glissando.series import SeriesModel
from glissando.series.anchor import Anchor
from glissando.series.history import Past, history
from glissando.state import leaves

SMALL = {"inputs": 3, "outputs": 2, "hidden_size": 16, "depth": {"layers": 2}}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"mixer": name} for name in MIXERS},
    "published": {"mixer": {"kind": "liquid", "layer": "published"}},
    "dense": {"mixer": {"kind": "liquid", "dynamics": "dense", "state_size": 4}},
    "tied": {"depth": {"kind": "tied", "layers": 1, "n_steps": 3}},
    "flow": {"depth": {"kind": "flow", "layers": 2, "n_steps": 2, "control": ["a", "b"]}},
    "convolved": {"block": {"conv_width": 3}, "depth": {"layers": 2, "mean_gate": True}},
    "both": {"mixer": ["attention", "liquid"], "head_bias": False, "final_norm": False},
    "linear-time": {"mixer": "liquid", "dt": "linear"},
    "impulses": {"mixer": {"kind": "liquid", "input": "impulse"}, "dt": "linear"},
    "read-time": {"mixer": "liquid", "dt": "input"},
    "forecast": {"mixer": "liquid", "forecast": True, "targets": [2, 0]},
    "own": {"mixer": "liquid", "forecast": True, "targets": [2, 0], "scale": "series"},
    "rich": {
        "mixer": ["liquid", "attention"], "forecast": True, "head": "student", "categories": [4, 3], "static": 2,
        "static_categories": [3], "future": 2,
    },
}  # fmt: skip
FORECASTS = ["forecast", "own", "rich"]
cases = pytest.mark.parametrize("case", CASES)
law = settings(max_examples=2, deadline=None)
#: one of each mixer, and one with all that series have: lengths are beyond the blocks of every kernel
LONG = [*MIXERS, "dense", "impulses", "rich"]


def build(case: str) -> SeriesModel:
    """In float64, with weights far enough from zero for every path to matter."""
    torch.manual_seed(len(case))
    model = SeriesModel.from_config({**SMALL, **CASES[case]}).double().eval()
    model.set_scales(input_mean=[1.0, -2.0, 0.5], input_scale=[2.0, 1.0, 3.0], time_scale=0.7)
    if model.law is not None:
        model.set_scales(law=[[-0.3, 0.0, 0.2], [1.0, 0.0, 0.5], [0.1, 1.0, 0.4], [0.3, -2.0, 0.2]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        if model.config.forecast:
            model.anchor.weight.add_(0.05 * torch.randn_like(model.anchor.weight))
    return model


#: signals of a row, which have no step
OF_SERIES = ("static", "static_codes")


def signals(model: SeriesModel, batch: int, length: int, seed: int, masked: bool = True) -> dict[str, Tensor]:
    """x and which of it was observed, gaps (0 among them), questions, and what else the model takes."""
    generator, config = torch.Generator().manual_seed(seed), model.config

    def draw(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    given = {"x": normal(length, 3), "observed": draw(length, 3) < 0.6, "dt": (3 * draw(length) - 0.3).clamp_min(0)}
    given["observed"][:, 0] &= draw(3) < 0.3  # nothing at all, in some
    if masked and "mask" in model.depth.accepts:
        given["mask"] = draw(length) < 0.7
    if "control" in model.depth.accepts:
        given["control"] = normal(length, 2)
    if config.forecast:
        given["horizon"] = 4 * draw(length, 2)
    if config.categories:
        sizes = torch.tensor(config.categories)
        given["codes"] = (draw(length, len(sizes)) * sizes).long()
    if config.static:
        given["static"] = torch.where(draw(config.static) < 0.3, torch.nan, normal(config.static))
        given["static_codes"] = (draw(1) * torch.tensor(config.static_categories)).long()
    if config.future:
        given |= {"future": normal(length, config.future), "ahead": normal(length, 2, config.future)}
    return given


def cut(given: dict[str, Tensor], a: int, b: int) -> dict[str, Tensor]:
    return {name: signal if name in OF_SERIES else signal[:, a:b] for name, signal in given.items()}


def in_pieces(model: SeriesModel, given: dict[str, Tensor], cuts: list[int]) -> Tensor:
    """What the model says of the pieces between `cuts`, joined."""
    edges = sorted({0, *cuts, given["x"].shape[1]})
    state, pieces = model.init_state(len(given["x"])), []
    for a, b in itertools.pairwise(edges):
        y, state = model(state=state, **cut(given, a, b))
        pieces.append(y)
    return torch.cat(pieces, 1)


def real(given: dict[str, Tensor]) -> Tensor:
    return given.get("mask", torch.ones(given["x"].shape[:2], dtype=torch.bool))


def gradients(model: SeriesModel, given: dict[str, Tensor], cuts: list[int]) -> dict[str, Tensor]:
    """Values at real steps, and the gradients of every parameter, of x and of dt."""
    given = {
        name: s.clone().requires_grad_() if s.is_floating_point() and name not in OF_SERIES else s
        for name, s in given.items()
    }
    model.zero_grad()
    y = (in_pieces(model, given, cuts) if cuts else model(**given)[0])[real(given)]
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    (y * weights).sum().backward()
    found = {"values": y.detach()}
    for name, tensor in [*model.named_parameters(), *given.items()]:
        if tensor.requires_grad:
            found[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()
    return found


@cases
@law
@given(data=st.data())
def test_split_law(case: str, data: st.DataObject):
    model = build(case)
    length = data.draw(st.integers(4, 12), "length")
    cuts = data.draw(st.lists(st.integers(1, length - 1), min_size=1, max_size=4), "cuts")
    given = signals(model, data.draw(st.integers(2, 3), "batch"), length, seed=length)
    assert_tensors_close(gradients(model, given, cuts), gradients(model, given, []))


@pytest.mark.parametrize("case", slow_where(MIXERS, LONG))  # of which test_laws.py has each mixer
def test_split_law_at_length(case: str):
    model = build(case)
    given = signals(model, 2, 70, seed=2)
    assert_tensors_close(gradients(model, given, [2, 3, 69]), gradients(model, given, []))


@cases
def test_batch_law(case: str):
    """A row alone, without its masked steps, equals that row in a batch."""
    model = build(case)
    given = signals(model, 2, 20, seed=3)
    keep = real(given)
    with torch.no_grad():
        together = model(**given)[0]
        for row in range(2):
            own = {
                name: s[row : row + 1] if name in OF_SERIES else s[row : row + 1, keep[row]]
                for name, s in given.items()
                if name != "mask"
            }
            assert_close(together[row : row + 1, keep[row]], model(**own)[0], "row in a batch")


@pytest.mark.parametrize(
    "options",
    [
        {"dt": "linear", "mixer": {"kind": "liquid", "coupled": True}},
        {"dt": "input", "mixer": "attention"},
        {"mixer": "spectral"},
        {"forecast": True, "targets": [1, 1], "head": "quantiles", "levels": [0.1, 0.5]},
    ],
)
def test_saved_and_loaded_is_the_same(options: dict[str, Any], tmp_path):
    model = SeriesModel.from_config({**SMALL, **options})
    model.set_scales(input_mean=[1.0, 2.0, 3.0], input_scale=2.0, output_mean=-4.0, time_scale=0.5)
    asked = {"horizon": torch.rand(2, 7, 3)} if model.config.forecast else {}
    if asked:
        torch.nn.init.normal_(model.anchor.weight)
    model.save(tmp_path / "model")
    again = SeriesModel.load(tmp_path / "model")
    x, dt = torch.randn(2, 7, 3), torch.rand(2, 7) if "dt" in options else None
    assert torch.equal(again(x, dt=dt, **asked)[0], model(x, dt=dt, **asked)[0])
    assert again.config == model.config
    assert not again.training
    double = model.double()
    with pytest.raises(RunError, match=r"exists and is not empty\. Choose a new name, or overwrite=True"):
        double.save(tmp_path / "model")
    assert torch.equal(SeriesModel.load(tmp_path / "model").entry.weight, again.entry.weight)
    double.save(tmp_path / "model", overwrite=True)
    assert SeriesModel.load(tmp_path / "model").entry.weight.dtype == torch.float64
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_what_a_directory_holds_is_not_taken_for_another_kind(tmp_path):
    series, language = SeriesModel.from_config(SMALL), LanguageModel.from_preset("transformer-nano", hidden_size=16)
    series.save(tmp_path / "series")
    language.save(tmp_path / "language")
    with pytest.raises(
        RunError, match=r"series predicts numbers: use `glissando series evaluate .*series --file FILE`"
    ):
        glissando.load(tmp_path / "series")
    with pytest.raises(RunError, match=r"language holds a model of language: use the other commands, or glissando.lo"):
        SeriesModel.load(tmp_path / "language")
    weights = tmp_path / "series" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged"):
        SeriesModel.load(tmp_path / "series")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for model in (series, language):
        with pytest.raises(RunError, match=r"thesis has chapter\.txt in it, so overwrite=True does not replace"):
            model.save(tmp_path / "thesis", overwrite=True)
    (tmp_path / "language" / "checkpoints" / "step-00000001").mkdir()
    with pytest.raises(RunError, match="has a training with its checkpoints, so overwrite=True does not replace"):
        language.save(tmp_path / "language", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


@pytest.mark.parametrize("case", ["linear-time", "forecast"])
def test_scales_are_those_of_numbers_scaled_by_hand(case: str):
    plain, scaled = build(case), build(case)
    plain.set_scales(input_mean=0.0, input_scale=1.0, output_mean=0.0, output_scale=1.0, time_scale=1.0)
    mean, scale = torch.tensor([1.0, -2.0, 30.0]).double(), torch.tensor([0.1, 1.0, 10.0]).double()
    scaled.set_scales(input_mean=mean, input_scale=scale, output_mean=[5, 6], output_scale=[7, 8], time_scale=60)
    given = signals(plain, 2, 9, seed=8)
    expected, mask = plain(**given)[0], given["mask"]
    times = {name: 60 * given[name] for name in ("dt", "horizon") if name in given}
    got = scaled(**{**given, "x": mean + scale * given["x"], **times})[0]
    outputs = (mean[[2, 0]], scale[[2, 0]]) if case == "forecast" else (torch.tensor([5.0, 6]), torch.tensor([7.0, 8]))
    assert_close(got[mask], (outputs[0] + outputs[1] * expected)[mask], "in the data's units")


# ---------------------------------------------------------------------- what is observed, and what is asked


@cases
def test_what_was_not_observed_changes_nothing(case: str):
    model = build(case)
    given = signals(model, 2, 12, seed=9)
    with torch.no_grad():
        y, state = model(state=model.init_state(2), **given)
        for value in (float("nan"), 0.0, 1e9):
            other = given | {"x": torch.where(given["observed"], given["x"], value)}
            z, after = model(state=model.init_state(2), **other)
            assert torch.equal(y[real(given)], z[real(given)]), value
            assert all(torch.equal(*pair) for pair in zip(leaves(state), leaves(after), strict=True)), value


@pytest.mark.parametrize("case", FORECASTS)
def test_asking_is_not_observing(case: str):
    """A question changes no other answer and no state, bit for bit."""
    model = build(case)
    given = signals(model, 2, 12, seed=10)
    most = {name: given.pop(name) for name in ("horizon", "ahead") if name in given}
    with torch.no_grad():
        both, state = model(state=model.init_state(2), **given, **most)
        for chosen in ([0], [1], [1, 0], []):
            few, after = model(state=model.init_state(2), **given, **{n: s[:, :, chosen] for n, s in most.items()})
            assert torch.equal(few, both[:, :, chosen])
            assert all(torch.equal(*pair) for pair in zip(leaves(state), leaves(after), strict=True))
        nothing, after = model(state=model.init_state(2), **given)
        assert nothing.shape[2] == 0
        assert all(torch.equal(*pair) for pair in zip(leaves(state), leaves(after), strict=True))
        later = {**most, "horizon": most["horizon"].clone()}
        later["horizon"][:, 3, 1] = 1e3
        other, _ = model(**given, **later)
        untouched = torch.ones(12, 2, dtype=torch.bool)
        untouched[3, 1] = False
        assert torch.equal(other[:, untouched], model(**given, **most)[0][:, untouched])
        assert not torch.equal(other[:, 3, 1], both[:, 3, 1])


@cases
def test_when_the_next_observation_comes_is_not_known_before(case: str):
    """Another gap before a step changes nothing at or before the step that precedes it."""
    model = build(case)
    given = signals(model, 2, 12, seed=11, masked=False)
    other = given | {"dt": given["dt"].clone()}
    other["dt"][:, 7] += 3.0
    with torch.no_grad():
        a, b = model(**given)[0], model(**other)[0]
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


@pytest.mark.parametrize("case", FORECASTS)
def test_a_window_that_knows_the_past_is_a_window_of_the_whole(case: str):
    """What is known of the channels before a window comes from the whole history; the anchor needs nothing else."""
    model = build(case)
    given = signals(model, 2, 12, seed=12, masked=False)
    with torch.no_grad():
        for module in (model.head,):
            for parameter in module.out.parameters():
                parameter.zero_()
        whole = model(**given)[0]
        _, state = model(state=model.init_state(2), **cut(given, 0, 5))
        window = model(past=state.past, **cut(given, 5, 12))[0]
    assert_close(window, whole[:, 5:], "forecasts of the anchor")


def test_a_new_model_forecasts_about_the_last_value():
    model = SeriesModel.from_config({**SMALL, "forecast": True}).double()
    model.set_scales(input_mean=[5.0, 6, 7], input_scale=[0.5, 1, 2])
    x = torch.randn(1, 4, 3).double()
    observed = torch.tensor([[[0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]]).bool()
    with torch.no_grad():
        y = model(x, observed=observed, horizon=torch.ones(1, 4, 1).double())[0][0, :, 0]
    v = x[0]
    expected = torch.stack([torch.tensor([5, v[1, 0], v[1, 0], v[3, 0]]), torch.tensor([6, 6, 6, v[3, 1]])], 1)
    assert_close(y, expected.double(), "last values, and means before any", 0.05)


@cases
def test_every_parameter_gets_gradient(case: str):
    model = build(case)
    found = gradients(model, signals(model, 4, 30, seed=4), [])
    dead = [name for name, grad in found.items() if not torch.isfinite(grad).all() or grad.abs().max() == 0]
    assert not dead, f"no gradient: {dead}"


@cases
def test_causality(case: str):
    """A later value, and the time that passes after a step, change nothing before."""
    model = build(case)
    given = signals(model, 2, 12, seed=5, masked=False)
    other = {name: signal.clone() for name, signal in given.items()}
    for name, signal in other.items():
        if signal.is_floating_point() and name not in OF_SERIES:
            signal[:, 7] += 0.5
    with torch.no_grad():
        a, b = model(**given)[0], model(**other)[0]
    assert_close(b[:, :7], a[:, :7], "before the change", 1e-12)
    assert not torch.equal(a[:, 7], b[:, 7])


def test_time_is_read_and_ages_the_states_that_accept_it():
    for case in ("linear-time", "impulses", "liquid", "read-time", "attention", "spectral", "tau", "convolved", "both"):
        model = build(case)
        x = torch.randn(1, 5, 3).double()
        with torch.no_grad():
            plain, ones, twos = (model(x, dt=dt)[0] for dt in (None, 0.7 * torch.ones(1, 5), 1.4 * torch.ones(1, 5)))
            assert_close(ones, plain, f"{case}: dt of the time scale")
            assert (twos - plain).abs().max() > 1e-3, case
            _, before = model(x, model.init_state(1))
            _, after = model(x, before, dt=torch.zeros(1, 5).double())
        still = case == "linear-time"  # where no time passes, an input that is held writes nothing
        if case in ("linear-time", "impulses", "liquid"):
            assert torch.equal(before.depth[0].mixer.x, after.depth[0].mixer.x) == still


def test_a_dial_needs_a_flow():
    with pytest.raises(ContextError, match="'control' but does not accept it"):
        build("liquid")(torch.randn(1, 4, 3).double(), control=torch.ones(1, 2).double())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m(x[0]), r"x must be \(batch, time >= 1, 3\).*\(4, 3\)"),
        (lambda m, x: m(x[..., :2]), r"x must be .*\(2, 4, 2\)"),
        (lambda m, x: m(x[:, :0]), r"x must be .*\(2, 0, 3\)"),
        (lambda m, x: m(x.long()), "floating-point numbers, got .* torch.int64"),
        (lambda m, x: m(x.float()), r"x is torch.float32 and the model torch.float64: use"),
        (lambda m, x: m(x, dt=torch.ones(2, 3)), r"dt must be .* \(2, 4\) for x .* got \(2, 3\)"),
        (lambda m, x: m(x, mask=torch.ones(2, 4)), "mask must be bool"),
        (lambda m, x: m(x, dt=-torch.ones(2, 4).double()), "dt is a duration and cannot be negative"),
        (lambda m, x: m(x, dt=torch.full((2, 4), float("nan"))), r"dt is .* must be finite, got nan at \[0, 0\]"),
        (lambda m, x: m(x, dt=torch.ones(2, 4, dtype=torch.bool)), "a real number for each step; got torch.bool"),
        (lambda m, x: m(x, dt=1.0), r"dt must be a tensor \(2, 4\) for x .* got a float"),
        (lambda m, x: m(x, observed=torch.ones(2, 4, 3)), "observed must be bool, True where a value was observed"),
        (lambda m, x: m(x, observed=x[..., :2] > 0), r"observed must be a tensor \(2, 4, 3\) for x .*got \(2, 4, 2\)"),
        (lambda m, x: m(x, horizon=torch.ones(2, 4, 1)), "horizon was given, .* of the step itself"),
        (lambda m, x: m(x, static=torch.ones(2, 1)), "static was given, and this model takes none"),
        (lambda m, x: m(x.tolist()), "x must be a tensor .* got a list; use torch.tensor"),
        (lambda m, x: m(x, m.init_state(5)), "the state holds 5 rows, the steps of x have 2"),
        (lambda m, x: m(x, m.init_state(2), donate=True), "which gradients forbid"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call, message: str):
    with pytest.raises(ValueError, match=message):
        call(build("liquid"), torch.randn(2, 4, 3).double())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, "unknown option 'model.vocab_size'"),
        ({"tied_head": False}, "unknown option 'model.tied_head'"),
        ({"representation": "complex"}, "unknown option 'model.representation'"),
        ({"hidden_sise": 8}, "unknown option 'model.hidden_sise'. Did you mean 'hidden_size'"),
        ({"hidden_size": 0}, "model.hidden_size must be at least 1, got 0"),
        ({"inputs": 0}, "model.inputs must be at least 1, got 0"),
        ({"mixer": []}, "model.mixer: expected at least one mixer, got an empty list"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SeriesModel.from_config({**SMALL, **options})


def test_sizes_are_needed():
    with pytest.raises(ConfigError, match=r"model\.outputs is missing"):
        SeriesModel.from_config({"inputs": 3})
    with pytest.raises(ConfigError, match=r"unknown mixer 'liqid'\. Did you mean 'liquid'"):
        SeriesModel.from_config({"mixer": "liqid", "inputs": 3, "outputs": 2})
    small = SeriesModel.from_config({"hidden_size": 8, "inputs": 3, "outputs": 5})
    assert small(torch.randn(1, 2, 3))[0].shape[2] == 5


def test_a_language_model_and_a_series_model_share_their_backbone():
    """With the embedding's vectors as values, and the head's weights, both say the same."""
    options = {"hidden_size": 16, "mixer": "liquid", "depth": {"layers": 2}}
    language = LanguageModel.from_config({**options, "vocab_size": 11, "tied_head": False})
    series = SeriesModel.from_config({**options, "dt": "input", "inputs": 11, "outputs": 11})
    weights = {n: w for n, w in language.state_dict().items() if not n.startswith("embedding")}
    read = torch.zeros_like(series.entry.weight)  # of its features, the values alone
    read[:, :11] = language.embedding.weight.detach().T
    entry = {"entry.weight": read, "entry.bias": torch.zeros(16)}
    series.load_state_dict({**series.state_dict(), **weights, **entry, "head.bias": torch.zeros(11)})
    ids = torch.randint(0, 11, (2, 9))
    hot = torch.nn.functional.one_hot(ids, 11).float()
    assert_close(series(hot)[0], language(ids)[0], "what both say", 1e-5)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("last", [[2.0, 3.0], [14.0, 15.0], [16.0, 17.0]]), ("mean", [[1.0, 2.0], [12.0, 13.0], [16.0, 17.0]])],
)
def test_whole_series_are_answered_over_real_steps(pooling, expected):
    y = torch.arange(24.0).view(3, 4, 2)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 0]]).bool()
    y[~mask] = torch.nan
    model = SeriesModel.from_config({**SMALL, "pooling": pooling})
    assert model.pooled(y, mask).tolist() == expected


def test_a_series_is_classified_whatever_its_padding():
    model = build("liquid")
    x = torch.randn(1, 5, 3).double()
    padded = torch.cat([torch.randn(1, 2, 3), x, torch.randn(1, 3, 3)], 1)
    mask = torch.tensor([[False] * 2 + [True] * 5 + [False] * 3])
    assert_close(model.pooled(model(padded, mask=mask)[0], mask), model(x)[0][:, -1], "logits")


@pytest.mark.parametrize("init", ["scaled", "torch", "xavier", "blind"])
@pytest.mark.slow
def test_every_initialisation_learns_to_hold_a_value_for_its_time(init: str):
    """A leaky integral of the input over uneven steps, which a model that is not told of them cannot know."""
    knows = init != "blind"
    torch.manual_seed(1)
    model = SeriesModel.from_config(
        {
            "hidden_size": 16,
            "depth": {"layers": 1},
            "init": init if knows else "torch",
            "dt": "linear",
            "mixer": {"kind": "liquid", "steps": [0.05, 1]},
            "inputs": 1,
            "outputs": 1,
        },
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(150):
        x, dt = torch.randn(16, 20, 1), 0.1 + 1.8 * torch.rand(16, 20)
        target = torch.zeros(16, 20)
        for t in range(20):
            target[:, t] = (
                torch.exp(-dt[:, t]) * (target[:, t - 1] if t else 0) + (1 - torch.exp(-dt[:, t])) * x[:, t, 0]
            )
        loss = (model(x, dt=dt if knows else None)[0][..., 0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) / float(target.square().mean()))
    assert (sum(losses[-10:]) / 10 < 0.1) == knows


def test_far_horizons_do_not_decide_on_near_ones():
    """The anchor of a random walk: its errors at the nearest horizons are those of the last value."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(1, 4000, 1, generator=generator, dtype=torch.float64).cumsum(1)
    known = history(walk, torch.ones_like(walk, dtype=torch.bool), torch.ones(1, 4000, dtype=torch.float64))
    far = torch.randint(1, 300, (1, 3000), generator=generator)
    far[:, ::2] = 1
    past, target = (walk[:, :3000], walk.gather(1, (torch.arange(3000) + far).unsqueeze(-1)))
    known = Past(*(part[:, :3000] for part in known))
    anchor, facts = Anchor([0], 1, 0, 0).double(), (torch.zeros(1, 1, 0, dtype=torch.float64), None)
    anchor.fit(known, far.double(), *facts, target, torch.ones_like(target, dtype=torch.bool))
    near = far[0] == 1
    error = ((anchor(known, far.double(), *facts) - target)[0, near] ** 2).mean()
    assert error < 1.03 * ((past - target)[0, near] ** 2).mean()
