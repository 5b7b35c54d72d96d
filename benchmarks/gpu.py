"""What this library does on your GPU, beside what the GPU can do: `python -m benchmarks gpu` (or -m benchmarks.gpu).

    scan       GB/s of the recurrence beside the card's bandwidth, a copy on the device and, where they are installed,
               accelerated-scan and the HGRN kernel of flash-linear-attention
    tau        attention by one number a head beside PyTorch's scaled_dot_product_attention, 2k to 256k tokens
    delta      the delta rule beside scaled_dot_product_attention and, where it is installed, the kernel of
               flash-linear-attention, 1k to 32k tokens a row
    training   tokens/s and MFU of the five 124M presets and of a plain GPT of the same size: bf16, compiled, AdamW
    decoding   tokens/s of the five presets at 1 text and at 64

It prints tables in Markdown with its bars beside them, and writes them to --out. Bytes are those that a perfect kernel
reads and writes; MFU is the operations of glissando.flops over the card's bfloat16 rate. `--quick --device cpu` runs
every part of it in seconds at sizes that mean nothing, and says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cards import CARDS, Card
from benchmarks.plain_gpt import PlainGPT
from glissando.errors import GlissandoError
from glissando.flops import training_flops
from glissando.kernels.scan import scan
from glissando.machine import find_device
from glissando.mixers.delta.scan import delta_rule
from glissando.mixers.tau.attention import exponents, tau_attention
from glissando.model import LanguageModel

MODELS = ("transformer-124m", "continuous-transformer-124m", "liquid-ssm-124m", "delta-124m", "tauformer-124m")
PLAIN = "plain GPT"
#: the bars
SCAN_SHARE = 0.70
TAU_SHORT, TAU_LONG = (8192, 0.5), (32768, 1.0)
SPECTRAL_RATE, SPECTRAL_MFU = 350_000, 0.30


@dataclass(frozen=True)
class Sizes:
    """What is measured: scan (B, T, F); tau at `lengths` and delta at `delta_lengths`, `heads` of 64; training rows of
    `length` tokens. A figure is the median of `rounds` calls, of fewer once they have taken `seconds`."""

    scan: tuple[int, int, int] = (8, 4096, 2048)
    heads: int = 12
    lengths: tuple[int, ...] = tuple(2**n for n in range(11, 19))
    delta_lengths: tuple[int, ...] = (1024, 8192, 32768)
    rows: int = 16
    length: int = 1024
    steps: int = 10
    batches: tuple[int, ...] = (1, 64)
    prompt: int = 128
    written: int = 64
    rounds: int = 7
    seconds: float = 4.0
    compiled: bool = True
    model: dict[str, Any] = field(default_factory=dict)


QUICK = Sizes(
    scan=(2, 32, 16), heads=2, lengths=(64, 128), delta_lengths=(16, 32), rows=2, length=16, steps=1, batches=(1, 2),
    prompt=4, written=2, rounds=1, compiled=False, model={"hidden_size": 48, "vocab_size": 97, "depth.layers": 1},
)  # fmt: skip


@dataclass
class Bench:
    """Where and how much is measured, the rows of the tables, and what failed."""

    device: torch.device
    sizes: Sizes
    failures: list[str] = field(default_factory=list)

    @property
    def card(self) -> Card | None:
        return CARDS.get(self.name)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def seconds(self, call: Callable[[], object], rounds: int | None = None) -> float:
        """The median of some calls, after one or two that warm up."""

        def once() -> float:
            self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            return time.perf_counter() - began

        once()  # compiles
        taken = [once()]
        if taken[0] < self.sizes.seconds / 2:
            taken = [once()]
        while len(taken) < (rounds or self.sizes.rounds) and sum(taken) < self.sizes.seconds:
            taken.append(once())
        return statistics.median(taken)

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def attempt(self, what: str, measure: Callable[[], float]) -> float | str:
        """The figure, or a word for the table where it could not be taken; the reason is printed at the end."""
        try:
            return measure()
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:  # noqa: BLE001  one that fails must not cost the others; all are reported
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            return "failed"
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def bar(self, value: float | str | None, least: float, only_h100: bool = False) -> str:
        """Whether a figure meets a bar, where it can be said."""
        if not isinstance(value, float) or self.sizes.rounds == 1:
            return "not measured" if value is None or not isinstance(value, str) else f"MISSED ({value})"
        if only_h100 and not (self.card and self.card.h100):
            return "is for an H100 or better"
        return "met" if value >= least else "MISSED"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """In Markdown; numbers with at most four digits that count."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        return "" if value is None else str(value)

    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


# ---------------------------------------------------------------------- scan


