"""The code of docs/tutorials/*.md and of docs/tour.md runs, and what it prints stands on the page.

    python docs/tutorials.py                  runs every page and says what differs, and fails if anything does
    python docs/tutorials.py --write          writes what the code printed into the pages
    python docs/tutorials.py grow --write     of one page alone

The blocks of a page run in their order in one temporary directory:

    ```bash                  by bash; `glissando` and `python` are those of this program
    ```python                all in one namespace
    ```LANG title="FILE"     is no program but a file, which is written; title="FILE (continued)" is written behind it
    ```text                  right behind a block that runs: what the block prints. A line of three dots, which stays in
                             its place, stands for lines that are left out
    ``` without a language   is only read

Two outputs agree if their words do, and their whole numbers; other numbers agree within a tenth of the written one, and
numbers such as 1e-07, which are rounding, if the new one is at most ten times as large, or 1e-6. What depends on the
machine may be anything: seconds, tokens/s, memory, threads, precision. A comment before a block says otherwise:

    <!-- output within 0.05 -->      numbers with a decimal point agree within 0.05
    <!-- output within 30 % -->      within 30 % of the written one
    <!-- output differs -->          only that something is printed
    <!-- status 2 -->                the block is to end with this status, and not with 0
    <!-- not run: why -->            the block is only read

The port 8000 stands for a free one, /home/you for the temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {page.stem: page for page in (*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "tour.md")}
PORT, HOME = "8000", "/home/you"
FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?$')
COMMENT = re.compile(r"^<!-- (output .*|status \d+|not run: .*) -->$")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
#: what another machine prints otherwise
MACHINE = [
    (re.compile(r"\d+:\d\d(?::\d\d)? left"), "0:00 left"),
    (re.compile(r"\b[\d.]+k? tok/s"), "0 tok/s"),
    (re.compile(r"\b[\d.,]+ (ms|s|seconds|tokens/s|KiB|MiB|GiB|kB|MB|GB)\b"), r"0 \1"),
    (re.compile(r"\bthreads \d+"), "threads 0"),
    (re.compile(r"\b(bf16-mixed|32-true|16-mixed)\b"), "precision"),
]
#: lines that come only the first time
ONCE = re.compile(r"^compiling .*\n", re.MULTILINE)


class Differs(Exception):
    """A block that fails, or prints something else than the page has."""


@dataclass
class Block:
    """Code of a page, from `line` on, and what it prints: `output`, the lines from `shown` to `end`."""

    kind: str
    code: str
    line: int
    file: str | None = None
    notes: tuple[str, ...] = ()
    output: str | None = None
    shown: int = 0
    end: int = 0

    @property
    def runs(self) -> bool:
        return self.file is None and self.kind in ("bash", "python") and not self.note("not run")

    @property
    def status(self) -> int:
        return int(self.note("status") or 0)

    def note(self, name: str) -> str | None:
        return next((note.removeprefix(name).strip() for note in self.notes if note.startswith(name)), None)


def blocks(text: str) -> list[Block]:
    """Those of a page, outputs with the code that prints them."""
    found: list[Block] = []
    lines, notes, after, at = text.split("\n"), [], False, 0  # after: nothing since the last block but blank lines
    while at < len(lines):
        line = lines[at]
        if note := COMMENT.match(line):
            notes.append(note[1])
        elif fence := FENCE.match(line):
            end = lines.index("```", at + 1)
            code = "".join(line + "\n" for line in lines[at + 1 : end])
            if fence[1] == "text" and after and found[-1].runs:
                last = found[-1]
                last.output, last.shown, last.end, last.notes = code, at + 1, end, (*last.notes, *notes)
                after = False
            else:
                found.append(Block(fence[1], code, at + 1, fence[2], tuple(notes)))
                after = True
            at, notes = end, []
        elif line.strip():
            if notes:
                raise Differs(f"line {at + 1}: {notes} stands before no block")
            after = False
        at += 1
    return found


# ---------------------------------------------------------------------- running


def run(found: list[Block], folder: Path) -> Iterator[str]:
    """What each block prints, '' for one that does not run. Raises Differs for one with another status than its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    tools = folder / "bin"
    tools.mkdir()
    for name, arguments in (("glissando", "-m glissando "), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (tools / name).chmod(0o755)
    place = folder / "work"
    place.mkdir()
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    command = [sys.executable, __file__, "--blocks-from-stdin"]
    with subprocess.Popen(
        command, cwd=place, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            for block in found:
                if block.file is not None:
                    name, _, continued = block.file.partition(" (continued)")
                    with (place / name).open("a" if continued or block.file.endswith("(continued)") else "w") as file:
                        file.write(block.code)
                if not block.runs:
                    yield ""
                    continue
                print(json.dumps([block.kind, block.code.replace(PORT, port)]), file=child.stdin, flush=True)
                answer = child.stdout.readline()
                status, output = json.loads(answer) if answer else (child.wait(), "the process has ended\n")
                output = ONCE.sub("", output.replace(port, PORT).replace(str(place.resolve()), HOME))
                if status != block.status:
                    raise Differs(f"line {block.line}: ends with {status}, not {block.status}:\n{block.code}\n{output}")
                yield output
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing was left running
                os.killpg(child.pid, signal.SIGTERM)


def _serve_blocks() -> None:
    """Run the blocks that come as JSON lines, and answer each with its status and what it printed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, "")  # the directory's own files, as for `python`
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        kind, code = json.loads(line)
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            if kind == "bash":
                status = subprocess.run(["bash", "-eo", "pipefail", "-c", code], stdin=subprocess.DEVNULL).returncode
            else:
                status = _execute(code, names)
            sys.stdout.flush()
            sys.stderr.flush()
            file.seek(0)
            output = file.read().decode(errors="replace")
        print(json.dumps([status, output]), file=answers, flush=True)


def _execute(code: str, names: dict[str, Any]) -> int:
    try:
        exec(compile(code, "<tutorial>", "exec"), names)
    except Exception:  # noqa: BLE001  whatever the block raises is reported
        traceback.print_exc()
        return 1
    return 0


# ---------------------------------------------------------------------- comparing


def agree(written: str, printed: str, within: str | None = None) -> str | None:
    """What differs, or None."""
    if "...\n" not in written:
        pairs = [(written, printed)]
    else:
        head, tail = written.split("...\n")
        lines = printed.splitlines(keepends=True)
        n, m = head.count("\n"), tail.count("\n")
        if len(lines) <= n + m:
            return f"{len(lines)} lines are printed, and the page leaves some out of more than {n + m}"
        pairs = [(head, "".join(lines[:n])), (tail, "".join(lines[len(lines) - m :]))]
    for old, new in pairs:
        before, after = ([_settled(line) for line in text.splitlines()] for text in (old, new))
        if len(before) != len(after):
            return f"{len(before)} lines are written, {len(after)} are printed:\n{new}"
        for one, other in zip(before, after, strict=True):
            if not _same(one, other, within):
                return f"  written: {one}\n  printed: {other}"
    return None


def _settled(line: str) -> str:
    for pattern, stands in MACHINE:
        line = pattern.sub(stands, line)
    return " ".join(line.split())


def _same(written: str, printed: str, within: str | None) -> bool:
    if NUMBER.sub("#", written) != NUMBER.sub("#", printed):
        return False
    return all(
        _close(old, new, within) for old, new in zip(NUMBER.findall(written), NUMBER.findall(printed), strict=True)
    )


def _close(old: str, new: str, within: str | None) -> bool:
    one, other = float(old.replace(",", "")), float(new.replace(",", ""))
    if "e-" in old:
        return abs(other) <= max(10 * abs(one), 1e-6)
    if "." not in old:
        return one == other
    amount = within or "10 %"
    share = amount.endswith("%")
    limit = float(amount.rstrip(" %")) * (0.01 * abs(one) if share else 1)
    return abs(one - other) <= limit + 1e-9


def shortened(written: str, printed: str) -> str:
    """What was printed, with lines left out where they are left out on the page."""
    if "...\n" not in written:
        return printed
    head, tail = written.split("...\n")
    lines = printed.splitlines(keepends=True)
    return "".join([*lines[: head.count("\n")], "...\n", *lines[len(lines) - tail.count("\n") :]])


def check(page: Path, write: bool = False) -> list[str]:
    """Run a page; what differs, a text each. With `write` the page has what was printed instead."""
    text = page.read_text()
    problems, found, lines = [], blocks(text), text.split("\n")
    replaced: list[tuple[Block, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for block, printed in zip(found, run(found, Path(folder)), strict=True):
            if block.output is None:
                continue
            printed = _ended(printed)
            within = block.note("output within")
            if "output differs" in block.notes:
                differs = None if printed else "nothing is printed"
            else:
                differs = agree(block.output, printed, within)
            if differs:
                problems.append(f"line {block.line}:\n{differs}")
            replaced.append((block, shortened(block.output, printed)))
    if write:
        for block, output in reversed(replaced):
            lines[block.shown : block.end] = output.split("\n")[:-1]
        page.write_text("\n".join(lines))
    return problems


def _ended(text: str) -> str:
    """With one newline at its end, and without blanks at the ends of lines."""
    return "".join(line.rstrip() + "\n" for line in text.rstrip().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=list(PAGES), help=f"of {', '.join(PAGES)}; all by default")
    parser.add_argument("--write", action="store_true", help="write what is printed into the pages")
    parser.add_argument("--blocks-from-stdin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.blocks_from_stdin:
        _serve_blocks()
        return 0
    if unknown := set(options.pages) - set(PAGES):
        parser.error(f"no page {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
    failed = False
    for name in options.pages:
        try:
            problems = check(PAGES[name], options.write)
        except Differs as error:
            problems = [str(error)]
            failed = True
        failed = failed or (bool(problems) and not options.write)
        for problem in problems:
            print(f"{PAGES[name].relative_to(ROOT)}, {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
