"""A run directory is hostile: attacks on whoever opens one, resumes it or fetches it. None of them may succeed."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
import yaml
from fsspec.implementations.memory import MemoryFileSystem
from training_runs import configuration, resume_series, text_file, train_series

import glissando
from glissando import imports, machine, remote, untrusted
from glissando.checkpoints import best_checkpoint
from glissando.cli import main
from glissando.errors import DataError, GlissandoError, RunError
from glissando.remote import fetched
from glissando.runs import Run
from glissando.series.evaluation import evaluate as evaluate_series
from glissando.storage import MANIFEST, manifest_text, read_manifest, write_manifest
from glissando.training.fit import resume, train
from glissando.training.mirroring import Mirror
from glissando.urls import redacted

SECRET = "my diary: nobody is to read this; the safe opens with 4711. "
LOGIN = "https://anna:s3cret-pass@host.example/run?X-Signature=abc123&token=s3cret-key"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four steps that keeps its best weights, with a record of its text."""
    folder = tmp_path_factory.mktemp("finished")
    options = {"steps": 4, "save_every": 2, "validate_every": 2, "early_stopping": 9, "sample_every": 1}
    return train(configuration(folder, {"training": options}), folder / "run").path


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def diary(tmp_path) -> Path:
    path = tmp_path / "home" / "diary.txt"
    path.parent.mkdir()
    path.write_text(SECRET * 60)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    def of_the_test(kind: str) -> Path:
        (tmp_path / "cache" / kind).mkdir(parents=True, exist_ok=True)
        return tmp_path / "cache" / kind

    monkeypatch.setattr(remote, "cache_dir", of_the_test)
    monkeypatch.setattr(imports, "_imported", {})
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def directories(run: Path) -> list[Path]:
    """The run and its checkpoints, each with a manifest of its own."""
    return [*(run / "checkpoints").iterdir(), run]


def forge(run: Path, change, environment: bool = True) -> None:
    """What an enemy does: another configuration everywhere, no record of texts, fresh digests."""
    for folder in directories(run):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        change(config)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        if not environment:
            made = json.loads((folder / "environment.json").read_text())
            made.pop("texts")
            (folder / "environment.json").write_text(json.dumps(made))
        names = read_manifest(folder)
        write_manifest(folder, names)


def upload(run: Path, url: str) -> None:
    Mirror(url, run).push()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(bytes(content))


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------------- code and other files of this machine


@pytest.mark.parametrize("name", ["diary.txt", "diary.py", "/proc/self/environ"])
def test_a_file_that_a_configuration_names_is_not_copied(run, diary, tmp_path, name):
    if not (stolen := diary.parent / name).exists():
        stolen.write_text(SECRET)
    forge(run, lambda config: config.update(imports=[str(stolen)]))
    assert main(["grow", str(run), "--layers", "1", "--out", str(tmp_path / "grown")]) == 1
    to = ["--to", "safetensors-int8", "--out", str(tmp_path / "exported")]
    assert main(["export", str(run), *to]) == 1
    with contextlib.suppress(GlissandoError):
        resume(run)
    for made in (run, tmp_path / "grown", tmp_path / "exported"):
        assert SECRET.encode() not in everything(made)
        assert not list(made.glob("imports/*"))


def test_the_copies_of_a_run_and_the_users_own_files_go_along(run, tmp_path):
    code = b"VALUE = 1\n"
    (run / "imports").mkdir()
    (run / "imports" / "mine.py").write_bytes(code)
    forge(run, lambda config: config.update(imports=["/elsewhere/mine.py"]))
    write_manifest(run, [*read_manifest(run), "imports/mine.py"])
    assert main(["grow", str(run), "--layers", "1", "--out", str(tmp_path / "grown")]) == 0
    assert (tmp_path / "grown/imports/mine.py").read_bytes() == code
    (run / "imports" / "mine.py").write_bytes(code + b"# changed\n")
    assert main(["grow", str(run), "--layers", "1", "--out", str(tmp_path / "damaged")]) == 1
    shutil.rmtree(run / "imports")
    write_manifest(run, [name for name in read_manifest(run) if "imports" not in name])
    (tmp_path / "mine.py").write_bytes(code)
    arguments = ["--import", str(tmp_path / "mine.py"), "--layers", "1", "--out", str(tmp_path / "again")]
    assert main(["grow", str(run), *arguments]) == 0
    assert (tmp_path / "again/imports/mine.py").read_bytes() == code