def scan_table(bench: Bench) -> str:
    rows, steps, width = bench.sizes.scan
    place: dict[str, Any] = {"device": bench.device}
    x = torch.randn(rows, steps, width, **place)
    a = torch.rand(rows, steps, width, **place)
    z = torch.polar(a[..., : width // 2], torch.rand_like(a[..., : width // 2]))
    u = torch.view_as_complex(x.view(rows, steps, -1, 2))
    size, peak = 4 * x.numel(), bench.card.bandwidth if bench.card else None

    def trained(a: Tensor, x: Tensor) -> Callable[[], object]:
        leaves = (a.clone().requires_grad_(), x.clone().requires_grad_())
        grad = torch.randn_like(x)
        return lambda: torch.autograd.grad(scan(*leaves)[0], leaves, grad)

    def without(run: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(run)

    # A pass reads a and x and writes h; its gradient reads a, h and dh and writes da and dx.
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "copy on the device": (without(lambda: x.clone()), 2),
        "scan, real": (without(lambda: scan(a, x)), 3),
        "scan, complex": (without(lambda: scan(z, u)), 3),
        "scan and gradients, real": (trained(a, x), 8),
        "scan and gradients, complex": (trained(z, u), 8),
        **{f"{name}, real": (without(run), 3) for name, run in scan_peers(a, x).items()},
    }
    lines: list[list[object]] = []
    copied: float | str = 0.0
    for name, (run, passes) in cases.items():
        found = bench.attempt(name, partial(gigabytes, bench, run, passes * size))
        copied = found if name.startswith("copy") else copied
        share = found / peak if peak and isinstance(found, float) else None
        beside = found / copied if isinstance(found, float) and isinstance(copied, float) else None
        bar = bench.bar(share, SCAN_SHARE) if name in ("scan, real", "scan, complex") else ""
        lines.append([name, found, share, beside, f"{SCAN_SHARE:.2f} of peak: {bar}" if bar else ""])
    return table(["recurrence", "GB/s", "of peak", "of a copy", "bar"], lines)


def gigabytes(bench: Bench, run: Callable[[], object], moved: int) -> float:
    """Per second, of a call that has to move so many bytes."""
    return moved / bench.seconds(run) / 1e9


def scan_peers(a: Tensor, x: Tensor) -> dict[str, Callable[[], object]]:
    """The kernels of others that are installed, on the same numbers."""
    peers: dict[str, Callable[[], object]] = {}
    if x.device.type == "cuda" and find_spec("accelerated_scan"):
        from accelerated_scan.warp import scan as warp_scan  # type: ignore[import-not-found, unused-ignore]

        gates, tokens = (t.transpose(1, 2).contiguous() for t in (a, x))
        peers["accelerated-scan"] = partial(warp_scan, gates, tokens)
    if x.device.type == "cuda" and find_spec("fla"):
        from fla.ops.hgrn import fused_recurrent_hgrn  # type: ignore[import-not-found, unused-ignore]

        peers["fla HGRN"] = partial(fused_recurrent_hgrn, x, a.log())
    return peers


# ---------------------------------------------------------------------- tau


def tau_table(bench: Bench) -> str:
    lines: list[list[object]] = []
    for length in bench.sizes.lengths:
        for gradients in (False, True):
            what = f"T {length:,}" + (" and gradients" if gradients else "")
            standard, ours = (
                bench.attempt(f"{name}, {what}", partial(milliseconds, bench, partial(make, bench, length, gradients)))
                for name, make in (("SDPA", standard_row), ("tau", tau_call))
            )
            ratio: float | str | None = ours if isinstance(ours, str) else None
            if isinstance(ours, float) and isinstance(standard, float):
                ratio = standard / ours
            (short, half), (long, ahead) = TAU_SHORT, TAU_LONG
            least = half if length < short else ahead if length >= long else None
            shown = "" if least is None else f"{least}: {bench.bar(ratio, least)}"
            lines.append([what, standard, ours, ratio, shown])
    return table(["tokens", "SDPA (ms)", "tau (ms)", "tau over SDPA", "bar"], lines)


def milliseconds(bench: Bench, make: Callable[[], Callable[[], object]]) -> float:
    return 1e3 * bench.seconds(make())


def tau_call(bench: Bench, length: int, gradients: bool) -> Callable[[], object]:
    """Values in the type of SDPA's; lambdas, importance and gate in float32, as a model has them."""
    heads, device = bench.sizes.heads, bench.device
    q, k, g = (torch.rand(1, heads, length, device=device) for _ in range(3))
    v = torch.randn(1, heads, length, 64, device=device).to(_half(bench))
    c = -0.1 * torch.rand(1, heads, length, device=device).cumsum(-1)
    t = torch.full((heads,), 0.05, device=device)
    return _called(lambda: tau_attention(q, k, v, t, exponents(k, g, c)), (q, k, v, t, g, c), gradients)


def standard_row(bench: Bench, length: int, gradients: bool) -> Callable[[], object]:
    shape = (1, length, bench.sizes.heads, 64)
    return standard_call(
        tuple(torch.randn(shape, device=bench.device, dtype=_half(bench)) for _ in range(3)), gradients
    )


def standard_call(given: tuple[Tensor, ...], gradients: bool) -> Callable[[], object]:
    """PyTorch's attention on q, k, v (B, T, H, 64), the first three tensors."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in given[:3])
    return _called(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradients)


def _half(bench: Bench) -> torch.dtype:
    return torch.float32 if bench.device.type == "cpu" else torch.bfloat16


def _called(run: Callable[[], Tensor], leaves: tuple[Tensor, ...], gradients: bool) -> Callable[[], object]:
    if not gradients:
        return torch.no_grad()(run)
    for leaf in leaves:
        leaf.requires_grad_()
    return lambda: torch.autograd.grad(run().sum(), leaves)


# ---------------------------------------------------------------------- delta


def delta_table(bench: Bench) -> str:
    """As many rows as make up `rows` times `length` tokens, so that every line has the same number of them."""
    lines: list[list[object]] = []
    tokens = bench.sizes.rows * bench.sizes.length
    for length in bench.sizes.delta_lengths:
        rows = max(1, tokens // length)
        for gradients in (False, True):
            what = f"{rows} x {length:,}" + (" and gradients" if gradients else "")
            given = delta_problem(bench, rows, length)
            calls = {"SDPA": standard_call, "delta": delta_call}
            if bench.device.type == "cuda" and find_spec("fla"):
                calls["fla"] = fla_delta_call
            found = [
                bench.attempt(f"{name}, {what}", partial(milliseconds, bench, partial(make, given, gradients)))
                for name, make in calls.items()
            ]
            lines.append([what, *found, *[None] * (3 - len(found))])
    return table(["tokens", "SDPA (ms)", "delta (ms)", "flash-linear-attention (ms)"], lines)


def delta_problem(bench: Bench, rows: int, length: int) -> tuple[Tensor, ...]:
    """q, k, v (B, T, H, 64) in the type of SDPA's; the logarithm of the decay and the write (B, T, H) in float32."""
    shape = (rows, length, bench.sizes.heads)
    q, k, v = (torch.randn(*shape, 64, device=bench.device) for _ in range(3))
    decay, write = -0.01 * torch.rand(shape, device=bench.device), torch.rand(shape, device=bench.device)
    return (*(x.to(_half(bench)) for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)), decay, write)


def delta_call(given: tuple[Tensor, ...], gradients: bool) -> Callable[[], object]:
    """As the mixer calls it: in float32."""
    q, k, v, decay, write = (x.float() for x in given)
    start = q.new_zeros(q.shape[0], q.shape[2], 64, 64)
    leaves = (q, k, v, decay, write)
    return _called(lambda: delta_rule(q, k, v, decay.unsqueeze(-1), write, write, start)[0], leaves, gradients)


def fla_delta_call(given: tuple[Tensor, ...], gradients: bool) -> Callable[[], object]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found, unused-ignore]

    q, k, v, decay, write = (x.clone() for x in given)
    return _called(
        lambda: chunk_gated_delta_rule(q, k, v, decay, write, scale=1.0)[0], (q, k, v, decay, write), gradients
    )


