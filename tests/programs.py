"""The publications' own programs, run from their text in the directory that GLISSANDO_SOURCES names.

Nothing of them is kept here. pytorch_lightning is stood in for; tests run in float64, and where a program asks for
float32 inside, the docstring of its function says so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

ROOT = Path(__file__).resolve().parents[1]


def source(name: str) -> str:
    """The text of a publication: of $GLISSANDO_SOURCES, or of shared/sources beside the repository."""
    folder = Path(os.environ.get("GLISSANDO_SOURCES") or ROOT.parent / "shared" / "sources")
    if not folder.is_dir():
        pytest.skip(f"no publications at {folder}; name their directory in GLISSANDO_SOURCES")
    return (folder / name).read_text(encoding="utf-8")


def minimal(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Its angles are float32, and so its rotation is known to 6e-8."""

    class LightningModule(nn.Module):
        device = "cpu"

        def log(self, name: str, value: object, prog_bar: bool = False) -> None:
            """Nothing reads the log."""

    lightning = ModuleType("pytorch_lightning")
    lightning.LightningModule = LightningModule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", lightning)
    return _run(_between(source("minimal-transformer.txt"), "import math\n", "\nNotes:"))


def continuous() -> dict[str, Any]:
    """Its imports, operator and model, without the data, the generation and the training."""
    text = source("continuous-transformer.txt")
    cells = _between(text, "In [2]:", "\nIn [3]:") + _between(text, "In [5]:", "\nIn [None]:")
    return _run(re.sub(r"^(In \[.*\]:|from tqdm .*)$", "", cells, flags=re.MULTILINE))


def hybrid() -> dict[str, Any]:
    return _run(_between(source("hybrid-ode-transformer.txt"), "```python\n", "\n```").removeprefix("```python\n"))


def liquid() -> dict[str, Any]:
    """Without its demonstrations. It rounds Ad and Bd to float32, which no state of float64 can be multiplied by: here
    it is asked for float64 there."""
    lines = [line.rstrip().removesuffix("|").strip() for line in source("liquid-ssm.txt").splitlines()]
    program = "\n".join(line for line in lines if line)
    program = _between(program, "from __future__", "\ndef test_liquid_ssm")
    return _run("\n".join(_indented(program)).replace("torch.float32", "torch.float64"))


def _between(text: str, first: str, last: str) -> str:
    begin = text.index(first)
    return text[begin : text.index(last, begin)]


def _run(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "published"}
    exec(compile(program, "published", "exec"), names)
    return names


#: where blocks of the liquid program end and neither a definition nor an `else` says so: in their order, how a line
#: begins and the level that it stands at
_ENDS = [
    ("A_discrete = torch.tensor(np.stack", 3), ("return A_discrete", 2), ("A_discrete = eye", 2), ("self.B_cont", 2),
    ("return A * 0.1", 2), ("tau = self.", 2), ("self.continuous_state = current", 2), ("return result", 2),
    ("outputs.append", 3), ("output_sequence =", 2), ("return result", 2), ("elif isinstance(module, nn.Emb", 3),
    ("input_ids = torch.clamp", 2), ("x = self.output_norm", 2), ("result = {", 2), ("return result", 2),
    ("outputs = self(", 3), ("next_token_logits = logits", 3), ("probs = F.softmax", 3), ("result = {", 2),
    ("return result", 2),
]  # fmt: skip


def _indented(program: str) -> Iterator[str]:
    """The liquid program was read through a web page, which lost its indentation."""
    ends, levels, within = list(_ENDS), list[str](), False  # levels: the first words of the blocks that are open
    logical = ""
    for line in program.splitlines():
        if within or logical:  # inside a docstring, or brackets
            yield "    " * len(levels) + line
            within ^= line.count('"""') == 1
        else:
            word = line.split("(")[0].split()[0].rstrip(":")
            method = word.startswith("@") or (word == "def" and "class" in levels and not line.startswith(_TOP))
            if word == "class" or (word == "def" and not method):
                levels = []
            elif method:
                levels = levels[:1]
            elif ends and line.startswith(ends[0][0]):
                levels = levels[: ends.pop(0)[1]]
            elif word in _CLOSES:
                while levels.pop() not in _CLOSES[word]:
                    pass
            yield "    " * len(levels) + line
            within = line.count('"""') == 1
        if within:
            continue
        logical += line
        if sum(logical.count(c) for c in "([{") > sum(logical.count(c) for c in ")]}"):
            continue
        if logical.endswith(":"):
            levels.append(logical.split()[0].rstrip(":"))
        logical = ""
    assert not ends


_TOP = ("def make_safe", "def discrete_to", "def continuous_to")
_CLOSES = {"else": {"if", "elif"}, "elif": {"if", "elif"}, "except": {"try"}}
