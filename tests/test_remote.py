"""Runs at URLs: trained, read, resumed, and never half-written or overwritten. The storages are fsspec's memory and
files, which have what object stores have, and HTTP on this machine."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import PLAIN, assert_same_tensors, call, command, configuration, crash_in, last_checkpoint, weights

import glissando
from glissando import machine, remote, runs
from glissando.cli import main
from glissando.errors import RunError
from glissando.remote import fetched, place, work_directory
from glissando.runs import Run
from glissando.storage import manifest_text
from glissando.training import launch
from glissando.training.fit import resume, train
from glissando.training.mirroring import Mirror
from glissando.urls import is_url, whole_url

STEPS = {"training": {"steps": 4, "save_every": 2, "validate_every": 2}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """What every training of four steps ends as."""
    folder = tmp_path_factory.mktemp("whole")
    return train(configuration(folder, PLAIN, STEPS), folder / "whole")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own, and an empty memory."""

    def of_the_test(kind: str) -> Path:
        (tmp_path / "cache" / kind).mkdir(parents=True, exist_ok=True)
        return tmp_path / "cache" / kind

    monkeypatch.setattr(remote, "cache_dir", of_the_test)  # compiled kernels stay where they are
    empty()
    return tmp_path / "cache"


def empty() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def trained(folder: Path, url: str, *updates: dict) -> Run:
    return train(configuration(folder, PLAIN, STEPS, *updates), url)


def stored() -> dict[str, bytes]:
    return {path: bytes(file.getvalue()) for path, file in MemoryFileSystem.store.items()}


def test_what_a_url_is():
    assert all(map(is_url, ["s3://bucket/run", "memory://run", "https://host/a b", Path("memory://run")]))
    assert not any(map(is_url, ["runs/book", "/tmp/s3:/x", "C:/runs/book", "C:\\runs", "stories", "a:b"]))
    assert whole_url(Path("S3://bucket/run/")) == "s3://bucket/run"


def test_a_run_is_trained_to_a_url_and_opens_from_there(tmp_path, capsys):
    run = trained(tmp_path, "memory://bucket/book")
    said = capsys.readouterr().err
    assert f"trained in {run.path}, copied to memory://bucket/book after every save" in said
    assert "glissando generate memory://bucket/book" in said
    model, actual = glissando.load("memory://bucket/book"), glissando.load(run.path)
    ids = torch.arange(97, 120).unsqueeze(0)
    assert torch.equal(model(ids)[0], actual(ids)[0])
    for name in ("manifest.json", "metrics.csv", "summary.json", "samples.txt", "environment.json"):
        if (run.path / name).is_file() and name != "manifest.json":
            assert stored()[f"/bucket/book/{name}"] == (run.path / name).read_bytes(), name
    checkpoint = "memory://bucket/book/checkpoints/step-00000002"
    assert_same_tensors(
        dict(glissando.load(checkpoint).state_dict()),
        dict(glissando.load(run.path / "checkpoints" / "step-00000002").state_dict()),
    )
    assert main(["generate", "memory://bucket/book", "--prompt=ab", "--max_tokens=3"]) == 0
    assert main(["evaluate", "memory://bucket/book"]) == 0


