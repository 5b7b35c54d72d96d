"""The claims of the Continuous Transformer."""

from __future__ import annotations

from research.audit.claim import Claim
from research.audit.continuous import form, training

SYSTEM = "Continuous Transformer"

CLAIMS = (
    Claim(
        "continuous-parameters",
        SYSTEM,
        "The model has 2.91M parameters",
        "2.91M",
        form.size_as_published,
        form.size_corrected,
    ),
    Claim(
        "continuous-accuracy",
        SYSTEM,
        "It predicts 70 to 72 % of the characters of TinyStories, at 0.90 to 0.95 nats a character",
        "0.90-0.95 nats and 70-72 %, of training batches, after 134k steps",
        training.accuracy_as_published,
        training.accuracy_corrected,
        notes="one window a step, AdamW 3e-4, homeostatic factor, clip 1",
    ),
    Claim(
        "continuous-causality",
        SYSTEM,
        "It is autoregressive: what a position predicts does not depend on what follows",
        "assumed by its training and its generation",
        form.causality_as_published,
        form.causality_corrected,
        notes="new weights, random bytes",
    ),
    Claim(
        "continuous-projection",
        SYSTEM,
        "The projection after each step is exact and keeps the flow stable",
        "zero mean and unit deviation, claimed without a figure",
        form.projection_as_published,
        form.projection_corrected,
    ),
    Claim(
        "continuous-homeostasis",
        SYSTEM,
        "A learning rate that follows the gradient's norm, homeostatic, helps",
        "used, without a comparison",
        training.homeostasis_as_published,
        training.homeostasis_corrected,
        notes="the published form at a small size; the same windows for all",
    ),
    Claim(
        "continuous-samples",
        SYSTEM,
        "It writes fluent text",
        "a sample of 200 characters after 'Once upon a time' (temperature 0.8, top-p 0.9), shown",
        training.samples_as_published,
        training.samples_corrected,
        notes="known words and pairs of words are necessary for fluency, and not sufficient",
    ),
)
