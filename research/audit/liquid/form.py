"""What of the Liquid State-Space Model shows without training: its cost, gradients, matrix, streams and rows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.backbone import ModelState
from glissando.mixers.liquid.zero_order_hold import discretize, hippo_legs
from glissando.model import LanguageModel
from glissando.state import state_bytes
from research.audit.claim import Finding, Plan
from research.audit.training import logits_of, seeded
from research.published.liquid_ssm import Core, PublishedLiquid, called_hippo

PRESET, DENSE = "liquid-ssm", "liquid-ssm-dense"
VOCABULARY = 1000


def published_model(plan: Plan, state: int = 128, layers: int = 4) -> PublishedLiquid:
    """New weights; a small one for quick runs."""
    if plan.quick:
        return seeded(
            0, lambda: PublishedLiquid(VOCABULARY, 16, state // 16, layers=layers // 2 or 1, length=24).eval()
        )
    return seeded(0, lambda: PublishedLiquid(VOCABULARY, 2 * state, state, layers=layers).eval())


def our_model(plan: Plan, preset: str = PRESET, state: int = 128) -> LanguageModel:
    small = {"hidden_size": 16, "depth": {"layers": 2}} if plan.quick else {"hidden_size": 2 * state}
    mixer = {"kind": "liquid", "state_size": 8 if plan.quick else state}
    return seeded(0, lambda: LanguageModel.from_preset(preset, **{**small, "mixer": mixer}).eval())


def some_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- cost

LINEAR = 1.25
#: of the state; the width is twice that. Far enough up for cubes to outweigh what a call costs
SIZES = (256, 512)
#: 2^2.3: squares, and what a cache that is left behind costs
SQUARE = 4.9


def cost_as_published(plan: Plan) -> Finding:
    """Milliseconds a token of the published form against length, state size and, decoding, context; one layer."""
    lengths, model = (4, 8) if plan.quick else (16, 64), published_model(plan, layers=1)
    again = [partial(_decode_again, model, some_ids(1, n)) for n in lengths]
    return _cost(plan, "one layer, 128 states", lengths, model, again, [published_model(plan, n, 1) for n in SIZES], 4)


def cost_corrected(plan: Plan) -> Finding:
    """The same of the diagonal dynamics, the published size and number of layers."""
    lengths, model = (4, 8) if plan.quick else (512, 4096), our_model(plan)
    steps, sizes = [_decoder(model, some_ids(1, n)) for n in lengths], [our_model(plan, state=n) for n in SIZES]
    return _cost(plan, "four layers, 128 states", lengths, model, steps, sizes, lengths[0])


def _cost(
    plan: Plan,
    what: str,
    lengths: tuple[int, int],
    model: nn.Module,
    decoders: Sequence[Callable[[], object]],
    sizes: Sequence[nn.Module],
    few: int,
) -> Finding:
    reading = [_token_ms(partial(_read, model, some_ids(1, n)), n, plan) for n in lengths]
    decoding = [_token_ms(decode, 1, plan) for decode in decoders]
    small, large = (_token_ms(partial(_read, each, some_ids(1, few)), few, plan) for each in sizes)
    twice = large / small
    said = (
        f"{what}: reading takes {reading[0]:.3g} ms a token at {lengths[0]:,} tokens and {reading[1]:.3g} at "
        f"{lengths[1]:,}; a decoded token {decoding[0]:.3g} ms behind {lengths[0]:,} and {decoding[1]:.3g} behind "
        f"{lengths[1]:,}; {SIZES[1]} states cost {twice:.1f} times what {SIZES[0]} do (4 for d^2, 8 for d^3)"
    )
    checks = {
        "reading is linear in length": reading[1] <= LINEAR * reading[0],
        "decoding costs the same behind any context": decoding[1] <= LINEAR * decoding[0],
        f"twice the size costs 4 times as much, {SQUARE} at the most": twice <= SQUARE,
    }
    figures = {"lengths": lengths, "read_ms": reading, "decode_ms": decoding, "twice_the_size": twice}
    return Finding(said, figures, checks)


def _token_ms(call: Callable[[], object], tokens: int, plan: Plan) -> float:
    """Milliseconds a token, the least of some calls after one that warms up."""
    call()
    found = []
    for _ in range(1 if plan.quick else 4):
        began = time.perf_counter()
        call()
        found.append(1e3 * (time.perf_counter() - began) / tokens)
    return min(found)


@torch.no_grad()
def _read(model: nn.Module, ids: Tensor) -> Tensor:
    return logits_of(model, ids)


def _decode_again(model: PublishedLiquid, ids: Tensor) -> Tensor:
    return model.generate(ids, 1)


def _decoder(model: LanguageModel, ids: Tensor) -> Callable[[], object]:
    """One more token from the state behind ids."""
    with torch.no_grad():
        _, state = model(ids, model.init_state(1))

    @torch.no_grad()
    def step() -> object:
        return model(ids[:, :1], state)

    return step


# ---------------------------------------------------------------------- does every part learn


def learning_as_published(plan: Plan) -> Finding:
    """The parameters that a step's loss gives no gradient."""
    return _learning({"published form": published_model(plan)})


