"""The claims of the Continuous Transformer."""

from __future__ import annotations

from research.audit.claim import claims
from research.audit.continuous import form, training

CLAIMS = claims(
    "Continuous Transformer",
    {
        "continuous-parameters": (form, "size", "The model has 2.91M parameters", "2.91M"),
        "continuous-accuracy": (
            training,
            "accuracy",
            "It predicts 70 to 72 % of the characters of TinyStories, at 0.90 to 0.95 nats a character",
            "0.90-0.95 nats and 70-72 %, of training batches, after 134k steps",
            "one window a step, AdamW 3e-4, homeostatic factor, clip 1",
        ),
        "continuous-causality": (
            form,
            "causality",
            "It is autoregressive: what a position predicts does not depend on what follows",
            "assumed by its training and its generation",
            "new weights, random bytes",
        ),
        "continuous-projection": (
            form,
            "projection",
            "The projection after each step is exact and keeps the flow stable",
            "zero mean and unit deviation, claimed without a figure",
        ),
        "continuous-homeostasis": (
            training,
            "homeostasis",
            "A learning rate that follows the gradient's norm, homeostatic, helps",
            "used, without a comparison",
            "the published form at a small size; the same windows for all",
        ),
        "continuous-samples": (
            training,
            "samples",
            "It writes fluent text",
            "a sample of 200 characters after 'Once upon a time' (temperature 0.8, top-p 0.9), shown",
            "known words and pairs of words are necessary for fluency, and not sufficient",
        ),
    },
)
