"""Files of graphs: whole or refused, never overwritten; and the verb that builds and shows them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graphs import draw, weighted
from safetensors.torch import load_file, save_file
from tolerances import assert_close

from glissando.cli import main
from glissando.errors import ConfigError, RunError
from glissando.mixers.tau.laplacian import chain, edges_of, from_embeddings, load, normalise, project, save

# ---------------------------------------------------------------------- what is saved


def test_a_file_is_never_overwritten_and_keeps_its_keys(tmp_path):
    path = tmp_path / "graph.safetensors"
    save(path, chain(4), {"source": "chain"})
    before = path.read_bytes()
    with pytest.raises(RunError, match="nothing is overwritten"):
        save(path, chain(5), {})
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="size in `about`"):
        save(tmp_path / "other.safetensors", chain(4), {"size": "5"})


def test_every_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "graph.safetensors"
    save(path, weighted(4), {"source": "test"})
    good = path.read_bytes()
    for position in range(0, len(good), 3):
        damaged = bytearray(good)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            load(path)
        except (RunError, ConfigError) as error:
            assert path.name in str(error)
        else:
            pytest.fail(f"byte {position} of {len(good)} may change unseen")


def test_other_files_are_refused_with_the_fix(tmp_path):
    path = tmp_path / "graph.safetensors"
    with pytest.raises(RunError, match=r"there is no file .* build one"):
        load(path)
    path.write_bytes(b"short")
    with pytest.raises(RunError, match=r"truncated or no safetensors.*Build it again"):
        load(path)
    save_file({"x": torch.ones(3)}, path)
    with pytest.raises(RunError, match="holds no Laplacian: its format is None"):
        load(path)


def test_rounding_that_is_allowed_is_no_edge(tmp_path):
    """1e-10 where there is no edge, as a product of matrices leaves it, is saved and loaded as nothing."""
    noisy = chain(5)
    noisy[0, 3] = noisy[3, 0] = 1e-10
    save(tmp_path / "g.safetensors", noisy, {})
    assert torch.equal(load(tmp_path / "g.safetensors")[0], chain(5))
    assert torch.equal(edges_of(noisy)[0], edges_of(chain(5))[0])


def test_a_saved_file_is_plain_safetensors(tmp_path):
    save(tmp_path / "g.safetensors", chain(3), {})
    tensors = load_file(tmp_path / "g.safetensors")
    assert tensors["edges"].tolist() == [[0, 1], [1, 2]]
    assert tensors["weights"].tolist() == [1.0, 1.0]


# ---------------------------------------------------------------------- the verb


def build(*arguments: object) -> int:
    return main(["laplacian", "build", *map(str, arguments)])


def test_show(tmp_path, capsys):
    out = tmp_path / "chain.safetensors"
    save(out, chain(6), {"source": "a test"})
    assert main(["laplacian", "show", str(out)]) == 0
    shown = dict(line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines())
    shown = {name.strip(): value.strip() for name, value in shown.items()}
    assert shown["size"] == "6"
    assert shown["degrees"] == "1 to 2, mean 1.667"
    assert shown["algebraic connectivity"] == "0.2679"
    assert shown["source"] == "a test"


def test_build_from_embeddings(tmp_path, capsys):
    vectors = draw(40, 24)
    np.save(tmp_path / "v.npy", vectors.float().numpy())
    save_file({"v": vectors, "w": -vectors}, tmp_path / "v.safetensors")
    expected = normalise(project(from_embeddings(vectors.float(), 5), 8))
    common = ("--size", 8, "--neighbors", 5, "--out")
    assert build("--embeddings", tmp_path / "v.npy", *common, tmp_path / "a.safetensors") == 0
    laplacian, about = load(tmp_path / "a.safetensors")
    assert torch.equal(laplacian, expected)
    assert about == {"source": "embeddings v.npy", "features": "24", "neighbors": "5"}
    assert build("--embeddings", tmp_path / "v.safetensors", *common, tmp_path / "b.safetensors") == 2
    assert "holds 2 tensors, v, w; save the vectors alone" in capsys.readouterr().err
    save_file({"w": -vectors}, tmp_path / "w.safetensors")
    assert build("--embeddings", tmp_path / "w.safetensors", *common, tmp_path / "b.safetensors") == 0
    assert_close(load(tmp_path / "b.safetensors")[0], expected, tolerance=1e-5)


def test_build_from_text(tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("The fox who had a plan went out to find the hen who had none.\n" * 60)
    assert build("--text", book, "--size", 12, "--tokens", 2000, "--out", tmp_path / "t.safetensors") == 0
    assert "source text book.txt, tokenizer bytes, tokens 2000" in capsys.readouterr().out
    assert len(load(tmp_path / "t.safetensors")[0]) == 12
    out = tmp_path / "s.safetensors"
    assert build("--corpus", "shift", "--tokens", 3000, "--vocabulary", 300, "--size", 32, "--out", out) == 0
    assert load(out)[1]["tokenizer"] == "300 BPE tokens"
    assert len(load(out)[0]) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--out", "x"], "exactly one source, got none; choose one of --embeddings"),
        (["build", "--corpus", "shift", "--text", "a", "--out", "x"], "got --corpus and --text"),
        (["build", "--corpus", "shift"], "--out is missing"),
        (["build", "--embeddings", "v.npy", "--tokens", "3", "--out", "x"], "build from --corpus, --text"),
        (["build", "y", "--corpus", "shift", "--out", "x"], "build takes no file"),
        (["build", "--corpus", "shift", "--out", "."], "nothing is overwritten"),
        (["build", "--corpus", "storys", "--out", "x"], "Did you mean 'stories'"),
        (["build", "--corpus", "jsonl", "--out", "x"], "is a file: give --text FILE"),
        (["build", "--corpus", "shift", "--tokens", "1", "--out", "x"], "--tokens must be at least 2"),
        (["build", "--corpus", "shift", "--tokens", "2000", "--size", "128", "--out", "x"], "larger vocabulary"),
        (["build", "--text", "nowhere", "--out", "x"], "cannot read --text nowhere"),
        (["build", "--embeddings", "nowhere.npy", "--out", "x"], "there is no such file"),
        (["build", "--embeddings", "bad.txt", "--out", "x"], "takes a .npy or .safetensors file"),
        (["build", "--embeddings", "bad.npy", "--out", "x"], "truncated or no .npy file"),
        (["build", "--embeddings", "words.npy", "--out", "x"], "no array of real numbers"),
        (["build", "--embeddings", "bad.safetensors", "--out", "x"], "truncated or no safetensors file"),
        (["build", "--corpsu", "shift", "--out", "x"], "Did you mean --corpus"),
        (["shw"], "Did you mean 'show'"),
        (["show"], "show needs a file"),
        (["show", "bad.safetensors"], "Build it again"),
        (["show", "bad.npy", "--size", "3"], "show takes a file alone; leave out --size"),
    ],
)
def test_mistakes_get_one_clear_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("bad.txt", "bad.npy", "bad.safetensors"):
        (tmp_path / name).write_bytes(b"\x93NUMPY and no more")
    np.save("words.npy", np.array(["a", "b"]))
    assert main(["laplacian", *arguments]) == (1 if message in ("Build it again", "nothing is overwritten") else 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()
