"""The claims of the Liquid State-Space Model."""

from __future__ import annotations

from research.audit.claim import claims
from research.audit.liquid import form, series

CLAIMS = claims(
    "Liquid State-Space Model",
    {
        "liquid-cost": (form, "cost", "A sequence of N tokens costs O(N d^2)", "O(N d^2), claimed without a figure"),
        "liquid-learning": (
            form,
            "learning",
            "Every part of it learns, the time constants among them",
            "claimed without a figure",
            "tau, A and B are detached before the discretisation",
        ),
        "liquid-hippo": (
            form,
            "hippo",
            "Its HiPPO matrix preserves what was seen",
            "claimed without a figure",
            "the published matrix has the other sign below the diagonal and -(2i + 1) on it",
        ),
        "liquid-adaptation": (
            series,
            "adaptation",
            "Time constants grow where the input is smooth and shrink where it is spiky",
            "shown with four patterns",
            "the patterns lay along the features of one step; corrected, they run over time",
        ),
        "liquid-irregular": (
            series,
            "irregular",
            "It takes irregularly sampled series",
            "claimed without a figure",
            "corrected: two decaying oscillators at uneven times; equal parameters, the better of two rates",
        ),
        "liquid-endless": (form, "endless", "It reads sequences without end", "claimed without a figure"),
        "liquid-rows": (
            form,
            "rows",
            "The rows of a batch are independent",
            "assumed by batching",
            "the published substep is the least over the batch",
        ),
    },
)
