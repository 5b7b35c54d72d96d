"""An exported page in a real browser: its text is the library's, and it needs nothing but files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pytest
import torch
from test_export import run_command, saved

import glissando
from glissando.data.tokenizers import ByteTokenizer, HFTokenizer, NumberTokenizer, train_bpe
from glissando.errors import DataError
from glissando.export import Refused, web
from glissando.generation import generate
from glissando.model import LanguageModel
from glissando.storage import record

playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests drive a browser with playwright")
expect = playwright.expect
compute_driver_executable = pytest.importorskip("playwright._impl._driver").compute_driver_executable
needs_browser = pytest.mark.skipif(pages.BROWSER is None, reason=pages.NO_BROWSER)
PROMPTS = ("Once upon a time", "The fox", "A hen and an egg", "We saw", "Tim", "Red")


# ---------------------------------------------------------------------- the runtime


@pytest.fixture
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GLISSANDO_CACHE", str(tmp_path / "cache"))


def npm_that(does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program `npm` that does what the lines of Python say, and the only one on the path."""
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f"#!{sys.executable}\nimport pathlib, sys\nargs = sys.argv[1:]\n{does}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent))


@pytest.mark.usefixtures("no_cache")
def test_a_runtime_that_cannot_be_had_is_an_error_that_names_the_option(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DataError, match=r"npm is not installed; install it, or .* put its file there: .*\.tgz"):
        web.runtime_package()
    npm_that("sys.exit('npm error network getaddrinfo ENOTFOUND')", tmp_path, monkeypatch)
    with pytest.raises(
        DataError, match=r"npm could not fetch .* \(npm error network .*ENOTFOUND\); .*put its file there"
    ):
        web.runtime_package()
    assert not any((tmp_path / "cache" / web.PACKAGE).iterdir())


@pytest.mark.usefixtures("no_cache")
def test_a_package_is_known_by_its_digest_and_fetched_once(tmp_path, monkeypatch):
    pack = f"(pathlib.Path(args[args.index('--pack-destination') + 1]) / {web.FILE!r}).write_text('a package')"
    npm_that(pack, tmp_path, monkeypatch)
    with pytest.raises(DataError, match=r"has SHA-256 [0-9a-f]{64}, and not .*put its file there"):
        web.runtime_package()
    archive = tmp_path / "a.tgz"
    archive.write_text("a package")
    monkeypatch.setattr(web, "SHA256", record(archive)["sha256"])
    result = web.runtime_package()
    assert result.read_text() == "a package"
    os.remove(tmp_path / "bin" / "npm")
    assert web.runtime_package() == result


# ---------------------------------------------------------------------- tokenizers and draws


def bpe(**changes: Any) -> HFTokenizer:
    tokenizer = train_bpe(iter(["the fox and the hen's egg, they've seen 1234 of them\n" * 9]), 300)
    backend = tokenizer._tokenizer
    for name, value in changes.items():
        setattr(backend, name, value)
    return HFTokenizer(backend)


