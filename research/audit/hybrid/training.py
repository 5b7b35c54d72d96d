"""What the audit of the Hybrid ODE Transformer trains: the published models on windows of a text, and on one prompt.

Optimizer, batch, clipping and number of steps are those of the authors' notebook: AdamW 3e-4, 32 windows of 64 tokens,
clip 1, 500 steps. The text is not: see `read_tokens`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glissando.data.corpora import StoriesOptions, build_corpus
from glissando.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from glissando.errors import DataError
from research.audit.claim import Plan
from research.audit.training import losses, seeded, windows
from research.published.hybrid_ode import LENGTH, ODEBlock, PublishedHybrid

LEARNING_RATE, CLIP = 3e-4, 1.0
GPT2_ENTRIES = 50257
STORIES, ENTRIES = 2000, 1024
HELD_OUT_WINDOWS = 64


@dataclass(frozen=True)
class Size:
    """Width, heads, windows a step, tokens a window, steps."""

    width: int
    batch: int
    length: int
    steps: int
    heads: int = 4


def size_of(plan: Plan) -> Size:
    return Size(32, 4, 16, plan.steps or 12) if plan.quick else Size(256, 32, 64, plan.steps or 500)


@dataclass(frozen=True)
class Tokens:
    """A text as ids (N,): its first nine tenths to train on, the rest held out; `source` names the text."""

    train: Tensor
    held_out: Tensor
    tokenizer: Tokenizer
    source: str
    published: bool  # with GPT-2's tokenizer, as the authors had it

    @property
    def needs(self) -> str:
        """What the published figures were measured on, unless that was given."""
        how = "--text wiki.train.raw --tokenizer tokenizer.json (GPT-2's)"
        return "" if self.published else f"WikiText-2 in GPT-2's tokens: {how}"


@lru_cache(maxsize=2)
def read_tokens(plan: Plan) -> Tokens:
    """The plan's text, or built-in stories; read with its tokenizer, or a byte-level BPE trained on it (quick: bytes).

    Raises DataError for a text that is missing or too short.
    """
    text, source = (_file(plan.text), plan.text) if plan.text else _stories(20 if plan.quick else STORIES)
    tokenizer: Tokenizer
    if plan.tokenizer:
        tokenizer = load_tokenizer(plan.tokenizer)
    elif plan.quick:
        tokenizer = ByteTokenizer()
    else:
        tokenizer = train_bpe(iter([text]), ENTRIES)
    ids = torch.tensor(tokenizer.encode(text))
    edge = len(ids) * 9 // 10
    length = size_of(plan).length
    if len(ids) - edge <= length:
        raise DataError(
            f"{source} has {len(ids)} tokens; a tenth of them must be more than {length}: give a longer text"
        )
    published = bool(plan.text) and tokenizer.vocab_size == GPT2_ENTRIES
    summary = f"{source}, {len(ids):,} tokens of {tokenizer.vocab_size:,} kinds"
    return Tokens(ids[:edge], ids[edge:], tokenizer, summary, published)


def _file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read --text {path}: {error}; give a file of UTF-8 text") from error


def _stories(n: int) -> tuple[str, str]:
    corpus = build_corpus(StoriesOptions())
    return "".join(itertools.islice(corpus.texts("train"), n)), f"{n:,} built-in stories"


@dataclass(frozen=True)
class Trained:
    """A trained model; the loss (nats a token) and norms of each step, and what held-out text costs at the end."""

    model: PublishedHybrid
    losses: list[float]
    before: list[float]  # |gradient| before clipping
    after: list[float]  # and after it
    parts: dict[str, list[float]]  # before clipping, by part of the model
    held_out: Tensor  # (windows,) nats a token


def build(plan: Plan, *, ode: bool, seed: int) -> PublishedHybrid:
    """A new published model, or its baseline, for the plan's text."""
    size = size_of(plan)
    entries = read_tokens(plan).tokenizer.vocab_size
    return seeded(seed, lambda: PublishedHybrid(entries, size.width, size.heads, ode=ode)).to(_device())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@lru_cache(maxsize=16)
