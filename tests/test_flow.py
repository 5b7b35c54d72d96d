"""Flow depth: what a user can do with it, and its errors."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close
from training_runs import configuration, weights

import glissando
from glissando.errors import ConfigError, UnknownNameError
from glissando.model import LanguageModel
from glissando.training.fit import train

FLOW = {"kind": "flow", "layers": 2, "n_steps": 2, "control": ["mood", "speech"]}
STORIES = {"data": {"kind": "stories", "seq_len": 64, "batch_size": 2}}
LABELLED = {"data.labelled": True}


def test_published_size():
    with torch.device("meta"):
        assert LanguageModel.from_preset("hybrid-ode").num_parameters() == 29_781_249


@pytest.mark.slow
def test_labels_train_the_dial_and_steps_change_at_inference(tmp_path):
    run, without = tmp_path / "run", tmp_path / "without"
    small = {"model.depth": FLOW, "training": {"steps": 3}, "data.valid_rows": 4}
    train(configuration(tmp_path, STORIES, small, LABELLED), run)
    train(configuration(tmp_path, STORIES, small), without)
    name = "depth.control.weight"
    assert not torch.equal(weights(run)[name], weights(without)[name])
    model = glissando.load(run)
    ids = torch.tensor([[1, 2, 3]])
    finer = glissando.load(run, {"depth.n_steps": 64, "depth.method": "rk4"})
    finest = glissando.load(run, {"depth.n_steps": 128, "depth.method": "rk4"})
    with torch.no_grad():
        one, two, three = (m(ids, control=torch.ones(1, 2))[0] for m in (model, finer, finest))
    assert not torch.equal(one, two)
    assert_close(two, three)


def test_u_of_zero_is_not_no_control():
    model = LanguageModel.from_config({"hidden_size": 16, "depth": FLOW})
    with torch.no_grad():
        model.depth.control.bias.fill_(1.0)
        ids = torch.tensor([[1, 2, 3]])
        assert not torch.equal(model(ids)[0], model(ids, control=torch.zeros(1, 2))[0])


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        ({"n_steps": None}, "needs depth.n_steps, the number of its steps, at least 1"),
        ({"layers": -1}, "layers: .*a number of at least 0, got -1"),
        ({"method": "rk3"}, "Did you mean 'rk4'"),
        ({"method": "dopri5"}, "adapts its steps, such as dopri5, .*rk4 with more depth.n_steps"),
        ({"kind": "discrete"}, "unknown option 'model.depth.n_steps'"),
    ],
)
def test_mistakes_in_options(depth: dict, message: str):
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        LanguageModel.from_config({"hidden_size": 16, "depth": FLOW | depth})


def test_a_control_of_another_size_is_reported():
    model = LanguageModel.from_config({"hidden_size": 16, "depth": FLOW})
    with pytest.raises(ConfigError, match="2 control dimensions, and was given 3"):
        model(torch.tensor([[1]]), control=torch.zeros(1, 3))


def test_time_steps_get_their_gradient_when_steps_are_computed_again():
    """That of autograd through the same scheme, beside a control's."""
    depth = {"kind": "flow", "layers": 0, "n_steps": 2, "control": ["a"], "alpha": 1.0}
    model = LanguageModel.from_config({"hidden_size": 8, "mixer": "liquid", "depth": depth}).double()
    ids = torch.randint(0, 256, (2, 7))
    dt, control = torch.rand(2, 7, dtype=torch.float64), torch.randn(2, 1, dtype=torch.float64)
    gradients = []
    for model.depth.gradient_checkpointing in (True, False):
        given = [dt.clone().requires_grad_(), control.clone().requires_grad_()]
        model(ids, dt=given[0], control=given[1])[0].square().sum().backward()
        gradients.append([signal.grad for signal in given])
    for got, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 0
        assert_close(got, expected)


def test_labels_of_other_names_are_reported(tmp_path):
    depth = FLOW | {"control": ["speech", "mood"]}
    with pytest.raises(ConfigError, match="same order"):
        train(configuration(tmp_path, STORIES, LABELLED, {"model.depth": depth}), tmp_path / "run")
