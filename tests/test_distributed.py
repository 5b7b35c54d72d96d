"""Two processes on the CPU give one process's run: its loss curve, its batches, its directory, its resumption; and in a
loop of a user's own its gradients."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import two_processes
from safetensors.torch import load_file
from slow import slow_where
from tolerances import TOLERANCE, assert_close
from training_runs import (
    PLAIN,
    UNUSED,
    assert_same_tensors,
    call,
    command,
    configuration,
    curve,
    last_checkpoint,
    mapping,
    metrics,
    options,
    rewind,
    weights,
)

import glissando
from glissando.checkpoints import SHARDS, saved_optimizer, saved_weights
from glissando.data.base import Shard
from glissando.data.corpora import build_corpus
from glissando.errors import RunError
from glissando.runs import Run
from glissando.training import launch
from glissando.training.config import TrainingConfig
from glissando.training.fit import resume, train
from glissando.training.state import TrainState

pytestmark = pytest.mark.serial  # processes of their own

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
CHANGES = {"training": {"steps": 4, "save_every": 2, "validate_every": 2, "sample_every": 2, "log_every": 1}}
#: rows go on from the states of those before, which checkpoints hold
CHANGES |= {"model": {"mixer": {"window": 12}}, "data": {"batch_size": 32}}  # so many rows that batches have two turns
CHANGES["training"]["carry"] = 0.7
#: matrices by Muon, for which shards are gathered; the rest by AdamW
CHANGES["training"]["optimizer"] = {"kind": "muon", "learning_rate": 0.01}
#: how the program is started, and its further options; None: forked, see two_processes.py, where torch is loaded once
STARTS = {
    "forked ddp": (None, {"strategy": "ddp"}),
    "forked fsdp": (None, {"strategy": "fsdp"}),
    "ddp": ((), {"devices": 2, "strategy": "ddp"}),
    "torchrun": (TORCHRUN, {"accumulate": 2}),
    "fsdp": ((), {"devices": 2, "strategy": "fsdp"}),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("single")
    return train(configuration(folder, PLAIN, CHANGES), folder / "run").path


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """The folder of pairs of processes that were forked."""
    folder = tmp_path_factory.mktemp("forked")
    jobs = {name: [*options(mapping(folder, PLAIN, CHANGES, {"training": changes})), f"--out={folder / name / 'run'}"]
            for name, (launcher, changes) in STARTS.items() if launcher is None}  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")  # autograd's threads of a GPU cannot be forked
        done = call([sys.executable, two_processes.__file__, str(folder)])
    assert done.returncode == 0, [done.stderr[-3000:], *(path.read_text()[-3000:] for path in folder.glob("*.stderr"))]
    return folder


@pytest.fixture(scope="module", params=slow_where(["ddp", "torchrun", "fsdp"], STARTS))
def double(request, tmp_path_factory):
    """The same run by two processes, started in one of several ways."""
    launcher, changes = STARTS[request.param]
    if launcher is None:
        folder = request.getfixturevalue("forked")
        return folder / request.param / "run", (folder / f"{request.param}.stderr").read_text()
    folder = tmp_path_factory.mktemp(request.param)
    arguments = options(mapping(folder, PLAIN, CHANGES, {"training": changes}))
    done = call(command(*arguments, f"--out={folder / 'run'}", launcher=launcher))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run", done.stderr


def test_gradients_of_two_processes_in_a_loop_of_ones_own_are_those_of_one(forked):
    for rank in (0, 1):
        gaps = json.loads((forked / f"{rank}.json").read_text())
        assert len(gaps) == 10
        assert {case: gap for case, gap in gaps.items() if not gap <= TOLERANCE[torch.float64]} == {}


def test_training_loads_fabric_without_the_trainer_and_what_that_brings(forked):
    loaded = set(json.loads((forked / "forked ddp.json").read_text()))
    assert "lightning_fabric" in loaded
    assert loaded & UNUSED == set()


def test_two_processes_give_the_curve_of_one(single, double):
    run, said = double
    assert_close(curve(run), curve(single), "train_loss", 1e-5)
    for got, expected in zip(metrics(run), metrics(single), strict=True):
        assert got.keys() == expected.keys()
        for name in expected:
            assert (got[name] == "") == (expected[name] == ""), name
            if expected[name]:
                assert float(got[name]) == pytest.approx(float(expected[name]), rel=2e-4, abs=1e-6), name
    assert float(metrics(run)[-1]["valid_loss"]) == pytest.approx(float(metrics(single)[-1]["valid_loss"]), rel=1e-5)
    assert (run / "samples.txt").read_text().count("--- step") == 2
    assert said.count("run: ") == 1
    assert "Lightning" not in said
    assert "Initializing" not in said
    assert "arning" not in said.replace("OMP_NUM_THREADS", "").replace("learning", "")


def test_the_run_opens_as_any_other(single, double):
    run, _ = double
    model, expected = glissando.load(run), glissando.load(single)
    assert model.head is None  # the embedding is the head
    for name, weight in expected.state_dict().items():
        assert_close(model.state_dict()[name], weight, name, 1e-4)
    ids = torch.arange(97, 105).unsqueeze(0)
    assert_close(model(ids)[0], expected(ids)[0], "logits", 1e-3)
    assert glissando.load(run / "checkpoints" / "step-00000002").num_parameters() == model.num_parameters()


def test_resuming_with_one_process(double, tmp_path):
    run, _ = double
    shutil.copytree(run, tmp_path / "run")
    rewind(tmp_path / "run", 2)
    resume(tmp_path / "run", {"devices": 1, "strategy": "auto"})
    assert last_checkpoint(tmp_path / "run").step == 4
    assert_close(curve(tmp_path / "run"), curve(run), "train_loss", 1e-5)


def resume_with_two(run: Path, copy: Path) -> None:
    """A copy of the run, taken back to its first checkpoint, goes on to the very same end."""
    shutil.copytree(run, copy)
    rewind(copy, 2)
    done = call(command(f"--resume={copy}", launcher=TORCHRUN if "torchrun" in str(run) else ()))
    assert done.returncode == 0, done.stderr[-3000:]
    mine, expected = last_checkpoint(copy), last_checkpoint(run)
    assert_same_tensors(mine.model, expected.model)
    assert_same_tensors(mine.optimizer, expected.optimizer)
    assert_same_tensors(mine.random, expected.random)
    assert mine.random[0]["torch"] != mine.random[1]["torch"]
    assert metrics(copy) == metrics(run)


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.parametrize("double", ["fsdp"], indirect=True)
def test_sharded_run_resumes(double, tmp_path):
    resume_with_two(double[0], tmp_path / "run")


@pytest.mark.parametrize("double", ["forked fsdp"], indirect=True)
def test_each_process_of_a_sharded_run_writes_its_own_shards(double, tmp_path):
    """None is a pickle, none holds a whole matrix, together they are the whole; they open as any checkpoint does."""
    run, _ = double
    last = run / "checkpoints" / "step-00000004"
    shards = [last / SHARDS / f"shard-{n:05d}-model-00001-of-00001.safetensors" for n in (1, 2)]
    assert sorted((last / SHARDS).iterdir()) == shards
    for path in last.rglob("*"):
        assert path.is_dir() or path.suffix in (".safetensors", ".json", ".csv", ".yaml"), path
        if path.suffix == ".safetensors":
            load_file(path)
    parts = [load_file(shard) for shard in shards]
    whole = TrainState.load(last)
    for name, value in whole.model.items():
        kept = [part[f"model/{name}"] for part in parts if f"model/{name}" in part]
        assert sum(each.numel() for each in kept) == value.numel()
        assert value.ndim == 0 or value.numel() < 2 or max(each.numel() for each in kept) < value.numel(), name
    assert_same_tensors(weights(run), {name.removeprefix("model."): value for name, value in whole.model.items()})
    assert_same_tensors(dict(glissando.load(last).state_dict()), dict(glissando.load(run).state_dict()))
    assert torch.equal(checkpoint_state(last), whole.optimizer["embedding.weight"]["exp_avg"])
    whole.save(tmp_path / "step-00000004")
    assert not (tmp_path / "step-00000004" / SHARDS).exists()
    again = TrainState.load(tmp_path / "step-00000004")
    assert_same_tensors([again.model, again.optimizer], [whole.model, whole.optimizer])
    onward = {"start_from": str(last), "model": Run.open(last).read_config()["model"], "training": {"steps": 1}}
    train(configuration(tmp_path, onward), tmp_path / "onward")


def checkpoint_state(checkpoint: Path) -> torch.Tensor:
    return saved_optimizer(checkpoint)["embedding.weight"]["exp_avg"]


@pytest.mark.parametrize("double", ["forked fsdp"], indirect=True)
def test_a_damaged_or_missing_shard_is_an_error_that_names_it_and_the_checkpoint_before_it(double, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(double[0], copy)
    last = copy / "checkpoints" / "step-00000004"
    shard = last / SHARDS / "shard-00002-model-00001-of-00001.safetensors"
    intact = shard.read_bytes()
    for damage, what in ((lambda: shard.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1])), "damaged"),
                         (shard.unlink, "missing")):  # fmt: skip
        damage()
        for read in (TrainState.load, glissando.load, saved_weights):
            with pytest.raises(RunError, match=rf"{shard.name} is {what}.*loads instead: .*step-00000002"):
                read(last)
    glissando.load(copy)


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.parametrize("double", ["ddp", "torchrun"], indirect=True)
def test_run_of_two_processes_resumes(double, tmp_path):
    resume_with_two(double[0], tmp_path / "run")


@pytest.mark.serial
@pytest.mark.slow
def test_one_process_run_goes_on_sharded(single, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(single, copy)
    rewind(copy, 2)
    done = call(command(f"--resume={copy}", "--training.devices=2", "--training.strategy=fsdp"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(curve(copy), curve(single), "train_loss", 1e-5)
    assert len(last_checkpoint(copy).random) == 2


@pytest.mark.serial
@pytest.mark.slow
def test_existing_directory_ends_every_process(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "note").write_text("mine")
    arguments = options(mapping(tmp_path, {"training": {"devices": 2}}))
    done = call(command(*arguments, f"--out={tmp_path / 'run'}", launcher=TORCHRUN))
    assert done.returncode != 0
    assert "exists and is not empty" in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["note"]


FULL_DISK = """
import atexit, errno, os, sys
from glissando import storage
original, saved = storage.save_tensors, []
def full(path, *args, **keywords):
    saved.append(path)
    if len(saved) > 4:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return original(path, *args, **keywords)
