"""The claims of the Liquid State-Space Model."""

from __future__ import annotations

from research.audit.claim import Claim
from research.audit.liquid import form, series

SYSTEM = "Liquid State-Space Model"

CLAIMS = (
    Claim(
        "liquid-cost",
        SYSTEM,
        "A sequence of N tokens costs O(N d^2)",
        "O(N d^2), claimed without a figure",
        form.cost_as_published,
        form.cost_corrected,
    ),
    Claim(
        "liquid-learning",
        SYSTEM,
        "Every part of it learns, the time constants among them",
        "claimed without a figure",
        form.learning_as_published,
        form.learning_corrected,
        notes="tau, A and B are detached before the discretisation",
    ),
    Claim(
        "liquid-hippo",
        SYSTEM,
        "Its HiPPO matrix preserves what was seen",
        "claimed without a figure",
        form.hippo_as_published,
        form.hippo_corrected,
        notes="the published matrix has the other sign below the diagonal and -(2i + 1) on it",
    ),
    Claim(
        "liquid-adaptation",
        SYSTEM,
        "Time constants grow where the input is smooth and shrink where it is spiky",
        "shown with four patterns",
        series.adaptation_as_published,
        series.adaptation_corrected,
        notes="the patterns lay along the features of one step; corrected, they run over time",
    ),
    Claim(
        "liquid-irregular",
        SYSTEM,
        "It takes irregularly sampled series",
        "claimed without a figure",
        series.irregular_as_published,
        series.irregular_corrected,
        notes="corrected: two decaying oscillators at uneven times; equal parameters, the better of two rates",
    ),
    Claim(
        "liquid-endless",
        SYSTEM,
        "It reads sequences without end",
        "claimed without a figure",
        form.endless_as_published,
        form.endless_corrected,
    ),
    Claim(
        "liquid-rows",
        SYSTEM,
        "The rows of a batch are independent",
        "assumed by batching",
        form.rows_as_published,
        form.rows_corrected,
        notes="the published substep is the least over the batch",
    ),
)
