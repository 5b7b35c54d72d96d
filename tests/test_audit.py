"""The published claims: verdicts that are computed, every claim from end to end, and the verb as a user meets it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from slow import slow_where
from tolerances import assert_close
from training_runs import configuration, text_file

from glissando.model import LanguageModel
from glissando.training.fit import train
from research.audit.__main__ import main
from research.audit.claim import Claim, Finding, Plan
from research.audit.claims import CLAIMS, measure, report, select, write
from research.audit.hybrid import adjoint as hybrid_adjoint
from research.audit.hybrid import costs as hybrid_costs
from research.audit.hybrid import gradients as hybrid_gradients
from research.audit.hybrid import solvers as hybrid_solvers
from research.audit.hybrid import training as hybrid_training
from research.audit.hybrid.steering import at_least, near_zero
from research.audit.tau.binned import BinnedMemory
from research.published.hybrid_ode import PublishedHybrid, preset_weights

QUICK = Plan(quick=True)


@pytest.fixture(autouse=True)
def _few_stories(monkeypatch):
    monkeypatch.setattr(hybrid_training, "HELD_OUT_WINDOWS", 4)


# ---------------------------------------------------------------------- the published model


@pytest.mark.parametrize(("ode", "count"), [(True, 29_781_249), (False, 30_503_424)])
def test_published_parameters(ode: bool, count: int):
    with torch.device("meta"):
        assert sum(p.numel() for p in PublishedHybrid(ode=ode).parameters()) == count


@pytest.mark.parametrize(("ode", "preset"), [(True, "hybrid-ode"), (False, "gpt")])
def test_it_computes_what_our_preset_does_with_the_same_weights(ode: bool, preset: str):
    published = PublishedHybrid(300, 32, ode=ode).double().eval()
    ours = LanguageModel.from_preset(preset, vocab_size=300, hidden_size=32).double().eval()
    ours.load_state_dict(preset_weights(published))
    ids = torch.randint(300, (2, 9))
    controls = [None, torch.zeros(2, 4).double(), torch.randn(2, 4).double()] if ode else [None]
    with torch.no_grad():
        for control in controls:
            assert_close(published(ids, control), ours(ids, control=control)[0], f"control {control}")
    if ode:
        with torch.no_grad():
            assert not torch.equal(published(ids), published(ids, controls[1])), "u = 0 is not the absence of u"


def test_its_control_gets_no_gradient():
    model, control = PublishedHybrid(50, 16), torch.zeros(1, 4, requires_grad=True)
    model(torch.tensor([[1, 2]]), control).sum().backward()
    assert control.grad is None
    assert model.flow.field.control_embed.weight.grad is not None


# ---------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (Finding("", checks={"a": True, "b": True}), "holds"),
        (Finding("", checks={"a": False}), "does not hold (not: a)"),
        (Finding("", checks={"a": True, "b": False}), "holds in part (not: b. It does: a)"),
        (Finding("", checks={"a": None}), "not decided (not decided: a)"),
        (Finding("", checks={"a": True, "b": None}), "holds in part (not decided: b. It does: a)"),
        (Finding("", checks={"a": False, "b": None}), "does not hold (not: a. Not decided: b)"),
        (Finding("", needs="a run"), "not reproduced here: needs a run"),
        (Finding("", checks={"a": True}, needs="a text"), "holds. The published figure itself needs a text"),
    ],
)
def test_verdicts_are_read_off_the_checks(finding: Finding, verdict: str):
    assert finding.verdict == verdict


def test_a_bound_inside_an_interval_decides_nothing():
    assert [at_least(*x, 0.88) for x in ((0.9, 1.0), (0.8, 0.9), (0.7, 0.8), (0.88, 0.88))] == [True, None, False, True]
    cases = ((-0.04, 0.05), (-0.08, 0.04), (0.06, 0.2), (-0.9, -0.1), (math.nan, math.nan))
    assert [near_zero(*x) for x in cases] == [True, None, False, False, False]


def test_a_report_has_claim_figures_and_verdicts():
    found = {"published": Finding("1.3x", checks={"a": True}), "corrected": Finding("1.1x", checks={"a": False})}
    claim = Claim("x-y", "X", "it is fast", "1.27x", lambda _: found["published"], lambda _: found["corrected"])
    printed = report(claim, measure(claim, QUICK))
    for line in ("x-y (X)", "published   1.27x", "reproduced  1.3x", "corrected   1.1x", "as published: holds"):
        assert line in printed
    assert "corrected: does not hold" in printed
    assert set(measure(claim, QUICK, ["corrected"])) == {"corrected"}


def test_claims_by_name_and_by_beginning():
    assert [claim.name for claim in select(["hybrid-memory"])] == ["hybrid-memory"]
    assert [claim.name for claim in select(["hybrid"])] == [name for name in CLAIMS if name.startswith("hybrid-")]
    assert len(select(["hybrid", "hybrid-memory"])) == len(select(["hybrid"]))


# ---------------------------------------------------------------------- each claim


def strict_json(path: Path) -> dict:
    return json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))


#: those that take seconds even when `quick`, and those of which a form has a test of its own
LONG = {
    "hybrid-gradients", "hybrid-memory", "hybrid-solver", "hybrid-steering", "hybrid-dial", "hybrid-latency",
    "hybrid-adjoint", "minimal-shift", "minimal-memory", "tau-epiplexity", "tau-laplacian", "tau-drift",
    "liquid-hippo", "liquid-adaptation", "liquid-irregular",
    "tau-speed", "tau-cache", "tau-learns", "continuous-accuracy", "continuous-samples", "continuous-homeostasis",
    "minimal-cheaper", "minimal-dropout", "minimal-rope", "liquid-learning", "continuous-causality",
    "hybrid-exploding", "hybrid-locality", "hybrid-jacobian", "minimal-growth", "liquid-rows", "liquid-endless",
}  # fmt: skip


def test_the_page_of_publications_has_a_headline_of_each():
    page = (Path(__file__).parents[1] / "docs" / "sources.md").read_text()
    named = re.findall(r"python -m research\.audit (\S+) --quick`", page)
    assert [CLAIMS[name].system for name in named] == list(dict.fromkeys(claim.system for claim in CLAIMS.values()))


@pytest.mark.parametrize("name", slow_where(LONG, CLAIMS))
def test_every_claim_runs_in_both_forms(name: str, tmp_path):
    claim = CLAIMS[name]
    findings = measure(claim, QUICK)
    written = write(tmp_path, claim, findings)
    printed = strict_json(tmp_path / f"{name}.json")
    for form, finding in findings.items():
        assert printed[form]["verdict"] == finding.verdict
        assert finding.checks or finding.needs
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written if path.suffix == ".png")
    assert f"{name} ({claim.system})" in report(claim, findings, quick=True)
    _as_recorded(name, findings)


def _as_recorded(name: str, findings: dict[str, Finding]) -> None:
    """The checked-in record answers the questions that are asked today; sizes aside, which `quick` changes.

    Those without a commit are older than 'not decided' and are to be measured anew.
    """
    record = json.loads((Path(__file__).parents[1] / "docs" / "audit" / f"{name}.json").read_text())
    if "git" not in record:
        return
    for form, finding in findings.items():
        asked, answered = (
            {re.sub(r"[\d,.]+", "#", check) for check in printed}
            for printed in (finding.checks, record[form]["checks"])
        )
        assert not asked or not answered or asked == answered, (
            f"measure {name} anew: audit --ledger docs/audit.md --again"
        )


def test_clipping_hides_what_explodes():
    found = hybrid_gradients.exploding_as_published(QUICK)
    before, after = found.figures["blown_up_before_after"]
    assert before > 1e5
    assert after == pytest.approx(1, rel=1e-3)
    assert not found.checks["the test finds one"]
    assert found.checks["no step explodes by the test"]


def test_the_adjoint_is_wrong_and_more_so_with_dropout():
    """Five to seven per cent at four steps; its error falls with the step, which exact gradients' would not."""
    model = hybrid_training.build(QUICK, ode=True, seed=0)
    error = hybrid_adjoint.adjoint_error(model, QUICK, 0.0)
    assert 0.02 < error < 0.2
    assert hybrid_adjoint.adjoint_error(model, QUICK, 0.1) > error
    model.flow.n_steps = 64
    assert hybrid_adjoint.adjoint_error(model, QUICK, 0.0) < error / 8