def test_tokenizers_that_the_page_does_not_have_are_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers

    web.require_tokenizer(ByteTokenizer())
    web.require_tokenizer(bpe())
    cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = Tokenizer(models.WordLevel({"a": 0, "<|endoftext|>": 1}, unk_token="a"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for tokenizer, reason in {
        NumberTokenizer(9): "is a NumberTokenizer",
        HFTokenizer(words): "has a model of type WordLevel",
        bpe(pre_tokenizer=cut): "cuts text by Sequence",
        bpe(pre_tokenizer=whole): "cuts text by ByteLevel without GPT-2's expression",
    }.items():
        with pytest.raises(Refused, match=rf"this one {reason}. Use --to onnx"):
            web.require_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=pages.BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


def computed(function: str, *arguments: Any) -> Any:
    """What a function says that imports the page's scripts, by playwright's Node.js, sooner than by a browser."""
    node, _ = compute_driver_executable()
    program = f"console.log(JSON.stringify(await ({function})(...JSON.parse(process.argv[1]))))"
    done = subprocess.run(
        [node, "--input-type=module", "--eval", program, json.dumps(arguments)],
        cwd=Path(web.__file__).parent / "page", capture_output=True, encoding="utf-8", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TEXTS = [
    "the fox and the hen's egg, they've  seen 1234 of them",
    "",
    "  two  spaces, a tab\tand \n\n lines \r\n",
    "žluťoučký kůň, 漢字かな交じり文, ½ and Ⅷ, 🦊🦊",
    "no-break\u00a0space, next line\u0085here, a mark\ufeff of order, ideographic\u3000space",
    "an end <|endoftext|> in the middle<|endoftext|>",
    "DON'T I'll we'D'd it''s",
]


@pytest.mark.parametrize("kind", ["bytes", "hf"])
def test_the_page_encodes_as_the_library(kind):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe()
    spec = None if kind == "bytes" else tokenizer.to_json()
    encode = """async (kind, spec, texts) => {
        const { tokenizerOf } = await import("./tokenizer.js");
        const tokenizer = tokenizerOf(kind, JSON.parse(spec));
        const piece = (id) => [...tokenizer.bytes(id)];
        return texts.map((text) => tokenizer.encode(text)).map((ids) => [ids, ids.map(piece)]);
    }"""
    result = computed(encode, kind, spec, TEXTS)
    for text, (ids, pieces) in zip(TEXTS, result, strict=True):
        assert ids == tokenizer.encode(text), text
        assert [bytes(piece) for piece in pieces] == [tokenizer.token_bytes[i] for i in ids]
        assert b"".join(map(bytes, pieces)).decode() == text


def xoshiro(words: list[int]) -> int:
    """xoshiro128** 1.1, written from Blackman and Vigna's definition."""

    def rotated(x: int, k: int) -> int:
        return ((x << k) | (x >> (32 - k))) & 0xFFFFFFFF

    a, b, c, d = words
    result = rotated(b * 5 & 0xFFFFFFFF, 7) * 9 & 0xFFFFFFFF
    shifted = b << 9 & 0xFFFFFFFF
    c, d = c ^ a, d ^ b
    b, a = b ^ c, a ^ d
    words[:] = a, b, c ^ shifted, rotated(d, 11)
    return result


def test_numbers_are_those_of_the_generator_and_draws_follow_the_softmax():
    draws = """async () => {
        const { Random, draw } = await import("./sampling.js");
        const random = new Random(7);
        const words = [...random.words];
        const numbers = Array.from({ length: 50 }, () => random.next());
        const logits = Float32Array.from([0, 1, 2, 2]);
        const counts = [0, 0, 0, 0];
        for (let i = 0; i < 20000; i++) counts[draw(logits, 2, random)]++;
        let refused = "";
        try { draw(Float32Array.from([0, NaN]), 1, random); } catch (error) { refused = error.message; }
        return { words, numbers, counts, greedy: draw(logits, 0, random), refused };
    }"""
    result = computed(draws)
    words = result["words"]
    assert result["numbers"] == [xoshiro(words) for _ in range(50)]
    p = torch.softmax(torch.tensor([0.0, 1.0, 2.0, 2.0]) / 2, 0)
    counts = torch.tensor(result["counts"]).float()
    # Pearson's statistic has 3 degrees of freedom: above 16.3 once in a thousand seeds.
    assert float(((counts - 20000 * p) ** 2 / (20000 * p)).sum()) < 16.3
    assert result["greedy"] == 2
    assert "not finite" in result["refused"]


# ---------------------------------------------------------------------- the page


def package() -> Path:
    """The runtime's package; skips where it cannot be fetched."""
    try:
        return web.runtime_package()
    except DataError as error:
        pytest.skip(str(error))


class Exported:
    """A small model as a page, served."""

    def __init__(self, folder: Path, *options: object, **config: Any) -> None:
        package()
        run = saved(folder, **config)
        self.model: LanguageModel = glissando.load(run)
        arguments = ("export", run, "--to", "web", "--out", folder / "page")
        assert run_command(*arguments, *options) == 0
        self.folder = folder / "page"
        self.files = pages.Files(self.folder)

    def lasting(self, tokens: int, **options: Any) -> tuple[str, str]:
        """A prompt whose greedy text does not end by itself, and the text."""
        for prompt in PROMPTS:
            expected = generate(self.model, prompt, max_tokens=tokens, temperature=0, **options)[0]
            longer = generate(self.model, prompt, max_tokens=tokens + 4, temperature=0, **options)[0]
            if longer.startswith(expected.rstrip("\ufffd")) and len(longer) > len(expected):
                return prompt, expected
        raise AssertionError("every greedy text ends by itself")


@pytest.fixture
def exported(tmp_path):
    made: list[Exported] = []

    def export(*options: object, **config: Any) -> Exported:
        made.append(Exported(tmp_path, *options, **config))
        return made[-1]

    yield export
    for one in made:
        one.files.stop()


@pytest.fixture
def visit(browser):
    """Opens a page and waits for its model; its `complaints`, and what it asks for in `urls`."""
    opened = []

    def open_page(one: Exported | ByHand, **options: Any):
        page = browser.new_page(**options)
        opened.append(page)
        page.complaints, page.urls = [], []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.urls.append(request.url))
        page.goto(one.files.url)
        expect(page.locator("#write")).to_have_attribute("aria-disabled", "false", timeout=60_000)
        return page

    yield open_page
    for page in opened:
        page.close()


def write(page, prompt: str, **fields: object) -> tuple[str, str]:
    """Its text, and how it ended."""
    page.fill("#prompt", prompt)
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))
    page.click("#write")
    expect(page.locator("#ending")).to_contain_text("Ended", timeout=60_000)
    return page.text_content("#written"), page.text_content("#ending")


