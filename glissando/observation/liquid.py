"""What a liquid mixer measures for the training log."""

from __future__ import annotations

from torch import Tensor

from glissando.mixers import Context, Liquid

#: tokens of the first row that are looked at
_TOKENS = 64


def observe_liquid(mixer: Liquid, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
    """Quantiles of tau over modes and tokens, and a; at most 64 tokens of the first row."""
    x = x[:1, :_TOKENS]
    dt = None if ctx.dt is None else ctx.dt[:1, :_TOKENS]
    inputs, before = mixer.layer.inputs(x), mixer.init_state(1, x.device).x
    tau = mixer.dynamics.time_constants(inputs, before, dt)
    quantiles = tau.flatten().quantile(tau.new_tensor([0.05, 0.5, 0.95]))
    return (*quantiles.unbind(), mixer.dynamics.adaptations().mean())
