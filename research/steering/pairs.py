"""Two dials turned at once: what each of the two labels becomes, and how often both have the dials' signs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glissando.errors import ConfigError
from glissando.evaluation.steering import Dials

#: what a pair is turned over by default, each dial for itself
PAIR_VALUES = (-1.0, 0.0, 1.0)


@dataclass(frozen=True)
class PairGrid:
    """labels[d, i, j]: dial d's label of every prompt's text, the first dial at values[i], the second at values[j]."""

    names: tuple[str, str]
    values: tuple[float, ...]
    labels: NDArray[np.float64]  # (2, values, values, prompts); NaN: no evidence

    def means(self) -> NDArray[np.float64]:
        """(2, values, values): mean labels; a text without evidence counts as 0."""
        return np.nan_to_num(self.labels).mean(-1)

    def success(self) -> NDArray[np.float64]:
        """(values, values): the share of texts in which the label of every dial not at 0 has its sign; NaN where both
        are at 0."""
        u = np.sign(self.values)
        labels = np.nan_to_num(self.labels)
        right = [labels[0] * u[:, None, None] > 0, labels[1] * u[None, :, None] > 0]
        free = [(u == 0)[:, None, None], (u == 0)[None, :, None]]
        share = ((right[0] | free[0]) & (right[1] | free[1])).mean(-1)
        return np.where(free[0][..., 0] & free[1][..., 0], math.nan, share)

    def as_dict(self) -> dict[str, Any]:
        """Rows go over the first dial's values, columns over the second's."""
        first, second = self.means()
        return {
            "dials": list(self.names),
            "prompts": self.labels.shape[-1],
            "u": list(self.values),
            f"mean_{self.names[0]}": first.tolist(),
            f"mean_{self.names[1]}": second.tolist(),
            "joint_success": self.success().tolist(),
        }


def pair_grids(dials: Dials, names: Sequence[str], values: Sequence[float] = PAIR_VALUES) -> list[PairGrid]:
    """Every two of the dials `names` over the square of `values`, further dials at 0.

    Raises ConfigError for values that `check_pair_values` refuses and for a corpus without an oracle.
    """
    values = check_pair_values(values)
    return [_pair_grid(dials, (first, second), values) for first, second in combinations(names, 2)]


def _pair_grid(dials: Dials, names: tuple[str, str], values: tuple[float, ...]) -> PairGrid:
    size, (first, second) = len(values), names
    cells = [dials.texts({first: u, second: v}) for u, v in product(values, values)]
    labels = np.array([[dials.trial.judge(texts, name) for texts in cells] for name in names])
    return PairGrid(names, values, labels.reshape(2, size, size, -1))


def check_pair_values(values: Sequence[float]) -> tuple[float, ...]:
    """The values in order, each once. Raises ConfigError unless they are finite, and some below and above 0."""
    values = tuple(sorted(set(values)))
    if not all(map(math.isfinite, values)) or not values or not values[0] < 0 < values[-1]:
        raise ConfigError(f"pair_values needs a value below 0 and one above, such as [-1, 0, 1]; got {list(values)}")
    return values