def test_trusted_imports_execute_the_runs_copies_alone(run, tmp_path):
    ran = tmp_path / "ran"
    script = tmp_path / "script.py"
    script.write_text(f"open({str(ran)!r}, 'w')\n")

    def change(config):
        config["imports"] = [str(script)]
        config["model"]["mixer"] = {"kind": "of_my_own"}

    forge(run, change)
    with pytest.raises(RunError, match=r"the copy .*script.py is not there"):
        glissando.load(run, trust_imports=True)
    assert not ran.exists()


@pytest.mark.parametrize("wrong", [[5], "a.py", [None], ["a\0.py"], [["x.py"]]])
def test_imports_that_are_no_paths_of_python_files_are_an_error(run, wrong):
    with pytest.raises(RunError, match="must be a list of Python files"):
        untrusted.imported_names({"imports": wrong})


@pytest.mark.parametrize("name", ["samples.txt", "metrics.csv", "pictures", "checkpoints/step-00000009", "notes"])
def test_a_link_out_of_a_run_is_neither_followed_nor_written_through(run, diary, name):
    path, before = run / name, diary.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(diary.parent if "." not in name else diary)
    with pytest.raises(RunError, match="is a link that leads out of the run"):
        resume(run)
    if name != "metrics.csv":  # whose digest is listed
        with pytest.raises(RunError, match="is a link that leads out of the run"):
            glissando.load(run)
    assert diary.read_bytes() == before


def test_files_with_digests_may_lie_elsewhere(run, tmp_path):
    """As in caches of downloads, whose folders are made of links."""
    shutil.move(run / "model.safetensors", tmp_path / "blob")
    (run / "model.safetensors").symlink_to(tmp_path / "blob")
    assert glissando.load(run).num_parameters() > 0


# ---------------------------------------------------------------------- texts of this machine


def steal(config: dict, path: Path) -> None:
    config["data"].update(path=str(path), valid_path=str(path))
    config["training"]["steps"] = 9


def test_a_run_at_a_url_trains_on_no_file_that_it_names(run, diary, capsys):
    forge(run, lambda config: steal(config, diary), environment=False)
    (run / "model.safetensors").unlink()
    write_manifest(run, ["config.yaml", "environment.json", "tokenizer.json"])
    upload(run, "memory://evil")
    with pytest.raises(RunError, match=r"no digest of it.*--data\.path FILE"):
        resume("memory://evil")
    with pytest.raises(RunError, match=r"no digest of it.*--data\.valid_path FILE"):
        resume("memory://evil", texts={"data.path": str(diary)})
    assert SECRET[:20].encode() not in b"".join(bytes(f.getvalue()) for f in MemoryFileSystem.store.values())
    resume("memory://evil", texts={"data.path": str(diary), "data.valid_path": str(diary)})
    assert Run.open(fetched("memory://evil")).read_config()["data"]["path"] == str(diary)


def test_nor_with_the_digest_of_another_file(run, diary):
    forge(run, lambda config: config["data"].update(path=str(diary)))
    with pytest.raises(RunError, match="is not the text that"):
        resume(run)


def test_no_other_command_reads_a_text_that_a_run_names(run, diary, tmp_path, capsys):
    forge(run, lambda config: config["data"].update(path=str(diary)), environment=False)
    out = ["--out", str(tmp_path / "out")]
    attacks = {
        "evaluate": [],
        "train": ["--training.steps", "1", *out],
    }
    for command, options in attacks.items():
        arguments = ["--from", str(run)] if command == "train" else [str(run)]
        capsys.readouterr()
        assert main([command, *arguments, *options]) == 1, command
        assert "no digest of it" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert main(["evaluate", str(run), "--data.path", str(text_file(tmp_path))]) == 0