storage.save_tensors = full
def threads():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    print("threads of the group:", sum("gloo" in name for name in names), file=sys.stderr)
atexit.register(threads)
from glissando.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.serial
@pytest.mark.slow
def test_full_disk_on_the_first_process_ends_both(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(FULL_DISK)
    arguments = options(mapping(tmp_path, CHANGES, {"training": {"devices": 2, "steps": 8}}))
    done = call([sys.executable, str(script), *arguments, f"--out={tmp_path / 'run'}"])
    assert done.returncode == 1
    assert done.stderr.count("No space left on device") == 1
    assert "Traceback" not in done.stderr
    glissando.load(tmp_path / "run")
    if Path("/proc/self/task").exists():  # what still runs as the interpreter ends can abort it, one time in many
        assert "threads of the group: 0" in done.stderr


#: the second process cannot write its shards of step 4
FULL_SHARD = """
import errno, os, sys
from glissando import shards
original = shards.HuggingFaceStorageWriter.write_data
def full(self, *args, **keywords):
    if os.environ.get("LOCAL_RANK") == "1" and "step-00000004" in str(self.path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
    return original(self, *args, **keywords)
shards.HuggingFaceStorageWriter.write_data = full
from glissando.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.serial
@pytest.mark.slow
def test_full_disk_of_one_process_ends_both_and_leaves_the_checkpoint_before(tmp_path):
    script, run = tmp_path / "program.py", tmp_path / "run"
    script.write_text(FULL_SHARD)
    changes = {"training": {"devices": 2, "strategy": "fsdp", "steps": 8, "validate_every": 100, "sample_every": 100}}
    done = call([sys.executable, str(script), *options(mapping(tmp_path, CHANGES, changes)), f"--out={run}"])
    assert done.returncode == 1
    assert done.stderr.count("could not save step 4: ") == 1
    assert done.stderr.count("No space left on device") == 1
    assert "Traceback" not in done.stderr
    assert last_checkpoint(run).step == 2
    assert not list((run / "checkpoints").glob(".*"))
    glissando.load(run)
    done = call(command(f"--resume={run}"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_checkpoint(run).step == 8


def test_shares_of_a_batch_make_up_the_whole(tmp_path):
    config = configuration(tmp_path)
    corpus = build_corpus(config.data)
    whole = next(corpus.batches("train", start=3))
    shares = [next(corpus.batches("train", start=3, shard=Shard(rank, 2))) for rank in range(2)]
    assert torch.equal(torch.stack([s.ids for s in shares], 1).flatten(0, 1), whole.ids)
    assert sum(s.n_bytes for s in shares) == whole.n_bytes


def test_number_of_this_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launch.rank() == 0
    assert launch.processes(TrainingConfig(devices=4)) == (4, 1)
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert launch.rank() == 3
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert launch.rank() == 0
    monkeypatch.setenv("RANK", "5")
    assert launch.rank() == 5
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "6")):
        monkeypatch.setenv(name, value)
    assert launch.processes(TrainingConfig()) == (2, 3)
