"""What of the Minimal Transformer shows without training: its size, whether it runs, what it scores, its pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from glissando.data.base import IGNORED
from glissando.data.pairs import Pair, read_pairs, shift
from glissando.model import LanguageModel
from research.audit.claim import Finding, Plan
from research.audit.minimal.training import encode, pairs_of, rows_of
from research.audit.training import logits_of, parameters, seeded
from research.published.minimal_transformer import TAB, PublishedMinimal

PRESET = "minimal-transformer"
STATED = 2904
#: (rows, tokens) of batches
SHAPES = ((4, 4), (1, 1), (1, 12), (2, 12), (32, 12), (32, 25))


def size_as_published(plan: Plan) -> Finding:
    """The parameters of the published code."""
    count = parameters(PublishedMinimal())
    said = f"{count:,} parameters, {STATED - count} fewer than stated: as many as a second bias of the head would have"
    return Finding(said, {"parameters": count}, {f"{STATED:,} parameters": count == STATED})


def size_corrected(plan: Plan) -> Finding:
    """Those of our preset, by part."""
    model = LanguageModel.from_preset(PRESET)
    count = model.num_parameters()
    tables = sum(p.numel() for name, p in model.named_parameters() if name.split(".")[0] in ("embedding", "head"))
    said = f"{count:,} parameters: {tables:,} in the table and the head, {(count - tables) // 2} in each layer"
    return Finding(said, {"parameters": count, "tables": tables}, {f"{STATED:,} parameters": count == STATED})


# ---------------------------------------------------------------------- does it run


def runs_as_published(plan: Plan) -> Finding:
    """The published forward over batches of several shapes."""
    return _runs(seeded(0, lambda: PublishedMinimal().eval()))


def runs_corrected(plan: Plan) -> Finding:
    return _runs(seeded(0, lambda: LanguageModel.from_preset(PRESET).eval()))


@torch.no_grad()
def _runs(model: nn.Module) -> Finding:
    failed: dict[str, str] = {}
    for rows, length in SHAPES:
        try:
            logits_of(model, torch.ones(rows, length, dtype=torch.int64))
        except RuntimeError as error:
            failed[f"{rows} x {length}"] = str(error).splitlines()[0]
    ran = [f"{rows} x {length}" for rows, length in SHAPES if f"{rows} x {length}" not in failed]
    said = f"runs for batches (rows x tokens) of {', '.join(ran)}"
    if failed:
        said += f"; fails for {', '.join(failed)}: {next(iter(failed.values()))}"
    checks = {"runs for as many rows as tokens": "4 x 4" in ran, "runs for every shape": not failed}
    return Finding(said, {"ran": ran, "failed": failed}, checks)


# ---------------------------------------------------------------------- what is scored


def scoring_as_published(plan: Plan) -> Finding:
    """The share, before the tab's answer, of the gradient that the published training step sends into the logits."""
    model = seeded(0, lambda: PublishedMinimal(overwrites=False))
    ids = rows_of(pairs_of(plan, 64))
    return _shares(lambda: model.training_step(ids), model, ids)


def scoring_corrected(plan: Plan) -> Finding:
    """The same of the loss over the corpus's targets, which are ignored up to the tab."""
    ids, targets = encode(pairs_of(plan, 64), ends=False)
    model = seeded(0, lambda: LanguageModel.from_preset(PRESET).eval())

    def loss() -> Tensor:
        return nn.functional.cross_entropy(logits_of(model, ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    return _shares(loss, model, rows_of(pairs_of(plan, 64)))


def _shares(loss: Callable[[], Tensor], model: nn.Module, ids: Tensor) -> Finding:
    """How much of |d loss / d logits|, summed over the positions, is at those that predict the input or its tab."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], logits: Tensor) -> None:
        logits.retain_grad()
        seen.append(logits)

    head = model.get_submodule("head")
    handle = head.register_forward_hook(keep)
    loss().backward()
    handle.remove()
    assert seen[0].grad is not None
    sizes = seen[0].grad.abs().sum(-1)
    before = (ids[:, : sizes.shape[1]] == TAB).cumsum(1) == 0
    share = float((sizes * before).sum() / sizes.sum())
    said = f"{share:.0%} of the loss's gradient in the logits is at characters of the question"
    return Finding(said, {"share": share}, {"only the answer is scored": share == 0})


# ---------------------------------------------------------------------- the sample pairs

STATED_PAIRS = (450, 75)
#: the published sample files, to train on and held out
PAIRS = tuple(Path(__file__).parents[2] / "published" / "pairs" / name for name in ("train.b64", "valid.b64"))


def _lines_and_pairs() -> list[tuple[int, list[Pair]]]:
    """The lines with something in them of each sample file, and its pairs."""
    files = map(read_pairs, PAIRS)
    return [(len(pairs) + problems.count, list(pairs.values())) for pairs, problems in files]


def pairs_as_published(plan: Plan) -> Finding:
    """The lines of the sample files."""
    lines = [count for count, _ in _lines_and_pairs()]
    said = f"{lines[0]} lines to train on and {lines[1]} to validate"
    checks = {
        f"about {stated} {what} (a fifth more or less)": abs(count - stated) <= stated / 5
        for stated, what, count in zip(STATED_PAIRS, ("to train on", "held out"), lines, strict=True)
    }
    return Finding(said, {"lines": lines}, checks)


def pairs_corrected(plan: Plan) -> Finding:
    """The lines that are pairs, and those whose output is their input with every character moved by one."""
    lines = [count for count, _ in _lines_and_pairs()]
    read = [pairs for _, pairs in _lines_and_pairs()]
    pairs = [len(each) for each in read]
    true = [sum(shift(pair.input) == pair.output for pair in each) for each in read]
    said = (
        f"{pairs[0]} of {lines[0]} and {pairs[1]} of {lines[1]} lines are pairs at all, {true[0]} and "
        f"{true[1]} follow the rule that the good ones show"
    )
    checks = {"every line is a pair": pairs == lines, "every pair follows the rule": pairs == true}
    figures = {"lines": lines, "pairs": pairs, "rule": true}
    return Finding(said, figures, checks)
