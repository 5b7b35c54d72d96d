"""A mixer from a file outside the package: the example, what a run needs of it later, and what is missing."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from registries import registries_as_they_were
from serving import serving
from torch import nn

import glissando
from glissando import imports
from glissando.checkpoints import best_checkpoint
from glissando.cli import main
from glissando.depth import Depth, DepthOptions
from glissando.depth.base import apply_blocks
from glissando.errors import ConfigError, RunError
from glissando.mixers import MIXERS, Context
from glissando.runs import Run
from glissando.storage import read_manifest, write_manifest
from glissando.testing import LawError, check_depth

EXAMPLE = Path(__file__).parents[1] / "examples" / "add_a_mixer.py"
TINY = [
    "--model.hidden_size", "16", "--model.depth.layers", "1", "--data.valid_rows", "2", "--data.seq_len", "32",
    "--data.batch_size", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with a copy of the example, `mine.py`, and a run of its mixer."""
    place = tmp_path_factory.mktemp("outside")
    shutil.copy(EXAMPLE, place / "mine.py")
    mixer = ["--import", str(place / "mine.py"), "--model.mixer", "average", "--model.mixer.decay", "0.8"]
    steps = ["--preset", "transformer-nano", "--training.steps", "4", "--out", str(place / "out" / "average")]
    with registries_as_they_were():
        assert main(["train", *steps, *mixer, *TINY]) == 0
    return place


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """What the example has written as a program."""
    place = tmp_path_factory.mktemp("program")
    command = [sys.executable, "-W", "error", str(EXAMPLE), "--quick", "--out", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (place / "stdout").write_text(done.stdout)
    return place


@pytest.fixture
def run(place, tmp_path) -> Path:
    """A copy of the example's run, which may be damaged."""
    return shutil.copytree(place / "out" / "average", tmp_path / "run")


def moved(run: Path, place: Path, elsewhere: Path) -> None:
    """Edit the run as if it had been made with a file in `elsewhere`; its checkpoints have manifests of their own."""
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(place), str(elsewhere)))
    write_manifest(run, [name for name in read_manifest(run) if (run / name).is_file()])


def fails(capsys, *arguments: object, status: int = 2) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().err


@pytest.mark.slow
def test_the_example_checks_trains_writes_and_compares(program):
    printed = (program / "stdout").read_text()
    assert "obeys the laws" in printed
    assert printed.count("$ glissando") == 3
    assert (program / "average/imports/add_a_mixer.py").read_bytes() == EXAMPLE.read_bytes()
    compared = (program / "compared/report.md").read_text()
    assert "average" in compared
    assert "transformer-nano" in compared
    spent = {}
    for name in ("transformer-nano", "average"):
        (measured,) = (program / "compared/runs" / name).glob("*/measured.json")
        spent[name] = json.loads(measured.read_text())["spent"]
    assert spent["transformer-nano"]["flops"] > 0
    assert spent["average"]["flops"] is None


