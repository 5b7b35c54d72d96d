"""Rows cut over processes: values and gradients are one process's, for every mixer and depth, and so is a training."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from context_parallel_worker import RECOMPUTED, WORLD
from hypothesis import given
from hypothesis import strategies as st
from subjects import CASES
from tolerances import TOLERANCE, assert_close
from training_runs import (
    PLAIN,
    call,
    command,
    configuration,
    curve,
    last_checkpoint,
    mapping,
    metrics,
    options,
    started,
    weights,
)

from benchmarks import context_parallel
from glissando.data.base import IGNORED, Batch
from glissando.errors import ConfigError, DataError, InputError
from glissando.model import LanguageModel
from glissando.training.context_parallel import RowParts
from glissando.training.fit import resume, train

#: each mixer as it is by default, what is special of some, and each depth; the others are a slow test
QUICK = [
    case
    for case in [*CASES, "depth:summed"]
    if case in RECOMPUTED or case.endswith("-default") or case.startswith("depth:") or case == "mixer:liquid-dense"
]


def largest_gaps(folder: Path, cases: list[str]) -> dict[str, tuple[float, str]]:
    """By case, the largest difference from one process and where it is; all four processes together."""
    worker = str(Path(__file__).with_name("context_parallel_worker.py"))
    with ExitStack() as stack:
        each = [
            stack.enter_context(started([sys.executable, worker, str(rank), str(folder), ",".join(cases)]))
            for rank in range(WORLD)
        ]
        errors = [process.communicate(timeout=280)[1] for process in each]
    assert not any(process.returncode for process in each), "\n".join(errors)[-4000:]
    found: dict[str, tuple[float, str]] = {}
    for rank in range(WORLD):
        for case, (gap, where) in json.loads((folder / f"{rank}.json").read_text()).items():
            found[case] = max(found.get(case, (0.0, "")), (gap, where))
    return found


@pytest.fixture(scope="module")
def gaps(tmp_path_factory) -> dict[str, tuple[float, str]]:
    return largest_gaps(tmp_path_factory.mktemp("gaps"), QUICK)


@pytest.mark.parametrize("case", QUICK)
def test_values_and_gradients_are_one_process_s(gaps, case):
    kinds = ["2 processes", "4 processes, masks"] + ["2 processes, recomputed"] * (case in RECOMPUTED)
    for kind in kinds:
        gap, where = gaps[f"{case}, {kind}"]
        assert gap <= TOLERANCE[torch.float64], f"{kind}: {where} differs by {gap:.3g}"


@pytest.mark.slow
def test_all_other_cases(tmp_path):
    for case, (gap, where) in largest_gaps(tmp_path, [case for case in CASES if case not in QUICK]).items():
        assert gap <= TOLERANCE[torch.float64], f"{case}: {where} differs by {gap:.3g}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("preset", context_parallel.PRESETS)
def test_two_processes_halve_the_memory_of_a_long_row(preset):
    def memory(processes: int) -> float:
        return context_parallel.figures(preset, 65536, processes)[0]

    assert memory(2) <= 0.55 * memory(1)


CHANGES = {"training": {"steps": 6, "save_every": 3, "validate_every": 3, "log_every": 1, "accumulate": 2}}
#: rows of 15 tokens, which two processes cannot share evenly; states of keys and values, of gates and of a convolution
MODEL = {
    "data": {"seq_len": 15},
    "model.mixer": {"forget_gate": True, "keys": "previous"},
    "model.block": {"conv_width": 3},
}
SHARED = {"training": {"devices": 2, "context_parallel": 2}}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return train(configuration(folder, PLAIN, MODEL, CHANGES), folder / "run").path


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    arguments = options(mapping(folder, PLAIN, MODEL, CHANGES, SHARED))
    done = call(command(*arguments, f"--out={folder / 'run'}"))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def test_a_training_has_one_process_s_curve(single, shared):
    assert_close(curve(shared), curve(single), "train_loss", 1e-5)
    for got, expected in zip(metrics(shared), metrics(single), strict=True):
        assert got.keys() == expected.keys()
        for name in expected:
            assert (got[name] == "") == (expected[name] == ""), name
            if expected[name]:
                assert float(got[name]) == pytest.approx(float(expected[name]), rel=2e-4, abs=1e-6), name
    for name, weight in weights(single).items():
        assert_close(weights(shared)[name], weight, name, 1e-4)


def test_one_process_goes_on_with_it(single, shared, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(shared, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    resume(copy, {"devices": 1, "context_parallel": 1})
    assert last_checkpoint(copy).step == 6
    assert_close(curve(copy), curve(single), "train_loss", 1e-5)


RECURRENT = {"model.mixer": [{"kind": "spectral"}, {"kind": "delta"}]}
#: what is different in the training, and how near its losses are to one process's
VARIANTS = {
    "bf16-mixed": ({"training": {"precision": "bf16-mixed"}}, 2e-3),
    "recomputed": ({"training": {"gradient_checkpointing": True}}, 1e-5),
    "padded": ({"data": {"kind": "stories", "seq_len": 128, "batch_size": 4}, **RECURRENT}, 1e-5),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_groups_of_two(tmp_path, variant):
    """Two rows at a time, each cut in two."""
    changes, tolerance = VARIANTS[variant]
    for name, more in (("one", {}), ("four", {"training": {"devices": 4, "context_parallel": 2}})):
        (tmp_path / name).mkdir()
        all_changes = (PLAIN, MODEL, CHANGES, {"training": {"accumulate": 1}}, changes, more)
        done = call(command(*options(mapping(tmp_path / name, *all_changes)), f"--out={tmp_path / name / 'run'}"))
        assert done.returncode == 0, done.stderr[-3000:]
    assert_close(curve(tmp_path / "four" / "run"), curve(tmp_path / "one" / "run"), "train_loss", tolerance)


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"context_parallel": 2}, 1, "cuts each row over 2 processes, and there are 1: give --training.devices 2"),
        ({"context_parallel": 4}, 6, "cuts each row over 4 processes, and there are 6"),
        ({"context_parallel": 2, "strategy": "fsdp"}, 2, "cannot cut rows over processes"),
        ({"context_parallel": 2, "compile": True}, 2, "training.compile cannot follow states"),
        ({"context_parallel": 32}, 32, "data.seq_len 16 cannot be cut into training.context_parallel 32 parts"),
        ({"context_parallel": 2}, 12, r"batch_size 4 cannot be divided among 6 group\(s\) of processes"),
    ],
)
def test_what_cannot_be_cut_is_an_error(tmp_path, changes, processes, message):
    with pytest.raises(ConfigError, match=message):
        configuration(tmp_path, {"training": changes}).check(processes)


def test_a_group_shares_a_batch_of_one_row(tmp_path):
    configuration(tmp_path, {"training": {"context_parallel": 4}, "data": {"batch_size": 2}}).check(8)


def parts_of(size: int) -> list[RowParts]:
    return [RowParts(SimpleNamespace(place=place, size=size)) for place in range(size)]  # type: ignore[arg-type]


@given(length=st.integers(1, 40), size=st.integers(2, 9))
def test_parts_make_up_the_row(length, size):
    if length < size:
        with pytest.raises(DataError, match=f"lower it to {length} or less"):
            parts_of(size)[0].columns(length)
        return
    found = [range(length)[parts.columns(length)] for parts in parts_of(size)]
    assert [column for part in found for column in part] == list(range(length))
    sizes = [len(part) for part in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_parts_of_a_batch():
    ids = torch.arange(14).view(2, 7)
    mask = torch.arange(7) < torch.tensor([[7], [2]])
    batch = Batch(ids, ids.masked_fill(~mask, IGNORED), 9, mask, torch.ones(2, 1))
    shares = [parts.of(batch) for parts in parts_of(3)]
    assert torch.equal(torch.cat([share.ids for share in shares], 1), ids)
    assert torch.equal(torch.cat([share.targets for share in shares], 1), batch.targets)
    assert [share.before.tolist() for share in shares] == [[0, 0], [3, 2], [5, 2]]
    assert [share.n_bytes for share in shares] == [9, 0, 0]
    assert [parts.of(batch._replace(mask=None)).before.tolist() for parts in parts_of(3)] == [[0, 0], [3, 3], [5, 5]]


def test_a_relay_needs_a_state():
    model = LanguageModel.from_preset("transformer-nano")
    with pytest.raises(InputError, match=r"model\.init_state"):
        model(torch.zeros(1, 4, dtype=torch.int64), relay=object())  # type: ignore[arg-type]
