"""Files survive full disks, crashes and damage; tensors come back exactly."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glissando import storage
from glissando.errors import RunError
from glissando.storage import (
    MANIFEST,
    load_tensors,
    publishing,
    read_json,
    save_tensors,
    verify_manifest,
    write_atomic,
    write_manifest,
)


def test_shared_and_strided_tensors_come_back_on_their_own(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "base": base,
        "same": base,
        "part": base[1:],
        "turned": base.T,
        "parameter": torch.nn.Parameter(base),
    }
    save_tensors(tmp_path / "t.safetensors", tree)
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert torch.equal(loaded["turned"], base.T)
    assert torch.equal(loaded["part"], base[1:])
    loaded["base"].zero_()
    assert torch.equal(loaded["same"], base)


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        (torch.zeros(2).to_sparse(), "'a'.*sparse"),
        (torch.zeros(2, dtype=torch.complex128), "'a'.*complex128"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused_by_name(tmp_path, tensor, where):
    with pytest.raises(TypeError, match=where):
        save_tensors(tmp_path / "t.safetensors", {"a": tensor})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomic(path, b"old")

    def disk_full(self, data):
        with self.open("wb") as file:
            file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(RunError, match=r"a\.txt: No space left.*The old a\.txt is kept"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


LIMITED = """
import resource, sys, torch
from pathlib import Path
from typing import Any
from glissando.errors import RunError
from glissando.storage import publishing, save_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with publishing(sys.argv[1]) as directory:
        save_tensors(directory / "t.safetensors", {"a": torch.zeros(100_000)})
except RunError as error:
    print(error)
    sys.exit(7)
