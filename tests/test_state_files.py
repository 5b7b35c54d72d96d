"""A text that is saved and taken up again is, to the bit, the text that never stopped."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch
from slow import slow_where
from subjects import CASES, KINDS, build

import glissando
from glissando.cli import main
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import ConfigError, InputError, RunError
from glissando.generation import Continuation, Sampling, Stream
from glissando.model import LanguageModel
from glissando.state import leaves


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(1)
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(3)
    return model


def continued(model: LanguageModel, first: list[int], count: int, **where) -> tuple[list[int], Continuation]:
    steps = Continuation(model, [first], count, Sampling(1.0, seed=7), **where)
    return [int(id) for (id,) in steps], steps


@pytest.mark.parametrize("case", slow_where(CASES.keys() - KINDS, CASES))
def test_a_resumed_text_is_the_uninterrupted_one(case, tmp_path):
    """Tokens, states and random numbers, of every preset, mixer and depth, every other one in float32."""
    model = build(case, (torch.float32, torch.float64)[list(CASES).index(case) % 2])
    expected, whole = continued(model, [1, 2, 3], 11)
    got, parts = continued(model, [1, 2, 3], 6)
    for number in range(2):
        glissando.save_state(model, parts.state, tmp_path / f"state-{number}")
        unread, generator = parts.unread.tolist(), torch.Generator()
        generator.set_state(parts.generators[0].get_state())
        state = glissando.load_state(model, tmp_path / f"state-{number}")
        more, parts = continued(model, unread, 2 + number, state=state, generators=[generator])
        got += more
    assert got == expected
    assert torch.equal(parts.generators[0].get_state(), whole.generators[0].get_state())
    for actual, reference in zip(leaves(parts.state), leaves(whole.state), strict=True):
        assert actual.dtype == reference.dtype
        assert torch.equal(actual, reference)


@pytest.mark.parametrize("at", [4, 6])
def test_text_is_cut_anywhere(model, at, tmp_path):
    """Also inside of a character, and of what may become a stop text."""
    options = {"temperature": 1.3, "seed": 5}
    options["stop"] = "".join(glissando.stream(model, "ab", max_tokens=at, **options))[-1] + "never"
    whole = "".join(glissando.stream(model, "ab", max_tokens=40, **options))
    first = glissando.stream(model, "ab", max_tokens=at, resumable=True, **options)
    text = "".join(first)
    glissando.save_state(model, first.state, tmp_path / "state")
    state = glissando.load_state(model, tmp_path / "state")
    assert text + "".join(glissando.stream(model, max_tokens=40 - at, state=state, **options)) == whole
    again = glissando.stream(model, max_tokens=40 - at, state=state, **options)
    assert text + "".join(again) == whole, "a state can be gone on from more than once"


def test_a_state_may_be_taken_while_text_streams(model):
    text = glissando.stream(model, "ab", max_tokens=30, temperature=1.0, resumable=True)
    begun = "".join(itertools.islice(text, 5))
    state = text.state
    rest = "".join(text)
    assert "".join(glissando.stream(model, max_tokens=200, temperature=1.0, state=state)).startswith(rest)
    assert begun


def test_a_prompt_is_read_behind_what_was_written(model):
    text = glissando.stream(model, "ab", max_tokens=5, temperature=0, resumable=True)
    list(text)
    written = [b for _ in (0,) for b in text._texts.rows[0].recent]
    going = glissando.stream(model, "more", max_tokens=8, temperature=0, state=text.state, resumable=True)
    list(going)
    ids = [0, *b"ab", *written, *b"more"]
    ids[0] = ByteTokenizer().eos_id
    steps = Continuation(model, [ids], 8, Sampling(0))
    assert going._texts.rows[0].recent[-8:] == [token for (token,) in steps]


def test_a_state_of_several_rows(model, tmp_path):
    _, state = model(torch.randint(256, (3, 9)), model.init_state(3))
    glissando.save_state(model, state, tmp_path / "state")
    again = glissando.load_state(model, tmp_path / "state")
    assert type(again) is type(state)
    assert all(torch.equal(*pair) for pair in zip(leaves(again), leaves(state), strict=True))


def test_a_trail_is_not_saved(model, tmp_path):
    """A file has what a state that is loaded has: no trail, and so not the bytes of one."""
    ids = torch.randint(256, (1, 9))
    for name, rewind in (("plain", 0), ("trail", 4)):
        _, state = model(ids, model.init_state(1, rewind=rewind))
        glissando.save_state(model, state, tmp_path / name)
    assert (tmp_path / "trail").stat().st_size == (tmp_path / "plain").stat().st_size
    again = glissando.load_state(model, tmp_path / "trail")
    assert again.trail is None
    assert all(map(torch.equal, leaves(again), leaves(state._replace(trail=None))))
    with pytest.raises(InputError, match="this state cannot go back"):
        model.rewind(again, 1)


def test_what_is_refused(model, tmp_path):
    path = tmp_path / "state"
    with pytest.raises(ConfigError, match="resumable=True"):
        _ = glissando.stream(model, "a").state
    with pytest.raises(ConfigError, match="has not begun"):
        _ = glissando.stream(model, "a", resumable=True).state
    glissando.save_state(model, model.init_state(1), path)
    with pytest.raises(RunError, match="nothing is overwritten"):
        glissando.save_state(model, model.init_state(1), path)
    other = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1})
    with pytest.raises(InputError, match=r"of another model: [\d,]+ parameters \(attention; discrete\), digest"):
        glissando.load_state(other, path)
    data = path.read_bytes()
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data.replace(b"complex", b"complax")):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="damaged"):
            glissando.load_state(model, path)
    model.save(tmp_path / "run")
    with pytest.raises(RunError, match="holds no state"):
        glissando.load_state(model, tmp_path / "run" / "model.safetensors")
    with pytest.raises(RunError, match="there is no file"):
        glissando.load_state(model, tmp_path / "nowhere")


def test_the_program_goes_on(model, tmp_path, capsys):
    run, state = str(tmp_path / "run"), str(tmp_path / "text.state")
    model.save(run)
    common = ["generate", run, "--temperature", "1.2"]
    assert main([*common, "--prompt", "The", "--seed", "4", "--max_tokens", "50"]) == 0
    whole = capsys.readouterr().out
    assert main([*common, "--prompt", "The", "--seed", "4", "--max_tokens", "20", "--save_state", state]) == 0
    got = capsys.readouterr().out.removesuffix("\n")
    assert main([*common, "--max_tokens", "10", "--load_state", state, "--save_state", state]) == 0
    got += capsys.readouterr().out.removesuffix("\n")
    assert main([*common, "--max_tokens", "20", "--load_state", state]) == 0
    assert got + capsys.readouterr().out == whole
    for wrong, status, message in (
        (["--save_state", state], 1, "only the file of --load_state may be overwritten"),
        (["--load_state", state, "--seed", "3"], 2, "--seed would do nothing"),
        (["--load_state", state, "--prompt", "a", "--prompt", "b"], 2, "--load_state needs one text"),
        (["--load_state", str(tmp_path / "run" / "model.safetensors")], 1, "holds no state"),
    ):
        assert main([*common, *wrong]) == status
        assert message in capsys.readouterr().err


def test_an_interrupted_text_keeps_its_state(model, tmp_path, capsys, monkeypatch):
    run, state, following = str(tmp_path / "run"), str(tmp_path / "text.state"), Stream.__next__
    model.save(run)
    left = [5]

    def interrupted(self):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return following(self)

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "__next__", interrupted)
        assert main(["generate", run, "--seed", "4", "--max_tokens", "1000000", "--save_state", state]) == 130
    got = capsys.readouterr().out.removesuffix("\n")
    assert main(["generate", run, "--max_tokens", "20", "--load_state", state]) == 0
    got += capsys.readouterr().out.removesuffix("\n")
    assert main(["generate", run, "--seed", "4", "--max_tokens", "60"]) == 0
    assert capsys.readouterr().out.startswith(got.rstrip("\ufffd"))


def test_a_missing_or_truncated_file_says_what_to_do(tmp_path):
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1})
    path = tmp_path / "state"
    with pytest.raises(RunError, match=r"there is no file .*state: name one"):
        glissando.load_state(model, path)
    glissando.save_state(model, model.init_state(1), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RunError, match="save the state again"):
        glissando.load_state(model, path)