def test_the_adjoint_keeps_a_state_a_step():
    figures = hybrid_costs.memory_as_published(QUICK).figures
    (few, many), (small, large) = figures["steps"], figures["kept_bytes"]
    state = 16 * 16 * 32 * 4
    assert large - small == (many - few) * (state + 4), "and the time of each"
    assert small >= (few + 1) * state


def test_eight_evaluations_beside_six():
    found = hybrid_costs.latency_corrected(QUICK).figures
    assert found["without it"]["counted"] == pytest.approx(4 / 3, abs=0.01)
    assert found["with the head"]["counted"] < found["without it"]["counted"]


def test_solvers_are_compared_by_how_far_the_flow_goes():
    model = hybrid_training.build(QUICK, ode=True, seed=0)
    gaps, moved, size = hybrid_solvers.solver_gaps(model, QUICK)
    assert moved < size
    assert gaps["euler"] > 30 * gaps["midpoint"] > 30 * gaps["rk4"]
    leak = hybrid_solvers.future_leak(model, QUICK)
    assert leak["rk4"] == 0
    assert leak["dopri5"] > 0


@pytest.mark.slow
def test_the_published_steering_learns_its_one_prompt():
    steered = hybrid_training.steer_on_prompt(Plan(quick=True, steps=80), 0)
    up, down = steered.probabilities([1.0, -1.0]).tolist()
    assert steered.tokenizer.decode([steered.good]) == " "
    assert up[0] > down[0]
    assert down[1] > up[1]
    frozen = hybrid_training.build(QUICK, ode=True, seed=0).state_dict()
    for name, weight in steered.model.state_dict().items():
        if "field" not in name:
            assert torch.equal(weight, frozen[name]), name


