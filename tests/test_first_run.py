"""The first command that README and `--help` give: it learns to tell stories in two minutes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from training_runs import environment

import glissando
from glissando.cli import train as train_command
from glissando.cli import usage
from glissando.cli.train import EXAMPLE, OWN_TEXT
from glissando.data.stories.grammar import Bind, Choice, Copy, Ref, Seq, Swap, Switch, Text, Total
from glissando.data.stories.stories import generate, grammar

ROOT = Path(__file__).parent.parent


class Sentences:
    """Every sentence of the stories' grammar, whatever its slots hold: a finite automaton whose edges are words.

    edges   of each state: (words, the state after any of them)
    silent  of each state: the states that it is as well
    """

    def __init__(self, root: Seq) -> None:
        self.edges: list[list[tuple[tuple[str, ...], int]]] = [[]]
        self.silent: list[list[int]] = [[]]
        self.held: dict[str, set[Any]] = {}
        while self._collect(root):
            pass
        self._sequence(root, 0)
        every = [(words, after) for edges in self.edges for words, after in edges]
        starts = {0, *(after for words, after in every if any(word.endswith(" ") for word in words))}
        after_blanks = [edge for state in self._with_silent(starts) for edge in self.edges[state]]
        begun = [(word, after) for words, after in after_blanks for word in words if word]
        begun += [
            (word[at + 1 :], after)
            for words, after in every
            for word in words
            for at, letter in enumerate(word[:-1])
            if letter == " "
        ]
        #: how a sentence may begin, and the state after it, by the first letters
        self.beginnings: dict[str, set[tuple[str, int]]] = {}
        for word, after in begun:
            self.beginnings.setdefault(word[:3], set()).add((word, after))

    def accepts(self, sentence: str) -> bool:
        """Whether it is what the grammar can say between a blank and the end of a sentence."""
        reached: list[set[int]] = [set() for _ in range(len(sentence) + 1)]
        for word, after in (each for length in (1, 2, 3) for each in self.beginnings.get(sentence[:length], ())):
            if word.startswith(sentence):
                return True
            if sentence.startswith(word):
                reached[len(word)].add(after)
        for at in range(1, len(sentence)):
            rest = sentence[at:]
            for state in self._with_silent(reached[at]):
                for words, after in self.edges[state]:
                    for word in words:
                        if word.startswith(rest):
                            return True
                        if word and rest.startswith(word):
                            reached[at + len(word)].add(after)
        return False

    def _collect(self, seq: Seq) -> bool:
        """What each slot may hold; whether anything was new."""
        before = sum(map(len, self.held.values()))
        for node in seq:
            if isinstance(node, Bind):
                self.held.setdefault(node.slot, set()).add(node.item)
            elif isinstance(node, Total):
                self.held.setdefault(node.slot, set()).update(node.numbers.values())
            elif isinstance(node, Copy):
                self.held.setdefault(node.slot, set()).update(self.held.get(node.source, ()))
            elif isinstance(node, Swap):
                both = self.held.get(node.first, set()) | self.held.get(node.second, set())
                self.held[node.first], self.held[node.second] = both, set(both)
            for inner in node.alternatives if isinstance(node, Choice) else ():
                self._collect(inner)
            for inner in node.branches.values() if isinstance(node, Switch) else ():
                self._collect(inner)
        return sum(map(len, self.held.values())) > before

    def _sequence(self, seq: Seq, state: int) -> int:
        """The state after `seq` from `state`."""
        bound: dict[str, Any] = {}  # in this very sequence
        for node in seq:
            if isinstance(node, Text):
                state = self._edge((node.text,), state)
            elif isinstance(node, Bind):
                bound[node.slot] = node.item
            elif isinstance(node, Ref):
                items = [bound[node.slot]] if node.slot in bound else self.held[node.slot]
                said = {item.forms[node.form] for item in items if node.form in item.forms}
                state = self._edge(tuple(sorted(said)), state)
            elif isinstance(node, Choice | Switch):
                inside = list(node.alternatives if isinstance(node, Choice) else node.branches.values())
                said = {text for each in inside if (text := _plain(each)) is not None}
                ends = [self._sequence(each, state) for each in inside if _plain(each) is None]
                ends += [self._edge(tuple(sorted(said)), state)] if said else []
                state = self._new()
                for end in ends:
                    self.silent[end].append(state)
        return state

    def _edge(self, words: tuple[str, ...], state: int) -> int:
        self.edges[state].append((words, self._new()))
        return len(self.edges) - 1

    def _new(self) -> int:
        self.edges.append([])
        self.silent.append([])
        return len(self.edges) - 1

    def _with_silent(self, states: set[int]) -> set[int]:
        result, todo = set(states), list(states)
        while todo:
            for after in self.silent[todo.pop()]:
                if after not in result:
                    result.add(after)
                    todo.append(after)
        return result


def _plain(seq: Seq) -> str | None:
    """What a sequence says, where that is known without its surroundings."""
    said, bound = "", dict[str, Any]()
    for node in seq:
        if isinstance(node, Bind):
            bound[node.slot] = node.item
        elif isinstance(node, Text):
            said += node.text
        elif isinstance(node, Ref) and node.slot in bound:
            said += bound[node.slot].forms[node.form]
        else:
            return None
    return said


def sentences(text: str) -> list[str]:
    return [each for each in re.split(r'(?<=[.!?])\s+|(?<=[.!?]")\s+', text.strip()) if each]


def test_the_readme_and_the_help_give_the_same_first_commands(capsys):
    readme = (ROOT / "README.md").read_text()
    assert readme.index(OWN_TEXT) == readme.index("glissando train ")
    assert EXAMPLE in (ROOT / "docs" / "training.md").read_text()
    assert OWN_TEXT.partition(" --training")[0] in usage()
    with pytest.raises(SystemExit):
        train_command.main(["--help"])
    assert OWN_TEXT.partition(" --training")[0] in capsys.readouterr().out


@pytest.mark.slow  # the test below can fail
def test_the_grammars_sentences_are_known_from_others():
    known = Sentences(grammar())
    real = sentences(generate(1, "test", 0).text)
    assert all(known.accepts(each) for each in real)
    swapped = [" ".join([*(words := each.split())[1::2], *words[::2]]) for each in real if len(each.split()) > 4]
    assert sum(map(known.accepts, swapped)) < 0.02 * len(swapped)


@pytest.mark.serial
@pytest.mark.slow
def test_the_first_command_learns_to_tell_stories_in_two_minutes(tmp_path):
    """On two quiet cores with bfloat16: 0.7 bits per byte or less, and most of the sentences are of the grammar."""
    command = [sys.executable, "-m", *shlex.split(EXAMPLE)]
    free = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    subprocess.run(command, cwd=tmp_path, env=free, check=True, timeout=400)
    path = tmp_path / shlex.split(EXAMPLE)[-1]
    assert json.loads((path / "summary.json").read_text())["last"]["bits_per_byte"] <= 0.7
    model, known = glissando.load(path), Sentences(grammar())
    written = []
    for seed in range(8):
        text = "".join(glissando.stream(model, "Once upon a time,", max_tokens=250, temperature=0.3, seed=seed))
        written += sentences("Once upon a time," + text.partition("\n")[0])[:-1]
    assert len(written) > 40
    assert sum(map(known.accepts, written)) > 0.5 * len(written), written


def test_a_text_of_ones_own_needs_no_preset_and_no_tokenizer(tmp_path, capsys, monkeypatch):
    """The recommended preset and a BPE, said in a line each; what is named is taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("It was a dark and stormy night; the rain fell in torrents.\n" * 400)
    small = [
        "--data.kind",
        "text",
        "--data.path",
        "book.txt",
        "--training.seconds",
        "9",
        "--print_config",
        "--out",
        "a",
    ]
    train_command.main(small)
    printed = capsys.readouterr()
    assert "--preset spectral-delta-nano: the recommended one" in printed.err
    assert "--data.tokenizer bpe: the default under a budget of time" in printed.err
    config = yaml.safe_load(printed.out)
    assert config["preset"] == "spectral-delta-nano"
    assert config["data"]["tokenizer"]["kind"] == "bpe"
    train_command.main([*small, "--preset", "transformer-nano", "--data.tokenizer", "bytes"])
    printed = capsys.readouterr()
    assert not printed.err
    assert yaml.safe_load(printed.out)["data"]["tokenizer"]["kind"] == "bytes"
    train_command.main([*small, "--model.hidden_size", "32"])
    assert yaml.safe_load(capsys.readouterr().out)["preset"] is None
    train_command.main([*small, "--preset", "transformer-124m"])  # which names GPT-2's
    assert yaml.safe_load(capsys.readouterr().out)["data"]["tokenizer"]["kind"] == "gpt2"