"""


@pytest.mark.slow
def test_a_real_limit_leaves_the_old_directory(tmp_path):
    target = tmp_path / "step"
    with publishing(target) as directory:
        save_tensors(directory / "t.safetensors", {"a": torch.ones(3)})
    done = subprocess.run([sys.executable, "-c", LIMITED, str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "t.safetensors" in done.stdout
    assert "File too large" in done.stdout
    verify_manifest(target)
    assert torch.equal(load_tensors(target / "t.safetensors")["a"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_fill_leaves_the_old_directory(tmp_path):
    with publishing(tmp_path / "d") as directory:
        write_atomic(directory / "a", b"old")
    with pytest.raises(RunError, match=r"d: No space left.*old d is kept"), publishing(tmp_path / "d") as directory:  # noqa: PT012
        write_atomic(directory / "a", b"new")
        raise OSError(errno.ENOSPC, "full")
    verify_manifest(tmp_path / "d")
    assert (tmp_path / "d" / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["d"]


def test_publishing_replaces_the_whole_directory(tmp_path):
    for name in ("a", "b"):
        with publishing(tmp_path / "d") as directory:
            write_atomic(directory / name, b"x")
    assert sorted(os.listdir(tmp_path / "d")) == ["b", MANIFEST]
    assert os.listdir(tmp_path) == ["d"]


def test_a_rename_that_fails_puts_the_old_directory_back(tmp_path, monkeypatch):
    with publishing(tmp_path / "d") as directory:
        write_atomic(directory / "a", b"old")
    rename = os.rename

    def fail(source, destination):
        if ".tmp-" in Path(source).name:
            raise OSError(errno.EIO, "broken")
        rename(source, destination)

    monkeypatch.setattr(storage.os, "rename", fail)
    with pytest.raises(RunError, match="old d is kept"), publishing(tmp_path / "d") as directory:
        write_atomic(directory / "a", b"new")
    assert (tmp_path / "d" / "a").read_bytes() == b"old"


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_only_the_leftovers_of_dead_processes_are_swept(tmp_path):
    host, dead = storage._HOST, dead_pid()
    gone = [f".x.tmp-{host}-{dead}-0", f".x.old-{host}-{dead}-1", f".x.tmp-{host}-{os.getpid()}-99999"]
    kept = [f".x.tmp-{host}-{os.getppid()}-0", f".x.tmp-00000000-{dead}-0", ".x.tmp", "x.tmp-1"]
    write_atomic(tmp_path / "x", b"1")
    for name in gone + kept:
        (tmp_path / name).mkdir()
    write_atomic(tmp_path / "x", b"2")
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "x"])


def manifested(directory):
    directory.mkdir()
    (directory / "a.bin").write_bytes(b"12345678")
    (directory / "b.bin").write_bytes(b"b")
    write_manifest(directory)
    verify_manifest(directory)
    return directory


def flip(path, position=0):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / "a.bin"), r"a\.bin is damaged: expected 8 bytes .*found 8 bytes"),
        (lambda d: os.truncate(d / "a.bin", 5), r"a\.bin is damaged: expected 8 bytes .*found 5 bytes"),
        (lambda d: (d / "a.bin").unlink(), r"a\.bin is missing"),
        (lambda d: (d / "c.bin").touch(), r"c\.bin is not listed"),
        (lambda d: (d / MANIFEST).unlink(), r"manifest\.json is missing"),
        (lambda d: os.truncate(d / MANIFEST, 20), r"manifest\.json is malformed"),
        (lambda d: (d / MANIFEST).write_text("[]"), r"manifest\.json is malformed"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    directory = manifested(tmp_path / "d")
    damage(directory)
    with pytest.raises(RunError, match=message):
        verify_manifest(directory)


def test_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    with publishing(tmp_path / "d") as directory:
        save_tensors(directory / "t.safetensors", {"a": torch.ones(4)})
    for path in sorted((tmp_path / "d").iterdir()):
        content = path.read_bytes()
        for position in range(0, len(content), 13):
            flip(path, position)
            with pytest.raises(RunError, match=rf"{path.name} is (damaged|malformed)"):
                verify_manifest(tmp_path / "d")
            path.write_bytes(content)
    verify_manifest(tmp_path / "d")


def test_a_pickle_never_runs(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    for protocol in range(6):
        (tmp_path / "m.safetensors").write_bytes(pickle.dumps(Bomb(), protocol=protocol))
        with pytest.raises(RunError, match=r"m\.safetensors"):
            load_tensors(tmp_path / "m.safetensors")
    assert not (tmp_path / "boom").exists()


def test_a_header_that_begins_like_a_pickle_is_read(tmp_path):
    path = tmp_path / "t.safetensors"
    lengths = set()
    for padding in range(400, 800, 8):
        save_tensors(path, {"a": torch.ones(1)}, {"padding": "x" * padding})
        lengths.add(path.read_bytes()[:2])
        assert load_tensors(path)["a"].item() == 1
    assert b"\x80\x02" in lengths


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    save_tensors(path, {"a": torch.ones(9)})
    for size in (75, 30, 8, 7, 1, 0):
        os.truncate(path, size)
        with pytest.raises(RunError, match=r"t\.safetensors is truncated or malformed"):
            load_tensors(path)


@pytest.mark.parametrize("structure", ["{", "[]", "[" * 5000, "\xff"])
def test_a_malformed_object_is_refused(tmp_path, structure):
    (tmp_path / "a.json").write_bytes(structure.encode("latin-1"))
    with pytest.raises(RunError, match=r"a\.json is malformed"):
        read_json(tmp_path / "a.json", "it is needed")


def test_files_carry_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        save_tensors(tmp_path / "t.safetensors", {"a": torch.ones(1)})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_a_kept_folder_that_is_whole_needs_no_place_to_write(tmp_path, monkeypatch):
    def fill(folder):
        (folder / "ids").write_bytes(b"1")

    storage.kept(tmp_path / "a", fill)
    (tmp_path / ".a.lock").unlink()

    whole = Path.open

    def refuse(path, mode="w", **more):
        if "w" in mode or "a" in mode:
            raise OSError(errno.EROFS, "Read-only file system")
        return whole(path, mode, **more)

    monkeypatch.setattr(Path, "open", refuse)
    assert storage.kept(tmp_path / "a", fill) == tmp_path / "a"
    with pytest.raises(RunError, match=r"cannot write .*\.b\.lock \(Read-only file system\)"):
        storage.kept(tmp_path / "b", fill)
