"""Outside evaluation: the tasks of EleutherAI's lm-eval on a model of this library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from glissando.errors import ConfigError, MissingExtraError, unknown_name
from glissando.evaluation.tasks import FOLDER, bundled
from glissando.generation import tokenizer_of
from glissando.model import LanguageModel

try:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise MissingExtraError("--tasks needs lm-eval: pip install -e '.[eval]' in a checkout") from error

from glissando.hf import GlissandoForCausalLM, fast_tokenizer

#: tokens read at once of a text, where learned positions set no limit
LONGEST = 16384


class GlissandoLM(HFLM):
    """HFLM that reads texts as the library does: one end token before each, and nothing else added.

    HFLM itself would put it before a rolling text twice, or before a context not at all.
    """

    def __init__(self, model: LanguageModel, batch_size: int = 8) -> None:
        limit = model.config.max_length or LONGEST
        super().__init__(
            pretrained=GlissandoForCausalLM.of(model.eval()),
            # Without a name for what begins a text, HFLM does not leave it out where a text starts with a newline.
            tokenizer=fast_tokenizer(tokenizer_of(model), bos_token=None),
            backend="causal",
            batch_size=batch_size,
            max_length=limit,
            add_bos_token=True,
            softmax_dtype=torch.promote_types(model.embedding.weight.dtype, torch.float32),
        )

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of the text alone, unless special tokens are requested."""
        return super().tok_encode(string, bool(add_special_tokens), left_truncate_len, **kwargs)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = super()._encode_pair(context, continuation)
        return [self.prefix_token_id, *before], after


def task_names() -> list[str]:
    """Every task, group and tag that --tasks takes, the bundled ones first."""
    known = _manager(include_defaults=True).all_tasks
    return [*bundled(), *(name for name in known if name not in bundled())]


def run_tasks(
    model: LanguageModel, names: Sequence[str], limit: int | None = None, batch_size: int = 8
) -> dict[str, dict[str, Any]]:
    """Task -> its metrics, `_stderr` behind a name for its standard error. `limit`: documents of each task.

    Raises UnknownNameError for an unknown task, ConfigError for a limit below 1 or a model without a tokenizer.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit must be at least 1 document a task, got {limit}")
    manager = _manager(include_defaults=not set(names) <= set(bundled()))
    for name in names:
        if name not in manager.all_tasks:
            raise unknown_name("task", name, manager.all_tasks, listed_by="--tasks list")
    model_of_tasks = GlissandoLM(model, batch_size)
    # It would describe the machine, which takes seconds, and ask git for the commit of the directory that this runs in,
    # whose complaint outside a checkout goes to the terminal; neither is among the metrics.
    with patch("lm_eval.evaluator.add_env_info"), patch("lm_eval.evaluator.get_git_commit_hash"):
        found = simple_evaluate(
            model_of_tasks, tasks=list(names), task_manager=manager, limit=limit, log_samples=False,
            bootstrap_iters=1000,
        )  # fmt: skip
    assert found is not None  # it is on processes other than the first
    return {task: _metrics(values) for task, values in found["results"].items()}


def _manager(include_defaults: bool) -> TaskManager:
    return TaskManager(include_path=str(FOLDER), include_defaults=include_defaults)


def _metrics(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers by plain names: lm-eval writes `acc,none`, with the filter that the answers went through."""
    plain = {}
    for name, value in values.items():
        metric, _, through = name.partition(",")
        if isinstance(value, int | float) and metric not in ("sample_len", "sample_count"):
            plain[metric if through in ("", "none") else f"{metric} ({through})"] = value
    return plain
