"""The claims of the Minimal Transformer and of its growth."""

from __future__ import annotations

from research.audit.claim import Claim
from research.audit.minimal import form, growth, training

SYSTEM = "Minimal Transformer"

CLAIMS = (
    Claim(
        "minimal-parameters",
        SYSTEM,
        "The model has 2,904 parameters",
        "2,904",
        form.size_as_published,
        form.size_corrected,
    ),
    Claim(
        "minimal-runs",
        SYSTEM,
        "The code runs as it is printed",
        "implied by printing the code",
        form.runs_as_published,
        form.runs_corrected,
        notes="attention overwrites the name of a shape, so that rows must be as many as tokens",
    ),
    Claim(
        "minimal-scoring",
        SYSTEM,
        "Only the answer is scored, and not the question before the tab",
        "claimed without a figure",
        form.scoring_as_published,
        form.scoring_corrected,
        notes="the published training step computes the mask and does not use it",
    ),
    Claim(
        "minimal-pairs",
        SYSTEM,
        "About 450 pairs to train on and 75 to validate come with it",
        "about 450 and 75",
        form.pairs_as_published,
        form.pairs_corrected,
    ),
    Claim(
        "minimal-memory",
        SYSTEM,
        "It memorises about 500 short sequences in 100 to 200 epochs",
        "about 500; thousands raise the loss's floor",
        training.memory_as_published,
        training.memory_corrected,
        notes="batch size not stated, 32 here; corrected: batches of 128, rate 1e-2 in place of 1e-3",
    ),
    Claim(
        "minimal-shift",
        SYSTEM,
        "It could learn the rule of its pairs, every character moved by one",
        "claimed without a figure",
        training.shift_as_published,
        training.shift_corrected,
    ),
    Claim(
        "minimal-rope",
        SYSTEM,
        "Rotating the values by position too helps",
        "claimed without a comparison",
        training.rope_as_published,
        training.rope_corrected,
        notes="of the text; the code rotates queries and keys alone",
    ),
    Claim(
        "minimal-dropout",
        SYSTEM,
        "Dropout of min(0.1, 0.5 d / 256), tiny in a tiny model, is harmless",
        "claimed without a comparison",
        training.dropout_as_published,
        training.dropout_corrected,
        notes="of the text, not the code. No higher: by less than 0.01 nats",
    ),
    Claim(
        "minimal-growth",
        SYSTEM,
        "Origami growth, by mirrored weights and repeated layers, preserves the function",
        "claimed without a figure",
        growth.exact_as_published,
        growth.exact_corrected,
    ),
    Claim(
        "minimal-cheaper",
        SYSTEM,
        "Growing a small model is cheaper than training the large one",
        "claimed without a comparison",
        growth.cheaper_as_published,
        growth.cheaper_corrected,
        notes="2,648 to 7,232 to 19,328 parameters, at 5, 15 and 80 % of the FLOPs; Adam's moments grow too, and what "
        "growth left to the learning rates is released",
    ),
)
