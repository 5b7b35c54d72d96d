"""Decoding by a compiled step: `Decoder(model).step(ids, rows)` computes one token of every row in one call.

A model is written as a program (`program`), a table of instructions that one compiled function runs (`interpreter`,
`kernels`). `generate`, `stream` and the server use it where a model has it (`steps`).
"""

from glissando.decoding.steps import CompiledStep, PlainStep, Step, computing, decoder_of, step_from
from glissando.errors import NotCompiled

__all__ = ["CompiledStep", "NotCompiled", "PlainStep", "Step", "computing", "decoder_of", "step_from"]
