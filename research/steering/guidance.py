"""Classifier-free guidance: the logits of a conditioned reader, moved away from those of an unconditioned one.

    log p = log p_0 + w (log p_c - log p_0) + const

Ho and Salimans 2022, arXiv 2207.12598; for language models Sanchez et al. 2023, arXiv 2306.17806. The condition is the
dial at u; the other reader has none. w = 1 is the condition alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glissando.evaluation.steering import Trial
from glissando.generation import control_values, tokenizer_of
from glissando.model import LanguageModel


class Reader:
    """Log-probabilities of the next token after rows of ids, one token a row at a time."""

    def __init__(self, model: LanguageModel, rows: Sequence[Sequence[int]], control: Tensor | None) -> None:
        self.model, self.control = model, None if control is None else control.expand(len(rows), -1)
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        mask = torch.arange(width)[None] < torch.tensor([len(row) for row in rows])[:, None]
        logits, self.state = model(ids, model.init_state(len(rows)), mask=mask, control=self.control)
        self.log_p = logits[torch.arange(len(rows)), mask.sum(1) - 1].double().log_softmax(-1)

    def read(self, ids: Tensor) -> None:
        """The next token of every row, ids (B,)."""
        logits, self.state = self.model(ids[:, None], self.state, control=self.control)
        self.log_p = logits[:, -1].double().log_softmax(-1)


class Guidance:
    """The steering by the dial `name` at weight w."""

    def __init__(self, model: LanguageModel, weight: float, name: str) -> None:
        self.model, self.weight, self.name = model, weight, name

    @property
    def way(self) -> str:
        return f"guidance by the dial, w = {self.weight:.3g}"

    @torch.no_grad()
    def write(self, trial: Trial, u: float) -> list[str]:
        """The trial's prompts continued at u; every row has random numbers of its own."""
        tokenizer, control = tokenizer_of(self.model), torch.tensor([control_values(self.model, {self.name: u})])
        prompts: list[list[int]] = [tokenizer.encode(prompt) for prompt in trial.prompts]
        plain = [[tokenizer.eos_id, *prompt] for prompt in prompts]
        readers = Reader(self.model, plain, control), Reader(self.model, plain, None)
        generators = [torch.Generator().manual_seed(trial.seed + row) for row in range(len(prompts))]
        written: list[list[int]] = [[] for _ in prompts]
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        allowed = torch.ones(self.model.config.vocab_size, dtype=torch.bool)
        allowed[tokenizer.vocab_size :] = False
        for _ in range(trial.max_tokens):
            with_condition, without = (reader.log_p for reader in readers)
            log_p = without + self.weight * (with_condition - without)
            p = (log_p / trial.temperature).masked_fill(~allowed, -torch.inf).softmax(-1)
            draws = torch.stack([torch.rand(1, generator=one, dtype=torch.float64) for one in generators])
            ids = (p.cumsum(-1) <= draws).sum(-1).clamp_max(p.shape[-1] - 1)
            ended |= ids == tokenizer.eos_id
            if ended.all():
                break
            for row in torch.nonzero(~ended).flatten().tolist():
                written[row].append(int(ids[row]))
            for reader in readers:
                reader.read(ids)
        return [prompt + tokenizer.decode(ids) for prompt, ids in zip(trial.prompts, written, strict=True)]