class ByHand:
    """A page of a model that needs no tracing: logits_t = A[id_t] + D u + h_t, h_t = h_(t-1) + B[id_t]."""

    def __init__(self, folder: Path, capacity: int) -> None:
        random = np.random.default_rng(0)
        self.a, self.b = random.normal(size=(2, 256, 256)).astype(np.float32)
        self.d = random.normal(size=(2, 256)).astype(np.float32)
        self.a[:, 0] = -1e3  # the end is never drawn
        web.write_page(folder, package())
        (folder / "model.onnx").write_bytes(self._graph())
        (folder / "weights.bin").write_bytes(b"\0" * 64)
        (folder / "tokenizer.json").write_text("{}")
        made = {
            "name": "by-hand", "parameters": 131584, "mixers": ["by hand"], "depth": "discrete", "vocab_size": 256,
            "tokens": 256,
            "tokenizer": {"kind": "bytes", "file": "tokenizer.json", "end": 0}, "capacity": capacity,
            "dials": ["mood", "speech"], "file": "model.onnx",
            "state": [
                {"input": "state.h", "output": "next.h", "dtype": "float32", "shape": ["batch", 256], "start": 0}
            ],
        }  # fmt: skip
        (folder / "export.json").write_text(json.dumps(made))
        self.folder, self.files = folder, pages.Files(folder)

    def _graph(self) -> bytes:
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        arrays = {"A": self.a, "B": self.b, "D": self.d, "one": np.array([1])}
        nodes = [
            ("Gather", ["A", "ids"], "a"), ("Gather", ["B", "ids"], "b"), ("CumSum", ["b", "one"], "sum"),
            ("Unsqueeze", ["state.h", "one"], "before"), ("Add", ["sum", "before"], "h"),
            ("MatMul", ["control", "D"], "u"), ("Unsqueeze", ["u", "one"], "turned"), ("Add", ["a", "h"], "ah"),
            ("Add", ["ah", "turned"], "logits"), ("ReduceSum", ["b", "one"], "all"),
            ("Squeeze", ["all", "one"], "new"), ("Add", ["state.h", "new"], "next.h"),
        ]  # fmt: skip
        number = TensorProto.FLOAT
        graph = helper.make_graph(
            [helper.make_node(kind, inputs, [output]) for kind, inputs, output in nodes],
            "by hand",
            [
                helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "time"]),
                helper.make_tensor_value_info("control", number, ["batch", 2]),
                helper.make_tensor_value_info("state.h", number, ["batch", 256]),
            ],
            [
                helper.make_tensor_value_info("logits", number, ["batch", "time", 256]),
                helper.make_tensor_value_info("next.h", number, ["batch", 256]),
            ],
            [numpy_helper.from_array(array, name) for name, array in arrays.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.checker.check_model(model)
        return model.SerializeToString()

    def greedy(self, prompt: str, tokens: int, control: Sequence[float]) -> str:
        ids, h = [0, *prompt.encode()], np.zeros(256, np.float32)
        turned = np.array(control, np.float32) @ self.d
        h += self.b[ids[:-1]].sum(0)
        for _ in range(tokens):
            h = h + self.b[ids[-1]]
            ids.append(int((self.a[ids[-1]] + h + turned).argmax()))
        return bytes(ids[-tokens:]).decode(errors="replace")


@needs_browser
def test_the_page_carries_the_state_and_stops_at_the_capacity(tmp_path, visit):
    one = ByHand(tmp_path, capacity=330)
    page = visit(one)
    prompt = "What the fox saw was long. " * 11  # longer than what is read at a time
    tokens = 330 - len(prompt)  # the text begins with a token of its own, and the last one is never read
    text, ending = write(page, prompt, temperature=0, length=500)
    assert text == one.greedy(prompt, tokens, (0, 0))
    assert "exported for 330 tokens, prompt included" in ending
    speed = rf"{tokens} tokens, [\d,]+ tokens/s, prompt of {len(prompt) + 1} read in \d+ ms"
    assert re.fullmatch(speed, page.text_content("#speed"))
    page.get_by_label("speech, as a number").fill("-0.5")
    assert write(page, "A", temperature=0, length=9)[0] == one.greedy("A", 9, (0, -0.5)) != one.greedy("A", 9, (0, 0))
    texts = [write(page, "A", temperature=2, length=20, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][1] == "Ended: at its length. Seed 3."
    for field, value, expected in (
        ("prompt", "long " * 90, "451 tokens, and this model was exported for 330, prompt included"),
        ("length", "0", "Length in tokens must be a whole number of at least 1"),
    ):
        page.fill(f"#{field}", value)
        page.click("#write")
        expect(page.locator("#error")).to_contain_text(expected)
    assert page.complaints == []
    assert {url.startswith((one.files.url, "data:")) for url in page.urls} == {True}
    one.files.stop()


@needs_browser
@pytest.mark.slow
def test_the_page_writes_as_the_library_up_to_its_capacity(exported, visit):
    one = exported("--capacity", 40, mixer={"kind": "attention", "heads": 2}, depth={"layers": 1})
    page = visit(one)
    prompt, _ = one.lasting(30)
    expected = generate(one.model, prompt, max_tokens=40 - len(prompt), temperature=0)[0]
    text, ending = write(page, prompt, temperature=0, length=500)
    assert text == expected
    assert "exported for 40 tokens, prompt included" in ending
    expect(page.locator("#dials")).to_be_hidden()
    assert "python -m http.server" in (one.folder / "README.md").read_text()
    made = json.loads((one.folder / "export.json").read_text())
    shapes = [part["shape"] for part in (*made["inputs"], *made["outputs"], *made["state"])]
    assert {shape[0] for shape in shapes} == {1}, "a page reads one text, and a graph of one is traced sooner"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["spectral", "delta", "attention"])
def test_greedy_text_and_seeds(mixer, exported, visit):
    one = exported(mixer=mixer, depth={"layers": 2})
    page = visit(one)
    prompt, expected = one.lasting(120)
    assert write(page, prompt, temperature=0, length=120)[0] == expected
    texts = [write(page, prompt, temperature=1, length=40, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][1] == "Ended: at its length. Seed 3."
    assert page.complaints == []
    if mixer == "spectral":
        # Longer than what is read at a time; then a text that would not end.
        long = "What the fox saw was long. " * 30
        printed = generate(one.model, long, max_tokens=20, temperature=0)[0]
        assert write(page, long, temperature=0, length=20)[0] == printed
        page.fill("#length", "1000000")
        page.click("#write")
        expect(page.locator("#written")).not_to_be_empty()
        page.keyboard.press("Escape")
        expect(page.locator("#ending")).to_contain_text("stopped by you")


@needs_browser
@pytest.mark.slow
def test_a_dial_turns_the_text(exported, visit):
    depth = {"kind": "flow", "layers": 2, "n_steps": 2, "alpha": 2.0, "control": ["mood", "speech"]}
    one = exported(mixer={"kind": "attention", "heads": 2}, depth=depth)
    page = visit(one)
    prompt, expected = one.lasting(60, control=[0.7, -0.5])
    page.get_by_label("mood, as a number").fill("0.7")
    page.get_by_label("speech, as a number").fill("-0.5")
    assert write(page, prompt, temperature=0, length=60)[0] == expected
    page.get_by_label("mood", exact=True).fill("0")
    expect(page.get_by_label("mood, as a number")).to_have_value("0")
    without = write(page, prompt, temperature=0, length=60)[0]
    assert without == generate(one.model, prompt, max_tokens=60, temperature=0, control=[0, -0.5])[0] != expected


@needs_browser
@pytest.mark.slow
def test_byte_pairs_on_the_page(tmp_path, exported, visit, monkeypatch):
    """The tokenizer goes along, and a prompt with its end token is read as the library reads it."""
    tokenizer = bpe()
    of = LanguageModel.from_config

    def with_pairs(config: dict[str, Any]) -> LanguageModel:
        model = of({**config, "vocab_size": 304})
        model.tokenizer = tokenizer
        return model

    monkeypatch.setattr(LanguageModel, "from_config", with_pairs)
    one = exported(mixer="spectral", depth={"layers": 1})
    monkeypatch.undo()
    page = visit(one)
    prompt = "the fox<|endoftext|> and the hen's\n\n egg"
    expected = generate(one.model, prompt, max_tokens=50, temperature=0)[0]
    assert write(page, prompt, temperature=0, length=50)[0] == expected
    assert f"prompt of {len(tokenizer.encode(prompt)) + 1} read" in page.text_content("#speed")
