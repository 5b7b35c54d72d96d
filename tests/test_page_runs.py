"""Every `glissando` command of the README and the docs runs, in the order of its page, with budgets of a few steps.

The tutorials run whole, in test_tutorials.py.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from itertools import chain, count, product
from pathlib import Path

import pytest
import yaml
from test_page_commands import GUIDES, ROOT, commands

from glissando import pretrained
from glissando.cli import main as glissando
from glissando.data.stories import sample_text
from glissando.presets import load_preset

#: (page, command) that cannot run here, and why
NOT_RUN = {
    (
        "clusters.md",
        "glissando train --preset transformer-nano --training.tokens 1000000 --out s3://bucket/first",
    ): "S3",
    ("clusters.md", 'glissando generate s3://bucket/first --prompt "Once upon a time"'): "S3",
    ("clusters.md", "glissando train --resume s3://bucket/first"): "S3",
    ("clusters.md", "glissando train --config book.yaml --out runs/book"): "torchrun or Slurm on several nodes; "
    "tests/test_restarts.py starts two of them on one machine",
    ("gpu.md", "glissando train --preset continuous-transformer-124m --training.tokens 2.5e9 --out runs/124m"): (
        "streams FineWeb-Edu and downloads a vocabulary; tests/test_presets_124m.py trains it on generated ids"
    ),
    ("sources.md", "glissando train --preset continuous-transformer --data.kind hub"): "downloads TinyStories",
    ("sources.md", "glissando generate runs/continuous"): "writes with the model of the training above it",
    ("sources.md", "glissando train --preset hybrid-ode --data.tokenizer gpt2"): (
        "downloads a vocabulary; tests/data/test_gpt2.py reads one that stands in for it"
    ),
    ("data.md", "glissando train --preset transformer-nano --data.kind hub"): (
        "downloads TinyStories; tests/data/test_corpora.py reads one that stands in for it"
    ),
    ("data.md", "glissando train --preset transformer-nano --data.kind hub_stream"): (
        "streams TinyStories; tests/data/test_hub_stream.py streams a local data set"
    ),
    ("clusters.md", "glissando compare transformer-nano liquid-ssm-nano --budget tokens=2e6 --seeds 4 --on ray"): (
        "a cluster of Ray; tests/test_compare_cluster.py starts one on this machine"
    ),
    ("extending.md", "glissando sums --model.mixer average --training.steps 1000 --out runs/sums"): (
        "a command of the page's own package"
    ),
    ("export.md", "glissando export runs/first --to web --out page"): (
        "npm fetches the runtime; tests/test_export_web.py opens such a page in a browser"
    ),
}
#: options of a new training that make its model and its data small; of some presets some others
SMALL = {"model.hidden_size": "16", "data.seq_len": "64", "data.batch_size": "2"}
STORIES = {"data.valid_rows": "4", "data.cut": "true"}
LAYERS = {"model.depth.layers": "2"}
BUDGET = re.compile(r"--training\.(tokens|seconds|steps|flops)")


def test_every_exception_is_on_its_page():
    for page, command in NOT_RUN:
        assert any(found.startswith(command) for found in commands(page_of(page))), f"{page}: {command}"


def page_of(name: str) -> Path:
    return next(page for page in GUIDES if page.name == name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs, texts and tables that the pages name and do not make."""
    place = tmp_path_factory.mktemp("pages")
    story = "The ship sailed at dawn, and the crew sang of home. "
    (place / "book.txt").write_text(sample_text(200, seed=1))
    (place / "another.txt").write_text(story * 40)
    for corpus, part in product(("tinystories", "books"), ("train", "valid")):
        (place / f"{corpus}_{part}.txt").write_text(sample_text(200, seed=2 + (part == "valid")))
    (place / "notes.jsonl").write_text('{"body": "The ship sailed at dawn."}\n' * 400)
    (place / "train.jsonl").write_text('{"text": "The ship sailed at dawn."}\n' * 400)
    shutil.copytree(ROOT / "research" / "published" / "pairs", place / "research" / "published" / "pairs")
    (place / "corpus").mkdir()
    for name in "ab":
        (place / "corpus" / f"{name}.txt").write_text(story * 40)
        shutil.copy(place / "notes.jsonl", place / "corpus" / f"{name}.jsonl")
    for name, said in (("good", "happy\nglad"), ("bad", "sad\nafraid"), ("openings", "Once upon a time\nOnce, a fox")):
        (place / f"{name}.txt").write_text(said + "\n")
    shutil.copy(ROOT / "examples" / "add_a_mixer.py", place / "my_mixer.py")
    shutil.copytree(ROOT / "examples", place / "examples")
    for file in ("steer", "grow"):
        path = place / "examples" / f"{file}.yaml"
        path.write_text(yaml.safe_dump(small_stages(yaml.safe_load(path.read_text()))))
    (place / "data").mkdir()
    for name, head, row in (
        ("weather", "origin,time_hour,temp,wind_speed,wind_gust,pressure", "{0},{1:.0f},{2},{2},{2},"),
        ("nafld_labs", "id,days,test,value", "{0},{1:.0f},hdl,{2}"),
        ("sensors", "sensor,when,x", "{0},{1:.0f},{2}"),
        ("visits", "patient,when,age,x", "{0},{1:.0f},5{0},{2}"),
    ):
        rows = [row.format(one, 1e9 + 3600 * t, (3 * one + t) % 7) for one in range(8) for t in range(40)]
        (place / "data" / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    for name in ("sensors", "visits"):
        (place / "data" / f"{name}.csv").rename(place / f"{name}.csv")
    people = [f"{one},{40 + one},{one % 2},27,3000" for one in range(8)]
    (place / "data" / "nafld_subjects.csv").write_text("\n".join(["id,age,male,bmi,futime", *people]) + "\n")
    events = [f"{one},{300 * t - 900},{('nafld', 'htn', 'MI')[(one + t) % 3]}" for one in range(8) for t in range(9)]
    (place / "data" / "nafld_events.csv").write_text("\n".join(["id,days,event", *events]) + "\n")
    tiny = {"model": {"hidden_size": 16, "depth": {"layers": 1}}, "training": {"steps": 4}}
    book = {"data": {"kind": "text", "path": "book.txt", "seq_len": 64, "batch_size": 2}}
    (place / "book.yaml").write_text(yaml.safe_dump({"preset": "transformer-nano", **tiny, **book}))
    before = Path.cwd()
    os.chdir(place)
    try:
        for line in (
            "train --preset transformer-nano --training.steps 4 --out runs/first",
            "train --preset liquid-ssm-nano --training.steps 4 --out runs/liquid",
            "train --config examples/steer.yaml --out stages",
            "series example --out more.csv",
            "series train --data.path data/nafld_labs.csv --data.group id --data.time days --data.channel test "
            "--data.value value --out runs/labs",
            "events train --data.path data/nafld_events.csv --data.group id --data.time days --data.kind event --out "
            "runs/diagnoses",
        ):
            assert glissando(shrunk(shlex.split(line))) == 0, line
    finally:
        os.chdir(before)
    (place / "stages" / "2-steer").rename(place / "RUN")
    shutil.rmtree(place / "stages")
    for name in ("dial", "stories"):
        shutil.copytree(pretrained.ROOT / name, place / "runs" / name)
    return place


def small_stages(config: dict) -> dict:
    """The same stages with a model of toy size, each for a few steps."""
    config["model"] = config.get("model", {}) | {"hidden_size": 16}
    config["data"] |= {"seq_len": 64, "batch_size": 2, "valid_rows": 4}
    for stage in config["stages"]:
        options = stage["training"]
        stage["training"] = {name: value for name, value in options.items() if name not in ("tokens", "flops")}
        stage["training"] |= {"steps": 4}
    return config


def shrunk(words: list[str]) -> list[str]:
    """The command with a budget of some steps, and a small model if it makes one."""
    reduced = {"train": shrunk_training, "compare": shrunk_comparison}.get(words[0], lambda words: words)(list(words))
    if words[0] == "generate":
        reduced = with_options(reduced, {"max_tokens": "4"})
    if words[0] == "steer":
        reduced += ["--values", "[-1, 0, 1]"]
        reduced += ["--max_tokens", "8", "--cost_rows", "2"]
        reduced += [] if "--prompts" in words else ["--prompts", "2"]
    if words[:2] in (["series", "train"], ["events", "train"]) and "--resume" not in words:
        reduced += ["--training.steps", "4"]
    return reduced


def value(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def without(words: list[str], pattern: str) -> list[str]:
    """Without the options that match, and their values."""
    kept = iter(words)
    left = []
    for word in kept:
        if re.fullmatch(pattern, word):
            next(kept)
        else:
            left.append(word)
    return left


def with_options(words: list[str], options: dict[str, str]) -> list[str]:
    words = without(words, "|".join(re.escape(f"--{name}") for name in options))
    return words + [part for name, given in options.items() for part in (f"--{name}", given)]


def shrunk_training(words: list[str]) -> list[str]:
    if "--print_config" in words or "--help" in words:
        return words
    if "--config" in words or "--resume" in words:
        return words  # the file is small; a run goes on as it began
    words = without(words, BUDGET.pattern)
    words += ["--training.steps", "4"]
    if "--from" in words:
        return words
    stories = not {"--data.kind", "--data.path"} & {*words}
    heads = {} if "--model.mixer" in words else few_heads(value(words, "--preset"))
    whole = {} if "--training.accumulate" in words else {"training.accumulate": "1"}  # some presets have 32
    return with_options(words, SMALL | (STORIES if stories else {}) | LAYERS | heads | whole)


def few_heads(preset: str | None) -> dict[str, str]:
    mixer = load_preset(preset or "transformer-nano")["model"].get("mixer", {})
    return {"model.mixer.heads": "2"} if isinstance(mixer, dict) and "heads" in mixer else {}


def shrunk_comparison(words: list[str]) -> list[str]:
    """The first three of many models, which the parser of options names in any order; two seeds at most."""
    models = list(dict.fromkeys(chain.from_iterable(map(braces, words[1 : first_option(words)]))))
    words = ["compare", *models[:3], *words[first_option(words) :]]
    stories = {} if {"--data.kind", "--data.path"} & {*words} else STORIES
    words = with_options(words, SMALL | stories | LAYERS | {"budget": "steps=3", "contexts": "16"})
    for option, small in (("probe_budget", "steps=2"), ("seeds", "2"), ("sweep_beyond", "0")):
        needs = {"probe_budget": "--probes", "seeds": "--seeds", "sweep_beyond": "--learning_rates"}[option]
        swept = option != "sweep_beyond" or "," in (value(words, needs) or "")
        words = with_options(words, {option: small}) if needs in words and swept else words
    return words if "--allow_unequal" in words else [*words, "--allow_unequal"]


def first_option(words: list[str]) -> int:
    return next(index for index, word in enumerate(words) if word.startswith("--"))


def braces(word: str) -> list[str]:
    """a/{b,c} is a/b and a/c, as in a shell."""
    parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", word)]
    return ["".join(each) for each in product(*parts)]


def serve_until_it_answers(words: list[str]) -> None:
    words = with_options([word for word in words if word != "--open"], {"port": "0"})
    command = [sys.executable, "-m", "glissando", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = next(line for line in server.stdout if " at http://" in line)
            url = re.search(r"http://[\d.:]+", said)[0]
            with urllib.request.urlopen(f"{url}/health") as answer:
                assert answer.status == 200
        finally:
            server.send_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lm-eval and matplotlib; what a user sees is tested where it is made
@pytest.mark.parametrize("page", [page.name for page in GUIDES if list(commands(page))])
def test_the_commands_of_a_page_run(page, runs, tmp_path, monkeypatch, capsys):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    ran = [command for command in commands(page_of(page)) if not any(
        page == where and command.startswith(what) for where, what in NOT_RUN
    )]  # fmt: skip
    made = {value(shlex.split(command), "--out") for command in ran}
    for run in ("runs/first", "runs/liquid", "runs/dial", "runs/stories", "runs/labs", "runs/diagnoses"):
        if run in made:
            shutil.rmtree(run)
    if not any(value(shlex.split(command), "--out") == "runs/book" for command in ran):
        shutil.copytree(runs / "runs" / "first", "runs/book")
    folders = count()
    for command in ran:
        words = [f"pictures-{next(folders)}" if word == "DIR" else word for word in shlex.split(command)[1:]]
        words = shrunk(words)
        print(f"$ glissando {shlex.join(words)}")
        if "serve" in words[:2]:
            serve_until_it_answers(words)
        elif "--training.devices" in words:  # its processes are started as this one was
            subprocess.run([sys.executable, "-m", "glissando", *words], check=True)
        else:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon a time\n")))
            try:
                status = glissando(words)
            except SystemExit as ended:  # of --help
                status = ended.code
            assert not status, f"{command}\n{capsys.readouterr().err[-3000:]}"