def learning_corrected(plan: Plan) -> Finding:
    """The same of our two dynamics."""
    dense = our_model(plan, DENSE)
    return _learning({"diagonal": our_model(plan), "dense": dense})


def _learning(models: dict[str, nn.Module]) -> Finding:
    summary, checks, figures = [], {}, {}
    for name, model in models.items():
        ids = some_ids(2, 9)
        model.train()
        F.cross_entropy(logits_of(model, ids).flatten(0, 1), some_ids(2, 9, seed=1).flatten()).backward()
        silent = {n: p.numel() for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        share = sum(silent.values()) / sum(p.numel() for p in model.parameters())
        parts = sorted({re.sub(r"^layers\.\d+\.(core\.)?", "", n).split(".")[0] for n in silent})
        summary.append(f"{name}: {share:.1%} of the parameters get no gradient ({', '.join(parts) or 'none'})")
        checks[f"{name}: every parameter gets a gradient"] = not silent
        figures[name] = {"share": share, "silent": sorted(silent)}
    return Finding("; ".join(summary), figures, checks)


# ---------------------------------------------------------------------- HiPPO

COEFFICIENTS, SIGNAL = 32, 400


def hippo_as_published(plan: Plan) -> Finding:
    """The published matrix: how far it lets a disturbance grow, what it keeps of a signal, and the states it makes."""
    size = 32 if plan.quick else 128
    core = seeded(0, lambda: Core(2 * size, size, hippo=True))
    with torch.no_grad():
        states, _ = core.run(torch.randn(1, 8, size, generator=torch.Generator().manual_seed(0)))
    held = float((states.abs() >= 1e6).float().mean())
    growth = _largest_growth(0.1 * called_hippo(size).double())
    error = _reconstruction(called_hippo(COEFFICIENTS).double())
    said = (
        f"{size} states, times 0.1: a disturbance grows by up to {growth:.1e} before it decays; {held:.0%} of the "
        f"states of the first eight tokens are at the clamp of 1e6; a smooth signal rebuilt from {COEFFICIENTS} "
        f"coefficients with it in LegS's place is off by {error:.2g} of itself"
    )
    return _remembers(said, growth, error, {"at_clamp": held}, draw=lambda target: _draw_growth(size, target))


def hippo_corrected(plan: Plan) -> Finding:
    """HiPPO-LegS itself; and the modes of the diagonal dynamics as they start."""
    size = 32 if plan.quick else 128
    A, B = hippo_legs(size)
    law = float((A + A.T + torch.eye(size) + B @ B.T).abs().max())
    growth, error = _largest_growth(0.1 * A), _reconstruction(hippo_legs(COEFFICIENTS)[0])
    dynamics: Any = our_model(plan).depth.blocks[0].mixer.dynamics  # type: ignore[index, union-attr]
    steps, decay = dynamics.log_step.exp(), dynamics.log_decay.exp()
    horizons = (1 / (steps * (decay + 1 / dynamics.taus()))).detach()
    said = (
        f"HiPPO-LegS, {size} states: A + A' = -(I + BB') to {law:.0e}, so nothing grows (by up to {growth:.2f}); the "
        f"same signal rebuilt is off by {error:.1%}. Our diagonal modes start with horizons of "
        f"{float(horizons.min()):.2g} to {float(horizons.max()):.3g} tokens"
    )
    return _remembers(said, growth, error, {"law": law})


def _remembers(said: str, growth: float, error: float, more: dict[str, float], **draw: Any) -> Finding:
    checks = {"no disturbance grows": growth <= 1 + 1e-9, "a smooth signal can be rebuilt within 5 %": error < 0.05}
    return Finding(said, {"growth": growth, "reconstruction_error": error, **more}, checks, **draw)


def _times(count: int = 40) -> Tensor:
    return torch.logspace(-2, 2, count, dtype=torch.float64)


def _growths(A: Tensor) -> Tensor:
    """The largest singular value of exp(tA) at each of `_times`."""
    return torch.stack([torch.linalg.matrix_norm(torch.linalg.matrix_exp(t * A), 2) for t in _times()])


def _largest_growth(A: Tensor) -> float:
    return float(_growths(A).max())


def _reconstruction(A: Tensor) -> float:
    """|f' - f| / |f| of a smooth f on [0, 1], rebuilt from what dc/dt = (A c + B f) / t makes of it, exactly held."""
    x = (torch.arange(SIGNAL, dtype=torch.float64) + 0.5) / SIGNAL
    f = torch.sin(2 * torch.pi * x) + 0.5 * torch.cos(5 * torch.pi * x) + x
    B = hippo_legs(len(A))[1]
    k = torch.arange(1, SIGNAL, dtype=torch.float64)
    Ad, Bd = discretize(A, B, ((k + 1) / k).log())
    c = torch.zeros(len(A), dtype=torch.float64)
    c[0] = f[0]
    for step, value in enumerate(f[1:]):
        c = Ad[step] @ c + Bd[step, :, 0] * value
    i = torch.arange(len(A), dtype=torch.float64)
    rebuilt = torch.special.legendre_polynomial_p(2 * x - 1, i.unsqueeze(1)) * (2 * i + 1).sqrt().unsqueeze(1)
    error = float(((c @ rebuilt) - f).norm() / f.norm())
    return error if error == error else float("inf")


def _draw_growth(size: int, target: Path) -> Path:
    from glissando.evaluation.figures import figure_and_axes

    figure, (axes,) = figure_and_axes()
    for name, A, color in (
        ("published", called_hippo(size).double(), "#b3261e"),
        ("LegS", hippo_legs(size)[0], "#0b6e99"),
    ):
        axes.plot(_times(), _growths(0.1 * A), color=color, linewidth=1.8, label=f"{name}, {size} states, times 0.1")
    axes.axhline(1, color="#5f6b76", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="time t", ylabel="how far exp(tA) can magnify a disturbance")
    axes.set_ylim(bottom=1e-6)
    axes.set_title("What HiPPO's matrix does to a state, and the published one")
    axes.legend(frameon=False)
    figure.savefig(target)
    return target


# ---------------------------------------------------------------------- endless sequences


def endless_as_published(plan: Plan) -> Finding:
    """What is read beyond the table of positions; whether earlier outputs stay the same. A small form."""
    model = seeded(0, lambda: PublishedLiquid(VOCABULARY, 32, 16, layers=2, length=32).eval())
    limit, ids = model.positions.num_embeddings, some_ids(1, 40)
    with torch.no_grad():
        longer = model(ids).shape[1]
        moved = float((model(ids[:, :24])[0, :8] - model(ids[:, :8])[0]).abs().max())
    said = (
        f"of {ids.shape[1]} tokens {longer} are read with a table of {limit} positions (published: 512), and the "
        f"rest is dropped without a message; the logits of eight tokens move by {moved:.1e} when 16 more follow (the "
        "gate is a mean over the whole sequence)"
    )
    checks = {
        "more than the table holds can be read": longer > limit,
        "earlier outputs stay the same as the text continues": moved == 0,
    }
    return Finding(said, {"limit": limit, "moved": moved}, checks)


def endless_corrected(plan: Plan) -> Finding:
    """A text in pieces and whole, in float64, four times as long as the published table; and the state's size."""
    model = our_model(plan).double()
    length, piece = (64, 13) if plan.quick else (2048, 97)
    ids = some_ids(1, length)
    with torch.no_grad():
        whole, _ = model(ids)
        state: ModelState | None = model.init_state(1)
        pieces, sizes = [], []
        for part in ids.split(piece, 1):
            said_, state = model(part, state)
            pieces.append(said_)
            sizes.append(state_bytes(state))
        gap = float((torch.cat(pieces, 1) - whole).abs().max())
        moved = float((whole[:, : length // 2] - model(ids[:, : length // 2])[0]).abs().max())
    said = (
        f"{length:,} tokens in pieces of {piece} give the logits of the whole to {gap:.0e}; the first half's move by "
        f"{moved:.0e} as the other follows; the state takes {sizes[-1]:,} bytes behind any number of tokens"
    )
    checks = {
        "pieces give what the whole does": gap < 1e-9,
        "earlier outputs stay the same as the text continues": moved < 1e-12,
        "the state does not grow": len(set(sizes)) == 1,
    }
    return Finding(said, {"gap": gap, "moved": moved, "state_bytes": sizes[-1]}, checks)


# ---------------------------------------------------------------------- rows


def rows_as_published(plan: Plan) -> Finding:
    """Rows together and alone."""
    return _rows(published_model(plan).double())


def rows_corrected(plan: Plan) -> Finding:
    return _rows(our_model(plan).double())


@torch.no_grad()
def _rows(model: nn.Module) -> Finding:
    ids = some_ids(3, 9)
    together, alone = logits_of(model, ids), torch.cat([logits_of(model, row) for row in ids.split(1)])
    gap = float((together - alone).abs().max())
    said = f"a row's logits move by up to {gap:.1e} where two other rows stand beside it (float64)"
    return Finding(said, {"gap": gap}, {"rows are independent": gap < 1e-12})