@pytest.mark.parametrize("kind", ["hub", "hub_stream"])
def test_a_data_set_by_name_is_no_folder_of_this_machine(run, diary, kind):
    def change(config):
        config["data"] = {"kind": kind, "name": str(diary.parent), "tokenizer": {"kind": "bytes"}}

    forge(run, change, environment=False)
    with pytest.raises(RunError, match="no digest of it"):
        resume(run)


# ---------------------------------------------------------------------- damage is not signed


def test_damage_to_the_best_checkpoint_does_not_become_the_runs_own_weights(run):
    (run / MANIFEST).unlink()
    (run / "model.safetensors").unlink()  # as if it had been killed at its end
    best = best_checkpoint(run)
    flip(best / "model.safetensors")
    with pytest.raises(RunError, match=rf"{best.name}/model.safetensors is damaged: .*This checkpoint is intact"):
        resume(run)
    assert not (run / "model.safetensors").exists()


def test_damage_is_not_copied_to_a_url(run):
    flip(run / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged.*not copied"):
        upload(run, "memory://book")
    assert not {"/book/manifest.json", "/book/model.safetensors"} & MemoryFileSystem.store.keys()


# ---------------------------------------------------------------------- passwords


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOGIN, "https://***@host.example/run?***"),
        ("s3:/key:sec/ret@host/a", "s3:/***@host/a"),
        ("at 'https://token@host/a', too", "at 'https://***@host/a', too"),
        ("https://host:8080/pkg@1.0/a", "https://host:8080/pkg@1.0/a"),
        ("https://host/what? yes, a=b", "https://host/what? yes, a=b"),
        ("anna@host and /a/b@c", "anna@host and /a/b@c"),
    ],
)
def test_what_is_shown_of_a_url(text, expected):
    assert redacted(text) == expected
    assert redacted(expected) == expected


def test_passwords_are_in_no_error_file_or_line(run, tmp_path, monkeypatch, capsys):
    class Refusing(MemoryFileSystem):
        protocol = "refusing"

        def open(self, *_: object, **__: object) -> None:
            raise PermissionError(f"401 for {LOGIN}")

        ls = info = isfile = open

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    url = LOGIN.replace("https", "refusing")
    shown = []
    for attempt in (lambda: glissando.load(url), lambda: resume(url), lambda: Run.open(LOGIN.replace("https", "no"))):
        with pytest.raises(RunError) as result:
            attempt()
        shown += traceback.format_exception(result.value)
    assert main(["generate", url]) == 1
    Mirror(LOGIN.replace("https", "memory"), run).push()
    monkeypatch.setattr("sys.argv", ["glissando", "train", f"--from={LOGIN}", "--out", LOGIN])
    made = Run.create(tmp_path / "made")
    made.write_config({"start_from": LOGIN, "stages": [{"data": {"path": LOGIN}}]})
    printed = capsys.readouterr()
    for text in (*shown, printed.out, printed.err, everything(made.path).decode(), json.dumps(machine.environment())):
        assert "s3cret" not in text
    assert "https://***@host.example/run?***" in everything(made.path).decode()
    with pytest.raises(RunError, match="without its password: give the whole URL again"):
        glissando.load("https://***@host.example/run")
    assert not any("s3cret" in path.name or "anna" in path.name for path in (tmp_path / "cache").rglob("*"))


# ---------------------------------------------------------------------- hostile storages


@contextlib.contextmanager
def served(answers: dict[str, object]) -> Iterator[tuple[str, list[int]]]:
    """A server; an answer is bytes, or a function that writes to the connection. And the bytes that were taken."""
    taken = [0]

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            answer = answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            with contextlib.suppress(OSError):
                if isinstance(answer, bytes):
                    self.wfile.write(answer)
                elif answer is not None:
                    answer(self, taken)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", taken
        finally:
            server.shutdown()


def endless(handler: BaseHTTPRequestHandler, taken: list[int]) -> None:
    for _ in range(3000):  # 3 GB
        handler.wfile.write(bytes(1 << 20))
        taken[0] += 1 << 20


