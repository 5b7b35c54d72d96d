"""Every block of Python on a page of the docs runs as it is printed, but for the lengths of its trainings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from slow import slow_where
from test_troubleshooting import forgetting

import glissando
import glissando.export
from glissando import pretrained
from glissando.series import SeriesModel

ROOT = Path(__file__).parent.parent
#: what makes a block short: text that must be in it, and what stands there in the test
SHORTER = {
    ("training", 0): {"range(1000)": "range(2)", "batch_size=8": "batch_size=1"},
    ("training", 1): {
        "max_steps=1000": "max_steps=2",
        "val_check_interval=200": "val_check_interval=2",
        "batch_size=8": "batch_size=1",
    },
    ("training-options", 0): {
        "RunConfig()": 'RunConfig(model={"hidden_size": 32}, data={"kind": "stories", "valid_rows": 2})',
        "steps = 1000": "steps = 2; config.data.batch_size = 1",
    },
}
#: pages whose blocks train by several tools, which tests of these tools do with quicker models
TRAININGS = {"training", "training-options", "huggingface"}
#: blocks that are not programs, and why
FRAGMENTS = {
    ("compare", 0): "trains for an hour; tests/test_compare.py calls the same functions",
    ("decoding", 1): "a pattern over a mixer of one's own; tests/test_decoding.py has a whole one",
    ("events", 0): "for frames of one's own; tests/test_events.py fits the same",
    ("export", 0): "for a file that was exported; tests/test_series_export.py runs it",
    ("export", 1): "a pattern over a mixer of one's own; tests/test_export.py has a whole one",
    ("huggingface", 1): "for a process that has not imported glissando.hf; tests/test_hf.py starts one",
    ("series", 0): "for tables of one's own; tests/test_series_estimators.py fits the same",
    ("series", 1): "for a run and rows of one's own; tests/test_series_forecast.py streams the same",
    ("serving", 0): "for a server that runs; tests/server/test_serve.py has one",
    ("gpu", 0): "for a GPU",
}


def blocks() -> dict[tuple[str, int], str]:
    result = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            result[page.stem, number] = code
    return result


BLOCKS = blocks()


def test_every_exception_is_one_of_a_block():
    assert set(SHORTER) | set(FRAGMENTS) <= set(BLOCKS)
    assert not set(SHORTER) & set(FRAGMENTS)


@pytest.fixture
def place(tmp_path):
    """A directory with the runs and the text that the pages speak of."""
    folder = tmp_path
    for name in ("first", "book"):
        shutil.copytree(pretrained.ROOT / "stories", folder / "runs" / name)
    (folder / "book.txt").write_text("The ship sailed at dawn, and the crew sang of home.\n" * 400)
    config = {"hidden_size": 8, "mixer": "liquid", "depth": {"layers": 1}}
    SeriesModel.from_config(config | {"forecast": True, "inputs": 17, "outputs": 17}).save(
        folder / "runs" / "oscillators"
    )
    return folder


@pytest.mark.filterwarnings("ignore")  # of peft about transformers, and the Trainer's advice
@pytest.mark.parametrize("page", slow_where(TRAININGS, sorted({page for page, _ in BLOCKS})))
def test_the_blocks_of_a_page_run(page, place, monkeypatch):
    """In their order and in one namespace, which has what the text around them names."""
    monkeypatch.chdir(place)
    x = torch.randn(1, 5, 17)
    names = {
        "__name__": "__main__",
        "glissando": glissando, "x": x, "dt": torch.rand(1, 5) + 0.1, "mask": torch.ones(1, 5, dtype=torch.bool),
        "observed": torch.rand(x.shape) < 0.5, "horizon": torch.rand(1, 5, 2),
        "ids": torch.randint(1024, (2, 8)), "F": 17, "O": 17,
    }  # fmt: skip
    with forgetting():
        for key, code in BLOCKS.items():
            if key[0] != page or key in FRAGMENTS:
                continue
            for printed, shorter in SHORTER.get(key, {}).items():
                assert printed in code, f"{key}: {printed} is not in the block any more"
                code = code.replace(printed, shorter)
            exec(compile(code, f"docs/{page}.md, Python block {key[1]}", "exec"), names)