def test_a_job_goes_on_from_a_url_on_a_machine_that_never_had_the_run(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "job", lambda: "seven")
    with monkeypatch.context() as patched:
        crash_in(patched, 4, RuntimeError("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            train(configuration(tmp_path, PLAIN, STEPS), "memory://book")
    shutil.rmtree(work_directory("memory://book"))
    assert_same_tensors(weights(train(configuration(tmp_path, PLAIN, STEPS), "memory://book")), weights(whole))
    shutil.rmtree(work_directory("memory://book"))
    monkeypatch.setattr(launch, "job", lambda: "eight")
    with pytest.raises(RunError, match="nothing is overwritten"):
        train(configuration(tmp_path, PLAIN, STEPS), "memory://book")


def test_a_copy_is_read_once_until_the_run_changes(whole, monkeypatch):
    Mirror("memory://book", whole.path).push()
    first = fetched("memory://book")
    with monkeypatch.context() as patched:
        patched.setattr(remote, "_download", lambda *_: pytest.fail("fetched again"))
        assert fetched("memory://book/") == first
    fsspec.filesystem("memory").pipe_file("/book/summary.json", b"{}")
    assert fetched("memory://book") == first  # what nobody published
    MemoryFileSystem.store.clear()
    with pytest.raises(RunError, match=r"no run at memory://book: it has no manifest\.json"):
        fetched("memory://book")


def test_a_reader_sees_a_whole_run_at_every_moment_of_writing(tmp_path, monkeypatch):
    """After every single write the URL opens as the old or as the new run, or is not there yet."""
    seen: list[float | None] = []
    known = {}

    def look() -> None:
        try:
            result = weights(fetched("memory://book"))
        except RunError as error:
            assert "no run at memory://book" in str(error)
            seen.append(None)
        else:
            seen.append(float(result["embedding.weight"].abs().sum()))

    original = remote.Place._write

    def write(self, name, source):
        original(self, name, source)
        look()

    monkeypatch.setattr(remote.Place, "_write", write)
    trained(tmp_path, "memory://book")
    for step in (2, 4):
        path = work_directory("memory://book") / "checkpoints" / f"step-{step:08d}"
        known[step] = float(weights_of(path)["embedding.weight"].abs().sum())
    assert seen[0] is None
    first = seen.index(known[2])
    assert set(seen[:first]) == {None}
    assert set(seen[first:]) == {known[2], known[4]}
    assert seen[-1] == known[4]


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return Run.open(checkpoint).read_state_dict()


def test_a_copy_cut_short_anywhere_is_finished_by_the_next(tmp_path, monkeypatch):
    """Each write of the last copy fails in turn: a reader finds the one before, and the next copy makes up for it."""
    interrupted(tmp_path, monkeypatch, "memory://book")
    before, original = dict(MemoryFileSystem.store), remote.Place._write
    longer = resume("memory://book").path
    for failing in range(1, 40):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(before)
        count = iter(range(1, 1000))

        def write(self, name, source, count=count, failing=failing):
            if next(count) == failing:
                raise OSError("no route to host")
            original(self, name, source)

        mirror = Mirror("memory://book", longer)
        with monkeypatch.context() as patched:
            patched.setattr(remote.Place, "_write", write)
            try:
                mirror.push()
            except RunError as error:
                assert "no route to host" in str(error)
                assert f"All of it is in {longer}" in str(error)
            else:
                break
        fetched("memory://book")
        (mirror if failing % 2 else Mirror("memory://book", longer)).push()
        assert_same_tensors(weights(fetched("memory://book")), weights(longer))
    assert failing > 5  # all writes of a copy had their turn


def test_nothing_is_overwritten(tmp_path):
    fsspec.filesystem("memory").pipe_file("/book/notes.txt", b"mine")
    with pytest.raises(RunError, match=r"memory://book exists and is not empty.*nothing is overwritten"):
        trained(tmp_path, "memory://book")
    assert stored() == {"/book/notes.txt": b"mine"}
    with pytest.raises(RunError, match="is a URL, which only `glissando train` can write to"):
        glissando.LanguageModel.from_preset("minimal-transformer-nano").save("memory://model")


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with monkeypatch.context() as patched:
        crash_in(patched, 4, RuntimeError("power cut"))
        with pytest.raises(RuntimeError, match="power cut"):
            trained(folder, url)


@pytest.mark.parametrize("machine", ["the same", pytest.param("another", marks=pytest.mark.slow)])
def test_a_run_at_a_url_goes_on_to_the_same_weights(whole, tmp_path, monkeypatch, cache, machine):
    interrupted(tmp_path, monkeypatch, "memory://book")
    assert last_checkpoint(fetched_checkpoints("memory://book")).step == 2
    if machine == "another":
        shutil.rmtree(cache)
    run = resume("memory://book")
    assert_same_tensors(weights(run), weights(whole))
    assert_same_tensors(weights(fetched("memory://book")), weights(whole))
    assert (run.path / "metrics.csv").read_text().count("\n") == (whole.path / "metrics.csv").read_text().count("\n")


def fetched_checkpoints(url: str) -> Path:
    return remote.take_up(url)


def test_what_was_trained_further_elsewhere_is_taken_up_and_ours_put_aside(tmp_path, monkeypatch, cache, capsys):
    interrupted(tmp_path, monkeypatch, "memory://book")
    shutil.copytree(cache, tmp_path / "kept")
    resume("memory://book")
    shutil.rmtree(cache)
    shutil.copytree(tmp_path / "kept", cache)
    work = remote.take_up("memory://book")
    assert last_checkpoint(work).step == 4
    assert last_checkpoint(work.with_name(f"{work.name}.1")).step == 2
    assert "is older than memory://book" in capsys.readouterr().err


def test_another_run_under_the_same_url_is_not_written_over(tmp_path, cache, monkeypatch):
    """Also where both were begun within one second, by the same command."""
    monkeypatch.setattr(runs, "environment", lambda: machine.environment() | {"date": "2026-01-01T00:00:00+00:00"})
    trained(tmp_path, "memory://book")
    shutil.move(cache, tmp_path / "ours")
    empty()
    trained(tmp_path, "memory://book", {"training": {"steps": 2, "seed": 5}})
    expected = weights(fetched("memory://book"))
    shutil.rmtree(cache)
    shutil.move(tmp_path / "ours", cache)
    resume("memory://book")
    assert_same_tensors(weights(fetched("memory://book")), expected)


def test_a_copy_that_fails_ends_no_training_and_the_end_says_where_the_run_is(tmp_path, monkeypatch, capsys):
    def refuse(self, name, source):
        raise PermissionError("access denied")

    with monkeypatch.context() as patched:
        patched.setattr(remote.Place, "_write", refuse)
        with pytest.raises(RunError, match=r"not copied to memory://book: .*access denied.*--resume memory://book"):
            trained(tmp_path, "memory://book")
    assert "Training continues; the next save tries again" in capsys.readouterr().err
    assert last_checkpoint(work_directory("memory://book")).step == 4
    resume("memory://book")
    assert_same_tensors(weights(fetched("memory://book")), weights(work_directory("memory://book")))


def test_what_is_damaged_or_wrong_is_said(whole):
    Mirror("memory://book", whole.path).push()
    files = fsspec.filesystem("memory")
    *before, last = files.cat_file("/book/model.safetensors")
    files.pipe_file("/book/model.safetensors", bytes([*before, last ^ 1]))
    with pytest.raises(RunError, match=r"model\.safetensors is damaged.*Fetched from memory://book"):
        glissando.load("memory://book")
    manifest = json.loads(files.cat_file("/book/manifest.json"))
    outside = manifest_text(manifest["files"] | {"../../escaped": {"sha256": "0" * 64, "size": 0}})
    files.pipe_file("/book/manifest.json", outside)
    with pytest.raises(RunError, match="lies outside the run"):
        glissando.load("memory://book")
    with pytest.raises(RunError, match="no storage is known by the protocol of nosuch://x"):
        glissando.load("nosuch://x")


def test_a_missing_package_is_named(monkeypatch):
    def missing(url, **_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(RunError, match="s3://bucket/run needs a package that is not installed: Install s3fs"):
        glissando.load("s3://bucket/run")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_run_opens_over_http(whole):
    pytest.importorskip("aiohttp")
    with served(whole.path.parent) as url:
        assert_same_tensors(weights(fetched(f"{url}/whole")), weights(whole))
        with pytest.raises(RunError, match=r"no run at http.*nowhere"):
            glissando.load(f"{url}/nowhere")


def test_large_weights_come_from_a_server_without_range_requests(tmp_path):
    pytest.importorskip("aiohttp")
    size = 40 << 20
    (tmp_path / "large").write_bytes(bytes(size))
    with served(tmp_path) as url:
        assert sum(map(len, place(url).pieces("large", size))) == size


@pytest.mark.slow
def test_the_program_trains_to_a_url_of_files_with_two_processes(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/there/book"
    arguments = [f"--data.path={tmp_path}/words.txt", "--training.devices=2", "--training.steps=2"]
    configuration(tmp_path)  # which writes the text
    common = ["--data.kind=text", "--data.seq_len=16", "--data.batch_size=4", "--training.accelerator=cpu"]
    done = call(command("--preset=minimal-transformer-nano", *common, *arguments, f"--out={url}"))
    assert done.returncode == 0, done.stderr[-3000:]
    glissando.load(url)
    done = call(command(f"--resume={url}"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing is left to train" in done.stderr
