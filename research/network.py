"""Layers between two linear maps, as the comparisons of mixers use them: x (B, T, F) -> y (B, T, O).

Here a step is a value and the time for which it is held, the time until the next one, so that y is read at the end of
it and every model of a comparison knows when the next value comes. The library's SeriesModel reads the time since the
step before, and is asked with a horizon.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from glissando.backbone import Backbone, BackboneConfig, ModelState
from glissando.config import from_dict
from glissando.mixers import Context


class Network(Backbone):
    """The options are those of a BackboneConfig; weights start as PyTorch's do."""

    _inputs = "the steps of x"
    input_mean: Tensor
    input_scale: Tensor

    def __init__(self, options: dict[str, Any], inputs: int, outputs: int) -> None:
        super().__init__()
        self.config = from_dict(BackboneConfig, {"init": "torch", **options}, "model")
        self.entry = nn.Linear(inputs, self.config.hidden_size)
        self._build(self.config, self.config.hidden_size)
        self.head = nn.Linear(self.config.hidden_size, outputs)
        # what the patterns of glissando.evaluation.diagnostics are scaled by
        self.register_buffer("input_mean", torch.zeros(inputs))
        self.register_buffer("input_scale", torch.ones(inputs))
        self._start()

    def forward(
        self,
        x: Tensor,
        state: ModelState | None = None,
        *,
        dt: Tensor | None = None,
        mask: Tensor | None = None,
        control: Tensor | None = None,
    ) -> tuple[Tensor, ModelState | None]:
        """As SeriesModel.forward, but for the meaning of dt."""
        read, ctx, order = self._prepared(x, state, Context(mask, dt, control))
        h, inner = self.depth(self.entry(read), None if state is None else state.depth, ctx)
        h, state = self._finished(h, inner, state, x, ctx, order)
        return self.head(h), state
