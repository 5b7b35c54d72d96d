"""The classifier with aeon's base class; tests/test_series_estimators.py has what needs no aeon."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aeon", reason="aeon is not installed: pip install -e '.[aeon]'")
from test_series_estimators import QUICK, arrays

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from aeon_classifier import AeonClassifier


def test_it_predicts_what_the_classifier_predicts_of_any_collection() -> None:
    from aeon.testing.estimator_checking import check_estimator

    X, y = arrays()
    made = AeonClassifier(options=QUICK).fit(X, y)
    assert made.score(X, y) > 0.9
    assert (made.predict(X) == made.classifier_.predict(X)).all()
    assert made.classes_.tolist() == ["down", "up"]
    uneven = [each[:, : 6 + number % 6] for number, each in enumerate(X)]
    assert made.predict_proba(uneven).shape == (60, 2)
    assert AeonClassifier(options=QUICK).fit(uneven, y).score(uneven, y) > 0.8
    short = np.concatenate([made.predict_proba([each]) for each in uneven[:3]])
    assert np.allclose(short, made.predict_proba(uneven)[:3], atol=1e-5)
    found = check_estimator(AeonClassifier(options=QUICK | {"training.steps": 3}), raise_exceptions=False)
    assert {name: result for name, result in found.items() if result != "PASSED"} == {}