def test_a_run_has_a_copy_of_the_file_and_nothing_is_logged_or_counted_without_functions_for_it(place):
    config = yaml.safe_load((place / "out/average/config.yaml").read_text())
    assert config["model"]["mixer"] == {"kind": "average", "decay": 0.8}
    assert config["imports"] == [str(place / "mine.py")]
    assert (place / "out/average/imports/mine.py").read_bytes() == EXAMPLE.read_bytes()
    assert "imports/mine.py" in json.loads((place / "out/average/manifest.json").read_text())["files"]
    with open(place / "out/average/metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["flops"] for row in rows} == {""}
    assert not any(name.startswith(("tau", "energy")) for name in rows[0])


@pytest.mark.parametrize("command", ["generate", "evaluate", "serve", "steer", "grow", "train"])
def test_opening_a_run_executes_nothing_unless_it_is_asked_to(command, run, place, tmp_path, capsys):
    given = {
        "steer": [run, "--out", tmp_path / "x"],
        "grow": [run, "--layers", 1, "--out", tmp_path / "x"],
        "train": ["--resume", run],
    }
    error = fails(capsys, command, *given.get(command, [run]), status=1)
    assert "needs mixer 'average', which nothing has registered" in error
    assert re.search(rf"--import {run}/(checkpoints/step-\d+/)?imports/mine\.py", error)  # training goes on from one
    assert "trust_imports=True" in error
    assert "average" not in MIXERS
    with pytest.raises(RunError, match="--import"):
        glissando.load(run)


def test_a_run_opens_with_the_file_that_it_names(run, place, capsys):
    assert main(["generate", str(run), "--import", str(place / "mine.py"), "--max_tokens", "4"]) == 0
    few = ["--data.valid_rows", "2", "--json"]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--import", str(place / "mine.py"), *few]) == 0
    assert 7 < json.loads(capsys.readouterr().out)["bits_per_byte"] < 9


@pytest.mark.slow
def test_it_streams_and_serves(run, place):
    pytest.importorskip("starlette", reason="needs the [serve] extra")
    import httpx2 as httpx

    model = glissando.load(run, trust_imports=True)
    text = "".join(glissando.stream(model, "The hen", max_tokens=12, temperature=0))
    with serving(model) as (_, address), httpx.Client(base_url=address, timeout=30) as web:
        asked = {"model": "tiny", "prompt": "The hen", "max_tokens": 12, "temperature": 0}
        answer = web.post("/v1/completions", json=asked).json()
    assert answer["choices"][0]["text"] == text


def test_the_runs_copy_is_imported_and_never_the_path_that_it_names(run, place, tmp_path):
    mine = tmp_path / "mine.py"
    moved(run, place, tmp_path)
    glissando.load(run / "checkpoints" / "best", trust_imports=True)
    assert sys.modules["imported_mine"].__file__ == str(best_checkpoint(run).resolve() / "imports" / "mine.py")

    shutil.copy(EXAMPLE, mine)
    with mine.open("a") as file:
        file.write("\nCHANGED = True\n")
    with pytest.raises(ConfigError, match="has the same name"):
        imports.import_file(mine)


def test_a_file_that_has_changed_since_is_reported(run, place, tmp_path):
    mine = tmp_path / "mine.py"
    shutil.copy(EXAMPLE, mine)
    moved(run, place, tmp_path)
    with mine.open("a") as file:
        file.write("\nCHANGED = True\n")
    imports.import_file(mine)
    with pytest.warns(UserWarning, match=r"mine.py has changed since .*run/checkpoints/step-\d+ was made"):
        glissando.load(run / "checkpoints" / "best")


def test_damaged_and_missing_files_are_named(run, place, tmp_path):
    best = run / "checkpoints" / "best"
    copy = best_checkpoint(run) / "imports" / "mine.py"
    moved(run, place, tmp_path)
    copy.rename(tmp_path / "kept.py")
    with pytest.raises(RunError, match=r"needs mixer 'average'.* made with .*/mine\.py, and the copy .*Put it back"):
        glissando.load(best, trust_imports=True)
    copy.write_text("raise SystemExit('executed')")
    with pytest.raises(RunError, match="is damaged"):
        glissando.load(best, trust_imports=True)


@pytest.mark.slow
def test_what_a_run_is_started_from_or_resumed_keeps_its_imports(run, place, tmp_path, capsys):
    given = ["--import", place / "mine.py"]
    steps = ["--training.steps", "1", "--training.schedule.warmup_steps", "0", *TINY[4:]]
    arguments = ["train", "--from", run, *given, *steps, "--out", tmp_path / "more"]
    assert main([str(argument) for argument in arguments]) == 0
    assert Run.open(tmp_path / "more").read_config()["imports"] == [str(place / "mine.py")]
    assert (tmp_path / "more/imports/mine.py").is_file()
    assert main(["train", "--resume", str(tmp_path / "more"), *map(str, given)]) == 0
    assert "nothing is left to train" in capsys.readouterr().err


@pytest.mark.slow
def test_growth_and_a_budget_of_flops_name_what_is_missing(run, place, tmp_path, capsys):
    given = ["--import", place / "mine.py"]
    error = fails(capsys, "grow", run, *given, "--layers", "1", "--out", tmp_path / "x")
    assert "grow: Average has no method `grow`" in error
    budget = ["--training.flops", "1e9", "--out", tmp_path / "x"]
    error = fails(capsys, "train", *given, "--model.mixer", "average", *TINY, *budget)
    assert "counting FLOPs: Average has no method `flops`" in error
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_its_options_are_options_of_the_command_line(place, capsys):
    given = ["train", "--import", place / "mine.py", "--model.mixer", "average"]
    assert main([*map(str, given), "--model.mixer.decay", "0.5", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["mixer"] == {"kind": "average", "decay": 0.5}
    assert "Did you mean --model.mixer.decay?" in fails(capsys, *given, "--model.mixer.decai", "0.5")
    assert "model.mixer.decay: expected a number less than 1, got 1.5" in fails(
        capsys, *given, "--model.mixer.decay=1.5"
    )
    with pytest.raises(SystemExit):
        main([*map(str, given), "--help", "model.mixer.average"])
    assert "model.mixer, kind average: Options of the `average` mixer" in capsys.readouterr().out


def test_a_file_of_options_is_no_reason_to_execute_code(run, place, capsys):
    error = fails(capsys, "train", "--config", run / "config.yaml", "--print_config")
    assert f"if you trust them, add --import {place / 'mine.py'}" in error
    assert "average" not in MIXERS


CORPUS = '''
import glissando
from glissando.config import options
from glissando.data.corpora import DataOptions
from glissando.data.pairs import ShiftCorpus

@options
class LettersOptions(DataOptions):
    """Letters moved by one place."""

    letters: int = 3

@glissando.register_corpus("letters", LettersOptions)
class Letters(ShiftCorpus):
    def __init__(self, tokenizer, letters, **options):
        super().__init__(tokenizer, length=letters, **options)

count = globals().get("count", 0) + 1
'''


def test_a_corpus_is_registered_alike(tmp_path, capsys):
    path = tmp_path / "letters.py"
    path.write_text(CORPUS)
    given = ["train", "--import", str(path), "--data", "letters", "--data.letters", "4"]
    assert main([*given, "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["data"] | {"kind": "letters", "letters": 4} == config["data"]
    assert config["imports"] == [str(path)]
    imports.import_file(path)
    assert sys.modules["imported_letters"].count == 1, "a file is executed once in a process"


def test_a_file_that_is_loaded_already_is_not_executed(tmp_path, monkeypatch):
    """As the program itself, or through a link."""
    loaded, link = tmp_path / "loaded.py", tmp_path / "link.py"
    loaded.write_text("raise RuntimeError('executed')")
    link.symlink_to(loaded)
    module = type(sys)("loaded")
    for file in (loaded, link):
        monkeypatch.setattr(module, "__file__", str(file), raising=False)
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(sys.modules, "loaded", module)
            imports.import_file(loaded)
            imports.import_file(link)
    with pytest.raises(RuntimeError, match="executed"):
        imports.import_file(loaded)


def test_files_that_cannot_be_imported(tmp_path, capsys):
    assert "there is no such Python file" in fails(capsys, "train", "--import", "nowhere.py")
    (tmp_path / "taken.py").write_text(
        "from glissando.mixers import Attention, AttentionConfig, register_mixer\n"
        "class Mine(Attention): ...\nregister_mixer('tau', AttentionConfig)(Mine)\n"
    )
    error = fails(capsys, "train", "--import", tmp_path / "taken.py")
    assert "mixer 'tau' is registered already" in error
    assert not imports.imported()


class Backwards(Depth):
    """Its blocks from the last to the first."""

    def __init__(self, config: DepthOptions, make_block) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.blocks = nn.ModuleList([make_block(i) for i in range(config.layers)])

    def init_state(self, batch_size, device=None, dtype=None):
        return tuple(block.init_state(batch_size, device, dtype) for block in reversed(self.blocks))

    def forward(self, x, state=None, ctx=None):
        x, after = apply_blocks(reversed(self.blocks), x, state or (None,) * len(self.blocks), ctx or Context())
        return x, None if state is None else after


@dataclass
class BackwardsOptions:
    layers: int = 2


def test_a_depth_from_outside_is_checked_by_the_laws_and_trained(tmp_path):
    with pytest.raises(ConfigError, match="Backwards is no registered depth"):
        check_depth(Backwards)
    glissando.register_depth("backwards", BackwardsOptions)(Backwards)
    check_depth(Backwards)
    out = tmp_path / "run"
    options = [*TINY, "--model.depth.kind", "backwards", "--training.steps", "1", "--out", str(out)]
    assert main(["train", *options]) == 0
    assert type(glissando.load(out).depth) is Backwards


def test_a_depth_that_breaks_a_law_is_named(monkeypatch):
    class Forgetful(Backwards):
        def forward(self, x, state=None, ctx=None):
            y, _ = super().forward(x, None, ctx)
            return y, state

    glissando.register_depth("forgetful", BackwardsOptions)(Forgetful)
    with pytest.raises(LawError, match="split law"):
        check_depth(Forgetful)
