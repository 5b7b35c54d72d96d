"""The claims of the Minimal Transformer and of its growth."""

from __future__ import annotations

from research.audit.claim import claims
from research.audit.minimal import form, growth, training

CLAIMS = claims(
    "Minimal Transformer",
    {
        "minimal-parameters": (form, "size", "The model has 2,904 parameters", "2,904"),
        "minimal-runs": (
            form,
            "runs",
            "The code runs as it is printed",
            "implied by printing the code",
            "attention overwrites the name of a shape, so that rows must be as many as tokens",
        ),
        "minimal-scoring": (
            form,
            "scoring",
            "Only the answer is scored, and not the question before the tab",
            "claimed without a figure",
            "the published training step computes the mask and does not use it",
        ),
        "minimal-pairs": (
            form,
            "pairs",
            "About 450 pairs to train on and 75 to validate come with it",
            "about 450 and 75",
        ),
        "minimal-memory": (
            training,
            "memory",
            "It memorises about 500 short sequences in 100 to 200 epochs",
            "about 500; thousands raise the loss's floor",
            "batch size not stated, 32 here; corrected: batches of 128, rate 1e-2 in place of 1e-3",
        ),
        "minimal-shift": (
            training,
            "shift",
            "It could learn the rule of its pairs, every character moved by one",
            "claimed without a figure",
        ),
        "minimal-rope": (
            training,
            "rope",
            "Rotating the values by position too helps",
            "claimed without a comparison",
            "of the text; the code rotates queries and keys alone",
        ),
        "minimal-dropout": (
            training,
            "dropout",
            "Dropout of min(0.1, 0.5 d / 256), tiny in a tiny model, is harmless",
            "claimed without a comparison",
            "of the text, not the code. No higher: by less than 0.01 nats",
        ),
        "minimal-growth": (
            growth,
            "exact",
            "Origami growth, by mirrored weights and repeated layers, preserves the function",
            "claimed without a figure",
        ),
        "minimal-cheaper": (
            growth,
            "cheaper",
            "Growing a small model is cheaper than training the large one",
            "claimed without a comparison",
            "2,648 to 7,232 to 19,328 parameters, at 5, 15 and 80 % of the FLOPs; Adam's moments grow too, and what "
            "growth left to the learning rates is released",
        ),
    },
)
