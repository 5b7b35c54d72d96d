"""Forecaster and Classifier: scikit-learn's conventions, on frames and arrays."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from glissando.cli import main
from glissando.errors import ConfigError, DataError, InputError, UnknownNameError
from glissando.series.estimators import Classifier, Forecaster, _names_of

QUICK = {
    "model.hidden_size": 8, "model.depth.layers": 1, "model.mixer.state_size": 8, "training.steps": 30,
    "model.block.mlp.hidden": 8, "training.validate_every": 15,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _undrawn():
    """A training without its pictures, which take longer than its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glissando.series.pictures.draw", lambda *_: [])
        yield


def waves(people: int = 12, steps: int = 40, seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    frames = []
    for person in range(people):
        t = rng.exponential(size=steps).cumsum()
        x = np.sin(t + rng.uniform(0, 6)) + 0.05 * rng.normal(size=steps)
        frames.append(pandas.DataFrame({"who": person, "t": t, "x": np.where(rng.random(steps) < 0.1, np.nan, x)}))
    return pandas.concat(frames, ignore_index=True)


def arrays(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2, 12): the classes are the sign of the mean of the second channel."""
    rng = np.random.default_rng(seed)
    y = rng.choice(["up", "down"], n)
    X = rng.normal(size=(n, 2, 12))
    X[:, 1] += np.where(y == "up", 1.5, -1.5)[:, None]
    X[rng.random(X.shape) < 0.1] = np.nan
    return X, y


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    return Forecaster(group="who", time="t", head="gaussian", options=QUICK).fit(waves())


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier(options=QUICK).fit(*arrays())


@pytest.mark.parametrize("kind", [Forecaster, Classifier])
def test_parameters_are_those_of_the_constructor_and_clones_are_not_fitted(kind: Any) -> None:
    from sklearn.base import clone

    made = kind(group="who", seed=3, options=QUICK)
    copy = clone(made)
    assert copy is not made
    assert copy.get_params() == made.get_params()
    assert made.set_params(time="t") is made
    assert made.time == "t"
    assert repr(kind(time="t")) == f"{kind.__name__}(time='t')"
    with pytest.raises(UnknownNameError, match="horizon"):
        made.set_params(horizon=3)
    with pytest.raises(ConfigError, match="is not fitted"):
        copy.save("never")


def test_a_forecast_is_a_frame_and_is_saved(forecaster: Forecaster, tmp_path: Path) -> None:
    frame = waves(seed=5)
    found = forecaster.predict(frame, horizon=2, every=0.5, quantiles=[0.1, 0.9], samples=3)
    assert list(found.columns) == ["who", "t", "channel", "value", "q0.1", "q0.9", "sample_1", "sample_2", "sample_3"]
    assert len(found) == 12 * 4
    assert (found["q0.1"] < found["q0.9"]).all()
    merged = found.merge(frame.groupby("who")["t"].max().rename("last").reset_index(), on="who")
    assert np.allclose((merged["t"] - merged["last"]).to_numpy().reshape(12, 4), [0.5, 1, 1.5, 2])
    assert forecaster.score(frame) > 0.3
    with pytest.raises(DataError, match="x is 1 wherever it is scored"):
        forecaster.score(frame.assign(x=1.0))
    forecaster.save(tmp_path / "saved")
    loaded = Forecaster.load(tmp_path / "saved")
    assert loaded.get_params()["group"] == "who"
    for other in (loaded, pickle.loads(pickle.dumps(forecaster))):
        pandas.testing.assert_frame_equal(other.predict(frame, horizon=2, every=0.5), found.iloc[:, :4])
    with pytest.raises(ConfigError, match="Classifier is for classification"):
        Classifier.load(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["int64", "category", "bool", "str", "datetime64[ns]", "Int64"])
def test_a_forecast_has_groups_and_times_as_the_frame_has_them(forecaster: Forecaster, kind: str) -> None:
    frame = waves(2, seed=5)
    number = frame["who"] % 2
    days = pandas.Timestamp("2026-01-01") + pandas.to_timedelta(number, "D")
    frame["who"] = days if kind.startswith("date") else number.astype(kind)
    found = forecaster.predict(frame, horizon=1)
    assert found["who"].dtype == frame["who"].dtype
    assert len(found.merge(frame, on="who")) == len(frame)
    pandas.testing.assert_frame_equal(forecaster.predict(frame.set_index(["who", "t"]), horizon=1), found)
    other = SimpleNamespace(to_pandas=lambda: frame)  # as of polars and pyarrow
    pandas.testing.assert_frame_equal(forecaster.predict(other, horizon=1), found)


@pytest.mark.slow
def test_classes_of_arrays(classifier: Classifier) -> None:
    X, y = arrays(seed=1)
    assert classifier.classes_.tolist() == ["down", "up"]
    p = classifier.predict_proba(X)
    assert p.shape == (60, 2)
    assert np.allclose(p.sum(-1), 1)
    assert (classifier.predict(X) == classifier.classes_[p.argmax(-1)]).all()
    assert classifier.score(X, y) > 0.9
    with pytest.raises(InputError, match=r"give \(n, channels, time\)"):
        classifier.predict(X[0, 0])


def test_what_is_no_array_of_series_or_no_class_is_refused(classifier: Classifier) -> None:
    X, y = arrays(4)
    assert classifier.predict(X.tolist()).tolist() == classifier.predict(X).tolist()
    with pytest.raises(InputError, match="two channels"):
        classifier.predict(X + 1j)
    with pytest.raises(InputError, match="numbers with fractions"):
        Classifier().fit(X, np.array([0.5, 1.0, 2.0, 3.0]))
    with pytest.raises(InputError, match=r"with the classes \(3,\)"):
        Classifier().fit(X, y[:3])


@pytest.mark.parametrize("kind", ["int64", "float64", "bool", "<U3", "spaces", "NA", "None"])
def test_classes_are_known_again_after_saving_whatever_type_they_have(kind: str, tmp_path: Path) -> None:
    X, words = arrays()
    y: Any = words == "up"
    if kind == "spaces":
        y = np.where(y, " up", "1.0")
    elif kind in ("NA", "None"):
        y = np.where(y, "up", np.array(None if kind == "None" else kind, object))
        with pytest.raises(InputError, match="a missing class"):
            Classifier(options=QUICK).fit(X, y)
        return
    else:
        y = y.astype(int).astype(kind)
    learns = kind == "int64"  # the others need no model that has learnt
    made = Classifier(options=QUICK if learns else QUICK | {"training.steps": 1}).fit(X, y)
    assert set(made.predict(X).tolist()) <= set(np.unique(y).tolist())
    assert made.score(X, y) > 0.9 or not learns
    made.save(tmp_path / "saved")
    loaded = Classifier.load(tmp_path / "saved")
    assert loaded.score(X, y) == made.score(X, y)
    assert _names_of(loaded.predict(X)).tolist() == _names_of(made.predict(X)).tolist()
    assert np.allclose(np.sort(loaded.predict_proba(X)), np.sort(made.predict_proba(X)))


@pytest.mark.slow
def test_classes_of_frames_and_numbers_as_classes() -> None:
    X, y = arrays()
    frame = pandas.DataFrame({"id": np.repeat(np.arange(60), 12), "a": X[:, 1].ravel(), "kind": np.repeat(y, 12)})
    made = Classifier(group="id", target="kind", options=QUICK).fit(frame)
    assert made.score(frame) > 0.9
    assert made.predict_proba(frame.drop(columns="kind")).shape == (60, 2)
    with pytest.raises(ConfigError, match="column of classes is not named"):
        Classifier().fit(frame)
    numbers = Classifier(options=QUICK).fit(X, (y == "up").astype(int))
    assert numbers.predict(X).dtype.kind == "i"
    assert numbers.score(X, (y == "up").astype(int)) > 0.9
    whole = frame.assign(kind=(frame["kind"] == "up").astype(int))
    made = Classifier(group="id", target="kind", options=QUICK).fit(whole)
    assert set(made.predict(whole).tolist()) <= {0, 1}


@pytest.mark.parametrize("channels", [1, 3])
def test_an_array_of_other_channels_is_refused(classifier: Classifier, channels: int) -> None:
    X, _ = arrays(4)
    with pytest.raises(InputError, match=f"of {channels} channels, and this Classifier was fitted with arrays of 2"):
        classifier.predict(np.concatenate([X, X], 1)[:, :channels])


def test_a_channel_without_a_value_is_a_channel() -> None:
    X, y = arrays()
    X = np.concatenate([X, np.full_like(X[:, :1], np.nan)], 1)
    made = Classifier(options=QUICK).fit(X, y)
    assert made.run_.encoding.columns == ["x0", "x1", "x2"]
    assert made.score(X, y) > 0.9


def test_every_parameter_comes_back(classifier: Classifier, forecaster: Forecaster, tmp_path: Path) -> None:
    from sklearn.base import clone

    for number, made in enumerate((classifier, forecaster)):
        made.save(tmp_path / str(number))
        assert type(made).load(tmp_path / str(number)).get_params() == made.get_params()
    odd = clone(forecaster).set_params(options={"training.steps": np.int64(3), "model.hidden_size": torch.ones(1)})
    odd._set(forecaster.run_)
    with pytest.raises(InputError, match=r"parameters\['options'\]\['model.hidden_size'\] is a Tensor"):
        odd.save(tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


@pytest.mark.slow
def test_the_options_of_a_commands_run_become_parameters(tmp_path: Path) -> None:
    from sklearn.base import clone

    waves(6).to_csv(tmp_path / "waves.csv", index=False)
    given = [f"--{name}={value}" for name, value in QUICK.items() if "mixer" not in name]
    table = [
        "--data.path",
        str(tmp_path / "waves.csv"),
        "--data.group",
        "who",
        "--data.time",
        "t",
        "--model.head",
        "student",
    ]
    more = ["--model.mixer", "{kind: delta, heads: 2}", "--data.window", "32", "--out", str(tmp_path / "run")]
    assert main(["series", "train", *table, *given, *more]) == 0
    loaded = Forecaster.load(tmp_path / "run")
    assert (loaded.group, loaded.time, loaded.head, loaded.preset) == ("who", "t", "student", "liquid-series")
    again = clone(loaded).fit(waves(6))
    assert again.run_.model.config == loaded.run_.model.config
    expected = loaded.run_.model.state_dict()
    for name, value in again.run_.model.state_dict().items():
        assert torch.allclose(value, expected[name], atol=1e-4), name


def test_training_leaves_global_generators_as_they_were() -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    expected = drawn()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    Classifier(options=QUICK | {"training.steps": 2}).fit(*arrays(20))
    assert drawn() == expected


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.slow
def test_training_in_another_precision(precision: str) -> None:
    X, y = arrays()
    assert Classifier(options=QUICK | {"training.precision": precision}).fit(X, y).score(X, y) > 0.8


@pytest.mark.slow
def test_scikit_learn_validates_across_folds() -> None:
    from sklearn.model_selection import cross_val_score

    X, y = arrays()
    assert cross_val_score(Classifier(options=QUICK), X, y, cv=2, error_score="raise").mean() > 0.8


#: checks of scikit-learn that do not apply, and why
_TIME = "the second axis of a plain array is time: a series to predict may be longer than those of the training"
NOT_OURS = {
    "check_n_features_in": _TIME,
    "check_n_features_in_after_fitting": _TIME,
    "check_classifiers_train": _TIME,
    "check_estimators_unfitted": "it expects scikit-learn's own exception, and scikit-learn is not needed",
    "check_estimators_empty_data_messages": "it expects scikit-learn's own text, of features",
    "check_supervised_y_2d": "a column (n, 1) of classes is an error, and a warning is expected",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # scikit-learn's, about a class that is none of its own
def test_scikit_learns_own_checks_pass_but_for_those_that_do_not_apply() -> None:
    from sklearn.utils.estimator_checks import check_estimator

    made = Classifier(options=QUICK | {"training.precision": "64-true"})
    found = check_estimator(made, on_fail=None, on_skip=None, expected_failed_checks=NOT_OURS)
    counts = Counter(each["status"] for each in found)
    assert [each["check_name"] for each in found if each["status"] == "failed"] == []
    assert counts == {"passed": 44, "xfail": 8, "skipped": 1}
    page = (Path(__file__).parent.parent / "docs" / "series.md").read_text()
    assert f"Of `check_estimator`'s {len(found)} checks of the classifier {counts['passed']} pass" in page


@pytest.mark.slow
def test_series_of_different_lengths_and_frames_of_arrays(classifier: Classifier) -> None:
    import scipy.sparse

    X, y = arrays()
    uneven = [each[:, : 6 + number % 6] for number, each in enumerate(X)]
    made = Classifier(options=QUICK).fit(uneven, y)
    assert made.score(uneven, y) > 0.8
    assert np.allclose(made.predict_proba(uneven[:1]), made.predict_proba(uneven)[:1], atol=1e-5)
    with pytest.raises(InputError, match=r"X\[1\] has 1 channels, and X\[0\] has 2"):
        made.predict([uneven[0], uneven[1][:1]])
    flat = pandas.DataFrame(X[:, 1])
    alone = Classifier(options=QUICK).fit(flat, y)
    assert (alone.predict(flat) == alone.predict(X[:, 1])).all()
    with pytest.raises(InputError, match="sparse input is not supported"):
        classifier.predict(scipy.sparse.csr_matrix(np.eye(3)))
    with pytest.raises(InputError, match="y has one class, 'up': a classification needs two"):
        Classifier().fit(X, np.full(60, "up"))
