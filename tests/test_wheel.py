"""The wheel alone, outside the checkout: its models write, and it trains, evaluates, compares, serves and exports.

Once beside this environment's packages, once in an environment of its own with the oldest versions of the dependencies
that pyproject.toml allows, and once with the newest and the pinned torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from glissando import pretrained

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree."""
    place = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "glissando", place / "tree" / "glissando", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "LICENSES", place / "tree" / "LICENSES")
    for name in ("README.md", "LICENSE", "NOTICE", "pyproject.toml"):
        shutil.copy(ROOT / name, place / "tree" / name)
    command = [sys.executable, "-c", BUILD, str(place)]
    done = subprocess.run(command, cwd=place / "tree", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(place.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel) -> Path:
    """The wheel, unpacked as pip does it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent / "site")
    return wheel.parent / "site"


def test_it_holds_every_file_of_the_package(site):
    own = {path.relative_to(ROOT) for path in (ROOT / "glissando").rglob("*") if path.is_file()}
    own = {path for path in own if "__pycache__" not in path.parts}
    assert sorted(path for path in own if not (site / path).is_file()) == []


def test_its_metadata_are_what_an_index_shows(site):
    """Licences with their texts, and links; every folder of a packaged model has a licence that is declared."""
    written = next(site.glob("*.dist-info"))
    fields = message_from_string((written / "METADATA").read_text())
    assert fields["License-Expression"] == "Apache-2.0 AND CDLA-Sharing-1.0"
    assert {f.name for f in (written / "licenses").rglob("*.*")} == {"CDLA-Sharing-1.0.txt"}
    assert {"LICENSE", "NOTICE"} <= {f.name for f in (written / "licenses").iterdir()}
    notice = (written / "licenses" / "NOTICE").read_text()
    for name in pretrained.names():
        licence = pretrained.card(name)[0]["license"]
        assert licence in fields["License-Expression"].split(" AND ")
        assert (f"glissando/pretrained/{name}/" in notice) == (licence != "Apache-2.0")
    assert {link.split(",")[0] for link in fields.get_all("Project-URL")} >= {"Homepage", "Repository", "Changelog"}
    assert "Development Status :: 3 - Alpha" in fields.get_all("Classifier")


def test_it_is_all_that_is_needed(site, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(site)}

    def glissando(*arguments: str) -> str:
        command = [sys.executable, "-m", "glissando", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    assert "stories" in glissando("models")
    assert len(glissando("generate", "stories", "--prompt", "Once upon a time", "--max_tokens", "20")) > 40
    glissando("train", "--from", "stories", "--training.steps", "2", "--data.valid_rows", "4", "--out", "run")
    assert "bits_per_byte" in glissando("evaluate", "run", "--json")
    glissando("export", "run", "--to", "safetensors-int8", "--out", "small")
    assert (tmp_path / "small" / "README.md").is_file()


def lower_bounds() -> list[str]:
    """Lower bounds of the package and of its extra `serve`, as constraints."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["serve"]]
    found = [re.match(r"([\w.-]+)(?:\[.*?\])?>=([\d.]+)", requirement) for requirement in wanted]
    assert all(found), wanted
    return [f"{each[1]}=={each[2]}" for each in found if each]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_it_runs_in_a_fresh_environment(versions, wheel, tmp_path):
    venv.create(tmp_path / "environment", with_pip=True)
    program = str(tmp_path / "environment" / "bin" / "python")
    pinned = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    bounds = lower_bounds() if versions == "oldest" else [pinned]
    torch = next(bound for bound in bounds if bound.startswith("torch=="))
    (tmp_path / "versions.txt").write_text("\n".join(bounds))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    environment |= {"GLISSANDO_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    place = tmp_path / "place"
    place.mkdir()

    def run(*arguments: object) -> str:
        command = [program, "-m", *map(str, arguments)]
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (arguments, done.stderr[-3000:])
        return done.stdout

    install = ["pip", "install", "--quiet", "--disable-pip-version-check", "-c", tmp_path / "versions.txt"]
    environment |= {"HOME": os.environ["HOME"]}  # pip's own settings and cache
    run(*install, "--no-deps", "--extra-index-url", "https://download.pytorch.org/whl/cpu", torch)
    # The extra `export` with the newest alone: torch decides how old ONNX may be.
    run(*install, f"{wheel}[{'serve' if versions == 'oldest' else 'serve,export'}]")
    environment |= {"HOME": str(tmp_path)}
    before = {path for path in (tmp_path / "environment").rglob("glissando/**/*") if "__pycache__" not in path.parts}

    tiny = ["--model.hidden_size", 32, "--data.valid_rows", 4]
    assert "stories" in run("glissando", "models")
    assert len(run("glissando", "generate", "stories", "--max_tokens", 20)) > 40
    run("glissando", "train", "--preset", "liquid-ssm-nano", *tiny, "--training.steps", 2, "--out", "run")
    run("glissando", "train", "--from", "run", "--training.steps", 4, "--out", "longer")
    assert "bits_per_byte" in run("glissando", "evaluate", "run", "--json")
    compared = ["transformer-nano", "continuous-transformer-nano", *tiny, "--budget", "steps=2", "--contexts", 16]
    run("glissando", "compare", *compared, "--allow_unequal", "--out", "compared")
    assert "bits per byte" in (place / "compared" / "report.html").read_text()
    run("glissando", "export", "run", "--to", "safetensors-int8", "--out", "small")
    if versions == "newest":
        run("glissando", "export", "run", "--to", "onnx", "--out", "graph")
        assert list((place / "graph").glob("*.onnx"))
    run("glissando", "series", "example", "--out", "example.csv")
    assert "rmse" in run("glissando", "series", "evaluate", "series", "--file", "example.csv")
    run(
        "glissando",
        "steer",
        "dial",
        "--out",
        "steered",
        "--prompts",
        2,
        "--cost_rows",
        2,
        "--values=-1,0,1",
        "--max_tokens",
        20,
    )

    server = [program, "-m", "glissando", "serve", "stories", "--port", "0"]
    with subprocess.Popen(server, cwd=place, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(
                found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line))
            )
            body = json.dumps({"model": "stories", "prompt": "Once", "max_tokens": 8}).encode()
            request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as answer:
                assert json.load(answer)["choices"][0]["text"]
        finally:
            process.terminate()
    after = {path for path in (tmp_path / "environment").rglob("glissando/**/*") if "__pycache__" not in path.parts}
    assert after == before, "something was written into the package's directory"