# ---------------------------------------------------------------------- models


def built(bench: Bench, name: str) -> LanguageModel:
    sizes = dict(bench.sizes.model)
    if sizes and name == "liquid-ssm-124m":
        sizes["mixer.state_size"] = 2 * sizes["hidden_size"]
    torch.manual_seed(0)
    return LanguageModel.from_preset(name, **sizes).to(bench.device)


def plain_gpt(bench: Bench) -> PlainGPT:
    sizes = bench.sizes.model
    width, layers = sizes.get("hidden_size", 768), sizes.get("depth.layers", 12)
    return PlainGPT(sizes.get("vocab_size", 50304), width, layers, 12, bench.sizes.length).to(bench.device)


def training_table(bench: Bench) -> str:
    lines: list[list[object]] = []
    for name in (PLAIN, *MODELS):
        found: dict[str, float] = {}
        rate = bench.attempt(f"training {name}", partial(training_rate, bench, name, found))
        # A GPU or none: the operations of a training step over what the card could do in the same time.
        mfu = rate * found["flops"] / (1e12 * bench.card.tflops) if bench.card and isinstance(rate, float) else None
        bar = ""
        if name == "continuous-transformer-124m":
            verdicts = (bench.bar(rate, SPECTRAL_RATE, only_h100=True), bench.bar(mfu, SPECTRAL_MFU, only_h100=True))
            bar = f"{SPECTRAL_RATE:,} tokens/s: {verdicts[0]}; MFU {SPECTRAL_MFU}: {verdicts[1]}"
        lines.append([name, f"{int(found.get('parameters', 0)):,}", rate, mfu, bar])
    return table(["training", "parameters", "tokens/s", "MFU", "bar"], lines)


