"""Training of each nano preset beside this machine's own rate of matrix products, by CPU time of one thread."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed import Row, random_bytes
from glissando.model import LanguageModel
from glissando.precision import flushed_subnormals
from glissando.presets import preset_names

PRESETS = [name for name in preset_names() if name.endswith("-nano")]
_ROWS, _LENGTH = 2, 512
_GOAL = 0.5  # share of the products' rate
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def _product_rate(width: int) -> float:
    """FLOPs a second of the products of a step: all tokens by width x 4 width numbers of float32."""
    x, w = torch.ones(_ROWS * _LENGTH, width), torch.ones(width, 4 * width)
    began = time.thread_time()
    for _ in range(8):
        torch.mm(x, w)
    return 8 * 2 * len(x) * w.numel() / (time.thread_time() - began)


def training(preset: str, rounds: int) -> Row:
    """Tokens/s of a step (loss, gradients, AdamW) in float32 and 6 x parameters x tokens/s as a share of the products'
    rate; the name says what part of the step's time products and the costliest other operations take."""
    torch.set_num_threads(1)
    model, ids = LanguageModel.from_preset(preset), random_bytes(_ROWS, 1 + _LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parameters = sum(p.numel() for p in model.parameters())

    @flushed_subnormals()
    def step() -> None:
        logits, _ = model(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    rates, shares = [], []
    for _ in range(rounds):
        began = time.thread_time()
        step()
        rates.append(_ROWS * _LENGTH / (time.thread_time() - began))
        shares.append(6 * parameters * rates[-1] / _product_rate(model.config.hidden_size))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    spent = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    whole = sum(spent.values())
    products = sum(spent.pop(name, 0) for name in _PRODUCTS)
    largest = sorted(spent, key=lambda key: -spent[key])[:3]
    bounds = [
        f"products {products / whole:.0%}",
        *(f"{key.removeprefix('aten::')} {spent[key] / whole:.0%}" for key in largest),
    ]
    rate, share = statistics.median(rates), statistics.median(shares)
    name = f"training {preset} ({', '.join(bounds)})"
    return Row(name, rate, rate / share, "tokens/s", share, f"{_GOAL:g}", share >= _GOAL, "products alone")
