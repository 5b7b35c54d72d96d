"""Two processes give one process's run under DDP and FSDP2: every mixer and depth, growth, stages, a tie to a base."""

from __future__ import annotations

import sys
from pathlib import Path

import parallel_cases
import pytest
import yaml
from parallel_cases import BRIEF, FLOW, STORIES
from tolerances import assert_close
from training_runs import PLAIN, call, command, configuration, curve, last_checkpoint, mapping, metrics, weights

from glissando.errors import ConfigError
from glissando.growth import Growth
from glissando.growth.runs import grow_run
from glissando.stages import plans, train_stages
from glissando.training.fit import train

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
PROGRAM = str(Path(parallel_cases.__file__))
#: what `make test` tries; `make slow` tries the others
ALL = [f"{case}:{strategy}" for case in parallel_cases.CASES for strategy in ("ddp", "fsdp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the runs that others start from."""
    folder = tmp_path_factory.mktemp("parallel")
    once = {"training.steps": 1}
    train(configuration(folder, PLAIN, BRIEF, once, STORIES, {"model.depth": FLOW}), folder / "plain")
    train(configuration(folder, PLAIN, BRIEF, once), folder / "small")
    grow_run(folder / "small", folder / "grown", Growth(layers=1))
    return folder


def compare(folder: Path, names: list[str]) -> None:
    files = []
    for case, _, strategy in (name.partition(":") for name in names):
        files.append(folder / f"{case}-{strategy}.yaml")
        files[-1].write_text(yaml.safe_dump(parallel_cases.config_of(case, folder, strategy).as_dict()))
    done = call([*TORCHRUN, PROGRAM, *map(str, files)])
    assert done.returncode == 0, done.stderr[-3000:]
    for case in {name.partition(":")[0] for name in names}:
        expected = parallel_cases.run(case, folder)
        for strategy in [name.partition(":")[2] for name in names if name.startswith(f"{case}:")]:
            assert_same_run(folder / f"{case}-{strategy}", expected.path)


def assert_same_run(run: Path, expected: Path) -> None:
    """Curves to 1e-5; norms of gradients, validation and the tie to a base, which metrics.csv rounds, to 2e-4."""
    assert_close(curve(run), curve(expected), f"{run.name} train_loss", 1e-5)
    for got, wanted in zip(metrics(run), metrics(expected), strict=True):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (got[name] == "") == (value == ""), name
            if value:
                assert float(got[name]) == pytest.approx(float(value), rel=2e-4, abs=1e-6), f"{run.name} {name}"
    assert last_checkpoint(run).optimizer.keys() == last_checkpoint(expected).optimizer.keys()


@pytest.mark.serial
@pytest.mark.slow
def test_two_processes_give_the_run_of_one(folder):
    compare(folder, ALL)


STAGES = [
    {"name": "small", "training": {"steps": 2}},
    {"name": "large", "grow": {"layers": 1}, "training": {"steps": 2}, "data": {"seed": 1}},
]


@pytest.mark.serial
@pytest.mark.slow
def test_stages_share_their_processes(tmp_path):
    """The second grows the model of the first, and shards it; without torchrun, so that Fabric starts the processes."""
    one, two, config = tmp_path / "one", tmp_path / "two", tmp_path / "stages.yaml"
    short = {"model": {"max_length": 24}}  # samples end soon
    train_stages(configuration(tmp_path, PLAIN, BRIEF, short, {"stages": STAGES}), one)
    sharded = [STAGES[0], {**STAGES[1], "training": {"steps": 2, "strategy": "fsdp"}}]
    shared = mapping(tmp_path, PLAIN, BRIEF, short, {"stages": sharded, "training.devices": 2})
    config.write_text(yaml.safe_dump(shared))
    done = call(command("--config", str(config), "--out", str(two)))
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("1-small", "2-large"):
        assert_same_run(two / name, one / name)
    assert weights(two / "2-large").keys() == weights(one / "2-large").keys()
    assert done.stderr.count("stage 2-large") == 1
    done = call(command("--config", str(config), "--out", str(two)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("nothing is left to train") == 2


def test_a_stage_has_no_processes_of_its_own(tmp_path):
    stages = [STAGES[0], {**STAGES[1], "training": {"devices": 2}}]
    with pytest.raises(ConfigError, match=r"training\.devices is 1, and 2 in stage large; give it once"):
        plans(configuration(tmp_path, {"stages": stages}), tmp_path / "out")
