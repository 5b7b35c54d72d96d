"""The classifier with aeon's base class, for its pipelines and ensembles: needs aeon, the `[aeon]` extra.

from aeon_classifier import AeonClassifier
AeonClassifier(options={"training.seconds": 60}).fit(X, y).predict(X)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from aeon.classification import BaseClassifier

from glissando.series import Classifier


class AeonClassifier(BaseClassifier):
    """`Classifier` for collections as aeon has them: arrays (n, channels, time), or lists of arrays (channels, time) of
    different lengths, where NaN is a value that was not observed.

    Args:
        preset, options, seed, verbose: As of `glissando.series.Classifier`.

    `classifier_` is the fitted Classifier, which can be saved.
    """

    _tags: ClassVar[dict[str, Any]] = {
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "capability:missing_values": True,
        "X_inner_type": ["np-list", "numpy3D"],
        "algorithm_type": "deeplearning",
    }

    def __init__(
        self, preset: str = "liquid-series", options: Mapping[str, Any] | None = None, seed: int = 0,
        verbose: bool = False,
    ) -> None:  # fmt: skip
        self.preset, self.options, self.seed, self.verbose = preset, options, seed, verbose
        super().__init__()

    def _fit(self, X: Any, y: np.ndarray) -> AeonClassifier:
        self.classifier_ = Classifier(**self.get_params(deep=False)).fit(X, y)
        return self

    def _predict(self, X: Any) -> np.ndarray:
        return self.classifier_.predict(X)

    def _predict_proba(self, X: Any) -> np.ndarray:
        return self.classifier_.predict_proba(X)