def train(plan: Plan, ode: bool, seed: int) -> Trained:
    """The published training of the hybrid (`ode`) or of its baseline; both see the same windows for the same seed."""
    model, size, tokens = build(plan, ode=ode, seed=seed).train(), size_of(plan), read_tokens(plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    result = Trained(model, [], [], [], {}, torch.empty(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for rows in itertools.islice(windows(tokens.train, size.batch, size.length, seed), size.steps):
            loss = losses(model, rows.to(_device())).mean()
            optimizer.zero_grad()
            loss.backward()
            for part, norm in part_norms(model).items():
                result.parts.setdefault(part, []).append(norm)
            result.before.append(clip(model))
            result.after.append(norm_of(model.parameters()))
            result.losses.append(loss.item())
            optimizer.step()
    model.eval()
    held_out = tokens.held_out[: len(tokens.held_out) // (size.length + 1) * (size.length + 1)]
    rows = held_out.view(-1, size.length + 1)[:HELD_OUT_WINDOWS].to(_device())
    with torch.no_grad():
        scored = torch.cat([losses(model, part).mean(1) for part in rows.split(size.batch)]).cpu()
    return Trained(model, result.losses, result.before, result.after, result.parts, scored)


def clip(model: nn.Module) -> float:
    """Clips the gradient to CLIP; its norm before."""
    return nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()


def norm_of(parameters: Iterator[nn.Parameter]) -> float:
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()


def gradient_of(module: nn.Module) -> Tensor:
    """All of the module's gradients in one vector, 0 where there is none."""
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in module.parameters()]
    )


def part_norms(model: PublishedHybrid) -> dict[str, float]:
    """|gradient| of each child and each block; the ODE block under its name."""
    parts: dict[str, nn.Module] = {"embedding": nn.ModuleList([model.embedding, model.positions])}
    for i, block in enumerate(model.blocks):
        parts["ODE block" if isinstance(block, ODEBlock) else f"block {i + 1}"] = block
    parts |= {"norm": model.norm, "head": model.head}
    return {name: norm_of(part.parameters()) for name, part in parts.items()}


# ---------------------------------------------------------------------- one prompt

PROMPT = "the movie was"


@dataclass(frozen=True)
class Steered:
    """A model whose ODE block has learned to predict `good` at u = 1 and `bad` at u = -1 after PROMPT."""

    model: PublishedHybrid
    tokenizer: Tokenizer
    good: int
    bad: int

    @torch.no_grad()
    def probabilities(self, values: list[float | None], prompt: str = PROMPT) -> Tensor:
        """(values, 2): P(good), P(bad) after the prompt with the first control at u; without a control for None."""
        ids = torch.tensor([self.tokenizer.encode(prompt)[-LENGTH:]], device=_device())
        rows = []
        for u in values:
            control = None if u is None else torch.tensor([[u, 0.0, 0.0, 0.0]], device=_device())
            rows.append(self.model(ids, control)[0, -1].softmax(-1)[[self.good, self.bad]])
        return torch.stack(rows).cpu()


@lru_cache(maxsize=8)
def steer_on_prompt(plan: Plan, seed: int) -> Steered:
    """The published steering: one prompt, all but the ODE block frozen, a new model, the settings of experiment 1.

    The target of `good` is a bare space, as it was; that of `bad` the first token of the word.
    """
    tokenizer, model = read_tokens(plan).tokenizer, build(plan, ode=True, seed=seed).train()
    good = tokenizer.encode(" ")[0]
    bad = next(token for token in tokenizer.encode(" bad") if token != good)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in model.flow.parameters():
        parameter.requires_grad_(True)
    ids = torch.tensor([tokenizer.encode(PROMPT)] * 2, device=_device())
    control = torch.zeros(2, 4, device=_device())
    control[:, 0] = torch.tensor([1.0, -1.0])
    targets = torch.tensor([good, bad], device=_device())
    optimizer = torch.optim.AdamW(model.flow.parameters(), lr=LEARNING_RATE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(size_of(plan).steps):
            optimizer.zero_grad()
            F.cross_entropy(model(ids, control)[:, -1], targets).backward()
            clip(model)
            optimizer.step()
    return Steered(model.eval(), tokenizer, good, bad)