def test_no_more_is_fetched_than_the_manifest_says_and_a_manifest_is_bounded(tmp_path):
    pytest.importorskip("aiohttp")
    manifest = manifest_text({name: {"sha256": "0" * 64, "size": 900} for name in ("config.yaml", "model.safetensors")})
    with served({"/a/manifest.json": manifest, "/a/config.yaml": endless}) as (url, taken):
        with pytest.raises(RunError, match=r"config\.yaml: it has more bytes than the .* that it may"):
            fetched(f"{url}/a")
        assert taken[0] < 100 << 20
    with served({"/b/manifest.json": endless}) as (url, taken):
        with pytest.raises(RunError, match=r"manifest\.json: it has more bytes than the .* that it may"):
            fetched(f"{url}/b")
        assert taken[0] < 100 << 20
    with served({"/c/latest": endless}) as (url, taken):
        with pytest.raises(RunError, match=r"latest: it has more bytes than the .* that it may"):
            resume(f"{url}/c")
        assert taken[0] < 100 << 20
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 10_000


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("config.yaml", {"size": 3 << 30}, "at most 268,435,456 are fetched"),
        ("model.safetensors", {"size": 1 << 60}, "bytes left|left"),
        ("model.safetensors", {"size": -1}, "no size of model"),
        ("model.safetensors", {"size": "9"}, "no size of model"),
        ("../diary.txt", {"size": 9}, "lies outside the run"),
        ("/etc/passwd", {"size": 9}, "lies outside the run"),
        ("a\\..\\..\\b", {"size": 9}, "lies outside the run"),
        ("C:x", {"size": 9}, "lies outside the run"),
        ("a\0b", {"size": 9}, "lies outside the run"),
    ],
)
def test_a_manifest_that_asks_for_too_much_is_refused_before_anything_is_fetched(name, record, message, monkeypatch):
    files = fsspec.filesystem("memory")
    files.pipe_file("/run/manifest.json", manifest_text({name: {"sha256": "0" * 64, **record}}))
    read = remote.Place.pieces
    asked = []
    monkeypatch.setattr(remote.Place, "pieces", lambda *given: (asked.append(given[1]), read(*given))[1])
    with pytest.raises(RunError, match=message):
        fetched("memory://run")
    assert set(asked) == {"manifest.json", "latest"}


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_storage_that_hangs_in_the_middle_is_given_up(monkeypatch, pieces):
    """Also one that sends a byte now and then: aiohttp gives a request five minutes."""
    client = pytest.importorskip("aiohttp").client
    assert client.DEFAULT_TIMEOUT.total <= 300
    monkeypatch.setattr(client, "DEFAULT_TIMEOUT", client.ClientTimeout(total=0.3))
    fsspec.get_filesystem_class("http").clear_instance_cache()
    over = threading.Event()

    def hang(handler: BaseHTTPRequestHandler, _: object) -> None:
        handler.wfile.write(b"{")
        while not over.wait(0.01 if pieces else 30):
            handler.wfile.write(b" ")

    with served({"/run/manifest.json": hang}) as (url, _):
        with pytest.raises(RunError, match=r"could not read .*manifest\.json: FSTimeoutError"):
            fetched(f"{url}/run")
        over.set()
    fsspec.get_filesystem_class("http").clear_instance_cache()


@pytest.mark.slow
def test_a_series_run_reads_no_other_table_and_signs_no_damage(tmp_path, diary):
    table = tmp_path / "table.csv"
    table.write_text("t,a\n" + "".join(f"{i},{(i * 7) % 11}\n" for i in range(200)))
    path = tmp_path / "series"
    values = {"data": {"path": str(table), "time": "t", "window": 16}, "training": {"steps": 4}}
    train_series(values, path)
    best = best_checkpoint(path)
    flip(best / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged: .*This checkpoint is intact"):
        resume_series(path)
    flip(best / "model.safetensors")
    resume_series(path)
    forge(path, lambda config: config["data"].update(path=str(diary)), environment=False)
    for attack in (resume_series, evaluate_series):
        with pytest.raises((RunError, DataError), match="no digest of it"):
            attack(path)