def training_rate(bench: Bench, name: str, found: dict[str, float]) -> float:
    """Tokens/s of whole steps: forward, backward and AdamW. `found` gets the parameters, and operations a token."""
    s = bench.sizes
    model = plain_gpt(bench) if name == PLAIN else built(bench, name)
    ids = torch.randint(0, model.embedding.weight.shape[0], (s.rows, s.length + 1), device=bench.device)
    found["parameters"] = float(sum(p.numel() for p in model.parameters()))
    found["flops"] = model.training_flops(s.length) if isinstance(model, PlainGPT) else training_flops(model, s.length)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=bench.device.type == "cuda")

    def loss(given: Tensor) -> Tensor:
        logits = model(given[:, :-1])
        logits = logits[0] if isinstance(logits, tuple) else logits
        return F.cross_entropy(logits.flatten(0, 1).float(), given[:, 1:].flatten())

    run = torch.compile(loss, dynamic=False) if s.compiled else loss

    def step() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            value = run(ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps() -> None:
        for _ in range(s.steps):
            step()

    return s.steps * s.rows * s.length / bench.seconds(steps, min(3, s.rounds))


def decoding_table(bench: Bench) -> str:
    lines: list[list[object]] = []
    for name in MODELS:
        model = built(bench, name).to(_half(bench)).eval()
        rates = [
            bench.attempt(f"decoding {name}, {n}", partial(decoding_rate, bench, model, n)) for n in bench.sizes.batches
        ]
        lines.append([name, *rates])
    return table(["decoding, tokens/s", *(f"{n} at a time" for n in bench.sizes.batches)], lines)


@torch.no_grad()
def decoding_rate(bench: Bench, model: LanguageModel, rows: int) -> float:
    """Tokens/s of all texts together, the likeliest token each time, behind a prompt that is not timed."""
    s = bench.sizes
    ids = torch.randint(0, model.config.vocab_size, (rows, s.prompt), device=bench.device)
    logits, start = model(ids, model.init_state(rows))
    first = logits[:, -1:].argmax(-1)

    def write() -> None:
        token, state = first, start
        for n in range(s.written):
            # The first step makes a state of its own; later ones may write into it.
            logits, state = model(token, state, donate=n > 0)
            token = logits[:, -1:].argmax(-1)

    return rows * s.written / bench.seconds(write, min(3, s.rounds))


# ---------------------------------------------------------------------- all of it

PARTS = {
    "scan": scan_table,
    "tau": tau_table,
    "delta": delta_table,
    "training": training_table,
    "decoding": decoding_table,
}


def report(bench: Bench, parts: Sequence[str]) -> Iterator[str]:
    """The page, piece by piece."""
    card = bench.card
    known = "unknown to benchmarks/cards.py: shares of its peak and MFU are left out"
    if card is not None:
        known = f"{card.bandwidth:,.0f} GB/s and {card.tflops:,.0f} TFLOPS in bfloat16 by its data sheet"
    yield f"**{bench.name}** ({known}), PyTorch {torch.__version__}, `python -m benchmarks gpu`."
    if bench.sizes.rounds == 1:
        yield "A trial run with `--quick`: no figure of it means anything, and no bar is judged."
    for part in parts:
        yield PARTS[part](bench)
    for failure in bench.failures:
        yield f"failed: {failure}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description="Measure this machine's GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, ...; cpu with --quick alone")
    parser.add_argument("--quick", action="store_true", help="every part at sizes that mean nothing, in seconds")
    parser.add_argument("--out", type=Path, help="file to write the tables to, in Markdown")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}; the parts are {', '.join(PARTS)}")
    if options.out is not None and options.out.exists():
        parser.error(f"{options.out} exists; nothing is overwritten: name another --out")
    try:
        device = find_device(options.device)
    except GlissandoError as error:
        parser.error(str(error))
    if device.type == "cpu" and not options.quick:
        parser.error("no GPU to measure: PyTorch finds none here; `--quick --device cpu` tries the program itself")
    bench = Bench(device, QUICK if options.quick else Sizes())
    pieces = []
    for piece in report(bench, options.parts or list(PARTS)):
        pieces.append(piece)
        print(piece, end="\n\n", flush=True)
    if options.out is not None:
        options.out.write_text("\n\n".join(pieces) + "\n")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
