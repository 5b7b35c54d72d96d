"""Time constants over texts, signals and patterns: against their equation, drawn, and through the verb."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from tolerances import assert_close
from training_runs import text_file

from glissando.cli.evaluate import main as evaluate
from glissando.errors import ConfigError, DataError, RunError
from glissando.evaluation.diagnostics import (
    compare_patterns,
    diagnose,
    pattern_table,
    signals,
    write,
)
from glissando.mixers import Context
from glissando.model import LanguageModel
from glissando.series import SeriesModel
from research.signal_picture import plot_signal, time_constants

SMALL = {"hidden_size": 8, "depth": {"layers": 2}, "mixer": {"kind": "liquid", "adaptation": 0.9}}
PNG = b"\x89PNG"


def language_model(**options) -> LanguageModel:
    return LanguageModel.from_config({**SMALL, **options}).double().eval()


def series_model(**options) -> SeriesModel:
    return SeriesModel.from_config({**SMALL, "dt": "linear", "inputs": 3, "outputs": 2, **options}).double().eval()


def test_time_constants_are_those_of_the_equation():
    """tau0 (1 + a tanh(z + p Re x + q Im x)) / step token by token, the state advanced by a call each."""
    model = series_model()
    x, dt = torch.randn(2, 6, 3).double(), torch.rand(2, 6).double()
    mixer, given = model.depth.blocks[1].mixer, []
    mixer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    state = model.init_state(2)
    torch.nn.init.normal_(mixer.dynamics.bias)
    expected = []
    for t in range(6):
        before = state.depth[1].mixer.x.unflatten(-1, (-1, 2))
        with torch.no_grad():
            _, state = model(x[:, t : t + 1], state, dt=dt[:, t : t + 1])
            modes, z = mixer.dynamics.modes(), mixer.layer.inputs(given[-1])[1][:, 0] + mixer.dynamics.bias
        phi = torch.tanh(z + (before * modes.state).sum(-1))
        expected.append(modes.tau * (1 + modes.adaptation * phi) / modes.step)
    expected = torch.stack(expected, 1).quantile(0.5, -1)
    assert_close(time_constants(model, x, dt)[1], expected, "median")
    assert time_constants(model, x, dt).shape == (2, 2, 6)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"mixer": ["attention", "liquid"]}, 1),
        ({"depth": {"kind": "tied", "layers": 1, "n_steps": 3}}, 3),
        ({"mixer": {"kind": "liquid", "dynamics": "dense", "state_size": 4}}, 2),
    ],
)
def test_a_row_an_application(options, rows):
    assert time_constants(language_model(**options), torch.randint(0, 256, (1, 5))).shape == (rows, 1, 5)


def test_models_without_a_liquid_mixer_have_none():
    with pytest.raises(ValueError, match="no liquid mixer"):
        time_constants(language_model(mixer="attention"), torch.zeros(1, 3).long())


# ---------------------------------------------------------------------- patterns


def test_patterns_run_over_time():
    made = {name: draw(torch.Generator().manual_seed(0), 400) for name, draw in signals(series_model()).items()}
    for name, x in made.items():
        assert x.shape == (400, 3), name
        assert name == "constant" or x.square().mean(0).tolist() == pytest.approx([1] * 3, abs=0.15), name
    roughness = {name: float(x.diff(dim=0).square().mean()) for name, x in made.items()}
    assert roughness["constant"] == 0
    assert 0 < roughness["smooth"] < 0.05
    assert roughness["spiky"] > 1
    assert roughness["random"] > 1
    kurtosis = {name: float(x.pow(4).mean()) for name, x in made.items()}
    assert kurtosis["spiky"] > 20 > 6 > kurtosis["random"] > kurtosis["smooth"]


def loudness_model(sign: float) -> SeriesModel:
    """One layer whose tau grows (or shrinks) with how far the input is from zero, by the same law for every mode."""
    model = SeriesModel.from_config(
        {
            **SMALL,
            "dt": "linear",
            "depth": {"layers": 1},
            "mixer": {"kind": "liquid", "adaptation": 0.9, "state_dependence": False},
            "inputs": 1,
            "outputs": 1,
        },
    ).double()
    with torch.no_grad():
        # The norm makes any input but 0 a unit vector: with a bias beside it, its direction tells how large it was.
        model.entry.weight.zero_()[:, :1].copy_(torch.eye(8)[:, :1])
        model.entry.bias.copy_(torch.eye(8)[:, 1])
        project = model.depth.blocks[0].mixer.layer.project.weight
        project.zero_()
        project[4:8, 1] = -sign
    return model


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_table_tells_which_way_tau_goes(sign: float):
    """A model made so that tau sees loudness: constant zero against noise, whose ratio is known from the norm."""
    model = loudness_model(sign)
    patterns = {
        "silent": lambda generator, length: torch.zeros(length, 1),
        "random": lambda generator, length: torch.randn(length, 1, generator=generator),
    }
    silent, noise = compare_patterns(model, patterns, seeds=4, length=64)
    modes = model.depth.blocks[0].mixer.dynamics.modes()
    quiet = modes.tau * (1 + modes.adaptation * math.tanh(-sign * math.sqrt(8))) / modes.step
    assert silent.tau == pytest.approx(float(quiet.detach().log().mean().exp()), rel=1e-3)
    assert (noise.ratio, noise.low, noise.high) == (1, 1, 1)
    assert (silent.ratio < 1) == (sign > 0)
    assert silent.ratio == pytest.approx(silent.tau / noise.tau)
    assert silent.low < silent.ratio < silent.high
    assert not silent.low < 1 < silent.high
    assert f"{silent.ratio:.3f} ({silent.low:.3f} to {silent.high:.3f})" in pattern_table([silent, noise])


# ---------------------------------------------------------------------- pictures


def test_signals_are_drawn(tmp_path):
    model, x = series_model(), torch.randn(30, 3).double()
    for dt in (None, torch.rand(30).double()):
        assert plot_signal(model, x, tmp_path / "signal.png", dt).read_bytes()[:4] == PNG


def test_patterns_in_the_place_of_embeddings():
    """A language model's have each feature's mean and deviation over the vocabulary, and are what blocks read."""
    model = language_model()
    made = signals(model)
    drawn = made["random"](torch.Generator().manual_seed(0), 4000)
    weight = model.embedding.weight.detach()
    assert_close(drawn.mean(0), weight.mean(0), "mean", 0.06)
    assert_close(drawn.std(0), weight.std(0), "deviation", 0.06)
    ids = torch.randint(0, 256, (2, 9))
    assert_close(time_constants(model, model.embedding(ids).detach()), time_constants(model, ids), "tau", 0.0)
    rows = compare_patterns(model, made, seeds=2, length=32)
    assert [row.pattern for row in rows] == ["smooth", "spiky", "constant", "random"]


# ---------------------------------------------------------------------- diagnostics


@pytest.mark.parametrize(
    "options",
    [
        {
            "depth": {"layers": 2, "mean_gate": True},
            "mixer": {"kind": "liquid", "layer": "published", "adaptation": 0.5},
        },
        {"mixer": {"kind": "liquid", "dynamics": "dense", "state_size": 4}},
        {"mixer": ["attention", "liquid", "liquid"], "depth": {"layers": 6}},
    ],
    ids=["published", "dense", "alternating"],
)
def test_diagnostics_have_a_row_for_each_liquid_layer(options):
    model, ids = language_model(**options), [5, 9, 200, 31, 7, 7]
    whole = diagnose(model, ids)
    assert whole.ids == ids
    assert whole.layers == ([2, 3, 5, 6] if isinstance(options["mixer"], list) else [1, 2])
    assert ("mean_gate" in whole.columns) == ("mean_gate" in options.get("depth", {}))
    assert {column.shape for column in whole.columns.values()} == {(len(whole.layers), 6)}
    assert_close(whole.columns["tau"], time_constants(model, torch.tensor([ids]))[:, 0], "tau")


def test_diagnostics_are_those_of_the_equations():
    published = {"kind": "liquid", "layer": "published", "adaptation": 0.5}
    model, ids = language_model(depth={"layers": 1, "mean_gate": True}, mixer=published), [3, 250, 17, 4]
    block = model.depth.blocks[0]
    found, states = diagnose(model, ids), []
    state = model.init_state(1)
    with torch.no_grad():
        for token in ids:
            _, state = model(torch.tensor([[token]]), state)
            states.append(state.depth[0][0].mixer.x[0])
        x = torch.stack(states)
        mean = model.depth.gate(
            block(model.embedding(torch.tensor([ids])), None, Context())[0] - model.embedding(torch.tensor([ids])),
            None,
            Context(),
        )[0]
        expected = {
            "state_norm": x.norm(dim=-1),
            "gate": block.mixer.layer.gate(x).squeeze(-1),
            "dt": torch.ones(4).double(),
            "mean_gate": mean[0, :, 0],
            "adaptation_rate": torch.full((4,), 0.5).double(),
        }
    for name, values in expected.items():
        assert_close(found.columns[name][0], values, name, 1e-6 if name == "adaptation_rate" else None)
    plain = language_model(depth={"layers": 1})
    with torch.no_grad():
        given = []
        handle = plain.depth.blocks[0].mixer.register_forward_pre_hook(lambda _, args: given.append(args[0]))
        plain(torch.tensor([ids]))
        handle.remove()
    gate = plain.depth.blocks[0].mixer.layer.project(given[0])[..., -8:].detach()
    assert_close(diagnose(plain, ids).columns["gate"][0], (gate * gate.sigmoid()).mean(-1)[0], "silu gate")


def test_diagnostics_leave_nothing_behind():
    model = language_model(depth={"layers": 1, "mean_gate": True})
    diagnose(model, [0, 1])
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    with pytest.raises(ValueError, match="no liquid mixer"):
        diagnose(language_model(mixer="attention"), [0])


def test_the_table_has_a_line_for_each_token_and_layer(tmp_path):
    model = language_model()
    ids = model.tokenizer.encode('a,\n"')
    found = diagnose(model, ids)
    files = write(model, found, tmp_path)
    assert [file.name for file in files] == ["diagnostics.csv", "diagnostics.png"]
    assert files[1].read_bytes()[:4] == PNG
    with files[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["text"], row["layer"]) for row in rows] == [(c, layer) for c in 'a,\n"' for layer in "12"]
    assert float(rows[3]["tau"]) == pytest.approx(float(found.columns["tau"][1, 1]), rel=1e-5)
    assert float(rows[3]["tau_p05"]) < float(rows[3]["tau"]) < float(rows[3]["tau_p95"])


def test_the_verb_draws_and_compares(tmp_path, capsys):
    model = LanguageModel.from_config(SMALL)
    model.save(tmp_path / "run")
    text, folder = text_file(tmp_path), tmp_path / "pictures" / "here"
    short = text.with_name("short.txt")
    short.write_text(text.read_text()[:400])
    given = [str(tmp_path / "run"), "--file", str(short), "--json", "--diagnostics", str(folder)]
    evaluate(given)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["bits_per_byte"] > 0
    names = ["diagnostics.csv", "diagnostics.png"]
    assert sorted(file.name for file in folder.iterdir()) == names
    assert all(name in printed.err for name in ("smooth", "spiky", "constant", "random"))
    other = folder.with_name("other")
    evaluate([*given[:-1], str(other), "--prompt", "abc"])
    assert (folder / names[1]).read_bytes() != (other / names[1]).read_bytes()
    assert len((other / names[0]).read_text().splitlines()) == 1 + 3 * 2
    with pytest.raises(RunError, match="exists and is not empty; nothing is overwritten"):
        evaluate(given)


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("liquid", ["--prompt", "abc"], "--prompt has no effect without --diagnostics"),
        ("attention", ["--diagnostics", "out"], "needs a liquid mixer, and .* has none"),
    ],
)
def test_the_verb_refuses_before_it_scores(tmp_path, monkeypatch, capsys, mixer, options, message):
    LanguageModel.from_config({**SMALL, "mixer": mixer}).save(tmp_path / "run")
    text = text_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("abcdef")
    with pytest.raises((ConfigError, DataError), match=message):
        evaluate(["run", *([] if "--file" in options else ["--file", str(text)]), *options])
    assert capsys.readouterr().out == ""
