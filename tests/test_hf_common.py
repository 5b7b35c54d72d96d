"""transformers' own tests of every model, from its source distribution: those that fail are the refusals on the page.

The wheel has no tests, so pip fetches the source distribution of the installed version. Two of the modules that the
tests import are not in it, the generation tests among them; tests/test_hf.py tests generation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

ROOT = Path(__file__).parent.parent
#: tests that fail, and why; see "What is refused, and why" in docs/huggingface.md
REFUSED = {
    "test_resize_tokens_embeddings": "the vocabulary is the tokenizer's",
    "test_model_weights_reload_no_missing_tied_weights": "weights that lack a tensor are refused",
    "test_model_base_model_prefix": "a LanguageModel is inside, and no model of transformers",
    "test_gradient_checkpointing_enable_disable": "blocks are recomputed by the depth, and no layers of transformers",
    "test_training_gradient_checkpointing": "as above",
    "test_training_gradient_checkpointing_use_reentrant_false": "as above",
    "test_training_gradient_checkpointing_use_reentrant_true": "as above, and re-entry is refused",
}
#: modules that the source distribution lacks, and the class that each is imported for
ABSENT = {"exporters/test_export": "ExportTesterMixin", "generation/test_utils": "GenerationTesterMixin"}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"pip could not fetch transformers' tests: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    """A directory to import `hftests` from, transformers' tests, and `parameterized`, which they need."""
    folder = tmp_path_factory.mktemp("hf_common")
    pip("download", "--no-deps", "--no-binary", ":all:", f"transformers=={transformers.__version__}", "-d", str(folder))
    pip("install", "--target", str(folder), "parameterized")
    package = folder / "hftests"
    with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
        inside = f"transformers-{transformers.__version__}/tests/"
        for member in archive.getmembers():
            name = member.name.removeprefix(inside)
            if member.isfile() and name.startswith("test_") and "/" not in name:
                package.mkdir(exist_ok=True)
                (package / name).write_bytes(archive.extractfile(member).read())
    (package / "__init__.py").touch()
    for module, name in ABSENT.items():
        place = package / f"{module}.py"
        assert not place.exists(), f"{module} is in the source distribution now: run its tests"
        place.parent.mkdir()
        (place.parent / "__init__.py").touch()
        place.write_text(f"class {name}: pass\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["spectral-delta-nano", "transformer-plus-nano", "hybrid-ode-nano"])
def test_transformers_own_model_tests(suite, preset):
    report = suite / f"{preset}.xml"
    paths = os.pathsep.join([str(ROOT), str(suite), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", "-q", "-W", "ignore", "--tb=short",
         f"--junitxml={report}", str(ROOT / "tests" / "hf_common" / "common_models.py")],
        cwd=suite, capture_output=True, text=True, timeout=3000,
        env=os.environ | {"PYTHONPATH": paths, "GLISSANDO_HF_PRESET": preset, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None}
    assert failed == REFUSED.keys(), done.stdout[-20_000:]
    assert len(cases) - sum(case.find("skipped") is not None for case in cases) > 60