def test_both_models_read_the_same_windows():
    hybrid, baseline = (hybrid_training.train(QUICK, ode, 0) for ode in (True, False))
    assert len(hybrid.losses) == len(hybrid.before) == len(hybrid.after) == 12
    assert max(hybrid.after) <= 1 + 1e-4
    whole = [math.hypot(*step) for step in zip(*hybrid.parts.values(), strict=True)]
    assert whole == pytest.approx(hybrid.before, rel=1e-4)
    assert "ODE block" in hybrid.parts
    assert "ODE block" not in baseline.parts
    assert hybrid.held_out.shape == baseline.held_out.shape


# ---------------------------------------------------------------------- with a run, and the verb


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("steered")
    stories = {"data": {"kind": "stories", "seq_len": 64, "batch_size": 2, "labelled": True, "valid_rows": 2}}
    depth = {"kind": "flow", "layers": 0, "n_steps": 1, "control": ["mood", "speech"]}
    return train(configuration(folder, stories, {"model.depth": depth, "training": {"steps": 2}}), folder / "run").path


@pytest.mark.parametrize(
    "name", slow_where({"hybrid-solver"}, ["hybrid-steering", "hybrid-dial", "hybrid-neutral", "hybrid-solver"])
)
def test_a_run_is_measured(name: str, run, tmp_path):
    findings = measure(CLAIMS[name], Plan(quick=True, run=str(run)), ["corrected"])
    write(tmp_path, CLAIMS[name], findings)
    found = findings["corrected"]
    assert strict_json(tmp_path / f"{name}.json")["corrected"]["figures"]
    assert found.checks
    assert "mood" in found.said or str(run) in found.said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hybrid", "--form", "publishd"], "invalid choice: 'publishd'"),
        (["hybrid", "--steps", "0"], "invalid positive number value: '0'"),
        (["--ledger", "audit.md", "--out", "here"], "not allowed with argument"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_the_program(tmp_path, capsys):
    out = tmp_path / "audit"
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CLAIMS)
    text = str(text_file(tmp_path))
    assert main(["hybrid-gradients", "--quick", "--steps", "4", "--text", text, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert text in printed
    assert "verdict" in printed
    assert json.loads((out / "hybrid-gradients.json").read_text())["published"]["figures"]["steps"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hybrid-memry"], "Did you mean 'hybrid-memory'"),
        (["hybrid-gradients", "--quick", "--text", "nowhere.txt"], "cannot read --text nowhere.txt"),
        (["hybrid-dial", "--form", "corrected", "--run", "nowhere"], "no run at nowhere"),
    ],
)
def test_mistakes_are_reported(arguments: list[str], message: str, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_ledger_is_written_over_and_nothing_else(tmp_path, capsys):
    """Neither a file that is none, nor what was measured by what is of toy sizes."""
    (tmp_path / "README.md").write_text("# Mine\n")
    assert main(["tau-perplexities", "--ledger", str(tmp_path / "README.md")]) == 1
    assert "is no ledger; nothing is overwritten" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    command = ["tau-perplexities", "--ledger", str(tmp_path / "audit.md")]
    assert main(command) == 0
    assert main([*command, "--again"]) == 0
    record = tmp_path / "audit/tau-perplexities.json"
    measured = record.read_bytes()
    assert main([*command, "--again", "--quick"]) == 1
    assert "measured figures, which --quick would replace" in capsys.readouterr().err
    record.write_text(record.read_text().replace('"claim": "', '"claim": "once '))
    assert main([*command, "--quick"]) == 1
    record.write_bytes(measured)
    assert main([*command, "--quick"]) == 0  # it is kept
    assert record.read_bytes() == measured


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "here").write_text("x")
    assert main(["hybrid-memory", "--quick", "--out", str(tmp_path)]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err


def test_the_binned_memory_is_within_its_bound():
    """Against every key: a weight is off by a factor of at most exp(a) cosh(a), a = 1 / (2 M T)."""
    generator, bins, temperature = torch.Generator().manual_seed(0), 64, 0.05
    k, q = torch.rand(2, 90, 2, generator=generator)
    v, e = torch.randn(90, 2, 4, generator=generator), 50 * torch.rand(90, 2, generator=generator)
    memory = BinnedMemory(2, 4, bins)
    for token in range(90):
        memory.write(k[token], v[token], e[token], temperature)
    expected = torch.einsum("kh,khd->hd", (e - (q[0] - k).abs() / temperature).softmax(0), v)
    a = 1 / (2 * bins * temperature)
    bound = 2 * (math.exp(a) * math.cosh(a) - 1) * float(v.abs().max())
    assert 0 < float((memory.read(q[0], temperature) - expected).abs().max()) <= bound
