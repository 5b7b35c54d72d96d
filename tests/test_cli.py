"""The program as its user meets it: every command, good input and bad."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from glissando.cli import COMMANDS, installed, main
from glissando.data.tokenizers import ByteTokenizer
from glissando.model import LanguageModel
from glissando.presets import preset_names

TINY = [
    "--preset", "transformer-nano", "--model.hidden_size", "16", "--model.depth.layers", "1",
    "--data.kind", "text", "--data.seq_len", "16", "--data.batch_size", "4", "--training.steps", "6",
]  # fmt: skip


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("The fox who had a plan went out to find the hen who had none.\n" * 40)
    return path


@pytest.fixture(scope="module")
def run(book) -> Path:
    out = book.parent / "run"
    assert main(["train", *TINY, "--data.path", str(book), "--out", str(out)]) == 0
    return out


def fails(capsys, *arguments: object, status: int = 2) -> str:
    assert main([str(a) for a in arguments]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


def test_an_error_names_the_flag_to_change(capsys, tmp_path):
    (tmp_path / "short.txt").write_text("A mouse lived in a mill. " * 40)
    text = ["train", "--preset", "transformer-nano", "--data.path", tmp_path / "short.txt", "--out", tmp_path / "run"]
    error = fails(capsys, *text, "--training.steps", "1", "--data.seq_len", "4096", status=1)
    assert "; lower --data.seq_len or give" in error
    assert "needs --model.depth.n_steps" in fails(capsys, *text, "--model.depth", "tied", "--training.steps", "1")
    assert "--data.path is missing" in fails(capsys, "series", "train", "--data.time", "t", "--out", tmp_path / "run")
    assert "with more --depth.n_steps" in fails(capsys, "generate", "dial", "--depth.method", "dopri5")


def test_only_names_of_options_become_flags():
    from glissando.cli.options import as_flags

    left = "model.init_state(2), 'data.path', runs/data.path, --data.path, data.csv, model.safetensors, data.example"
    assert as_flags(left, []) == left
    assert as_flags("data.path and mixer.tau", []) == "--data.path and --model.mixer.tau"


def test_help_is_quick_and_needs_no_torch():
    code = (
        "import sys; from glissando.cli import main; main(['--help']); "
        "heavy = {'torch', 'lightning_fabric', 'numpy', 'pydantic'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *installed()])
def test_every_command_shows_a_real_example(command: str, capsys, monkeypatch):
    for columns in (60, 90, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert f"example: glissando {command}" in " ".join(shown.split())
        assert max(map(len, shown.splitlines())) <= min(100, max(80, columns))


def test_help_of_what_only_uses_a_run_needs_no_torch():
    code = (
        "import sys; from glissando.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    try: main([command, '--help'])\n    except SystemExit: pass\n"
        "    if 'torch' in sys.modules: sys.exit(command)"
    )
    commands = ["generate", "serve", "steer", "presets", "corpora", "evaluate"]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_option_of_the_configuration_is_in_the_help(capsys):
    """With what its docstring says of it."""
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    shown = " ".join(capsys.readouterr().out.split())
    for line in (
        "--model.vocab_size V; in training at least the size of the tokenizer",
        "--model.mixer attention, delta, liquid, spectral, tau (default: attention)",
        "--model.depth.method euler, midpoint, heun or rk4",
        "--data.seq_len number of tokens of a row (default: 256)",
        "data.tokenizer, kind bpe: A byte-level BPE, trained on the corpus",
        "--data.tokenizer.vocab_size number of tokens (default: 1024)",
        "data, kind recall: Generated keys with their values",
        "--training.schedule.final_ratio fraction of the base rate at the end",
    ):
        assert line in shown
    assert shown.count("--data.seq_len") == 1, "shared options are listed once"


def helped(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit):
        main(["train", *arguments])
    return capsys.readouterr().out


def test_help_of_training_is_what_people_use(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = helped(capsys, "--help").splitlines()
    assert len(lines) <= 60
    assert "--data.path book.txt" in lines[lines.index("example:") + 1]
    options = [line.split()[0] for line in lines if line.startswith("  --")]
    assert len(options) == 15
    assert "--model.mixer.heads" not in options


def test_a_value_is_no_help(run, capsys):
    assert main(["generate", str(run), "--prompt", "-h", "--max_tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("-h")


def test_help_of_a_section_and_of_a_kind_have_the_defaults_of_the_preset(capsys):
    plain = helped(capsys, "--help", "data.tokenizer")
    assert "--data.tokenizer bytes, bpe, gpt2, file (default: bytes)" in " ".join(plain.split())
    assert "--data.path" not in plain
    tau = " ".join(helped(capsys, "--preset", "tauformer-nano", "--help", "model.mixer.tau").split())
    assert tau.startswith("model.mixer, kind tau")
    assert "heads H, number of lambdas of a token (default: 8)" in tau
    assert "(default: 4)" in helped(capsys, "--help=model.mixer.tau")
    short = " ".join(helped(capsys, "--preset", "tauformer-nano", "--help").split())
    assert "--data.batch_size number of rows of a batch, over all processes (default: 1)" in short
    assert "base rate, which the schedule multiplies (default: 0.004)" in short, "Muon's"
    error = fails(capsys, "train", "--help", "model.mxier")
    assert "unknown section 'model.mxier'. Did you mean 'model.mixer'?" in error


def test_a_command_line_is_parsed_once(monkeypatch, capsys):
    from glissando.cli.options import Parser

    parsed = []
    parse = Parser.parse_args
    monkeypatch.setattr(Parser, "parse_args", lambda *a: parsed.append(a) or parse(*a))
    assert main(["train", *TINY, "--print_config"]) == 0
    assert len(parsed) == 1


def test_a_run_directory_holds_what_it_should(run):
    names = {p.name for p in run.iterdir()}
    assert names >= {
        "config.yaml", "model.safetensors", "tokenizer.json", "metrics.csv", "checkpoints", "manifest.json",
        "environment.json", "samples.txt",
    }  # fmt: skip
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["hidden_size"] == 16
    assert config["data"]["kind"] == "text"
    assert "labelled" not in config["data"], "an option of another corpus"


def test_print_config_is_a_config_file(book, tmp_path, capsys):
    assert main(["train", *TINY, "--data.path", str(book), "--print_config"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "config.yaml"
    path.write_text(printed)
    assert main(["train", "--config", str(path), "--model.hidden_size", "8", "--print_config"]) == 0
    again = yaml.safe_load(capsys.readouterr().out)
    assert again == {**yaml.safe_load(printed), "model": {**yaml.safe_load(printed)["model"], "hidden_size": 8}}


def test_generate_streams_and_repeats_itself(run, capsys):
    outputs = []
    for _ in range(2):
        assert main(["generate", str(run), "--prompt", "The fox", "--max_tokens", "8", "--seed", "3"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("The fox")


def test_generate_by_either_step_and_with_rounded_weights(run, capsys):
    command = ["generate", str(run), "--prompt", "The fox", "--max_tokens", "12", "--temperature", "0"]
    texts = []
    for options in (["--step", "plain"], ["--step", "compiled"], ["--step", "compiled", "--weights", "bf16"]):
        assert main([*command, *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[2]) == len(texts[0])


def test_what_rounded_weights_cost_is_evaluated(run, capsys):
    bits = []
    for precision in ("float32", "bf16", "int8"):
        assert main(["evaluate", str(run), "--json", "--weights", precision]) == 0
        bits.append(json.loads(capsys.readouterr().out)["bits_per_byte"])
    assert len(set(bits)) == 3
    assert max(bits) - min(bits) < 0.01


def test_a_model_without_a_compiled_step_says_so(tmp_path, capsys):
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, mixer={"window": 4}, depth={"layers": 1})
    model.save(tmp_path / "run")
    assert main(["generate", str(tmp_path / "run"), "--max_tokens", "2", "--temperature", "0"]) == 0
    assert "tokens are computed by PyTorch: no compiled step for attention.window" in capsys.readouterr().err
    error = fails(capsys, "generate", tmp_path / "run", "--step", "compiled")
    assert "no compiled step for attention.window; use `auto` or `plain`" in error


def test_a_prompt_is_not_printed_before_its_options_are_right(run, capsys):
    assert main(["generate", str(run), "--prompt", "The fox", "--top_k", "0"]) == 2
    assert capsys.readouterr().out == ""


def test_a_text_that_positions_cut_is_reported(tmp_path, capsys):
    small = {"vocab_size": 256, "max_length": 16, "hidden_size": 16, "mixer.heads": 2, "depth.layers": 1}
    model = LanguageModel.from_preset("gpt", **small)
    model.tokenizer = ByteTokenizer()
    model.save(tmp_path / "run")
    command = ["generate", str(tmp_path / "run"), "--prompt", "abc", "--seed", "0", "--step", "plain", "--max_tokens"]
    assert main([*command, "9"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*command, "99"]) == 0
    assert capsys.readouterr().err == "stopped at the model's 16 positions\n"


def test_a_run_of_a_published_preset_writes_as_published_and_options_win(tmp_path, capsys):
    small = ["--model.hidden_size", "8", "--data.kind", "stories", "--data.seq_len", "32", "--data.valid_rows", "1"]
    small += ["--model.depth.n_steps", "2", "--training.sample_every", "9"]
    command = ["train", "--preset", "continuous-transformer", *small, "--training.steps", "1"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    command = ["generate", str(tmp_path / "run"), "--prompt", "Once", "--seed", "0", "--step", "plain"]
    texts = {}
    capsys.readouterr()
    for name, options, printed in (
        ("published", [], "max_tokens 200, temperature 0.8, top_p 0.9"),
        ("the same", ["--max_tokens", "200", "--temperature", "0.8", "--top_p", "0.9"], None),
        ("short", ["--max_tokens", "5"], "temperature 0.8, top_p 0.9"),
        ("greedy", ["--temperature", "0"], "max_tokens 200, top_p 0.9"),
    ):
        assert main([*command, *options]) == 0
        texts[name], error = capsys.readouterr()
        assert error == ("" if printed is None else f"as published with continuous-transformer: {printed}\n")
    assert texts["published"] == texts["the same"] != texts["greedy"]
    assert len(texts["short"]) < len(texts["published"])


def test_generate_takes_several_prompts_and_plain_text(run, capsys):
    assert main(["generate", str(run), "--prompt", "The", "--prompt", "A: [b]", "--max_tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert "The" in out
    assert "A: [b]" in out
    assert main(["generate", str(run), "--prompt=a: {not yaml", "--max_tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("a: {not yaml")


def test_a_sample_says_its_seed(run, capsys):
    """Another each time, and the same text with it."""
    seeds = []
    for _ in range(2):
        assert main(["generate", str(run), "--max_tokens", "20"]) == 0
        got = capsys.readouterr()
        seeds.append(re.fullmatch(r"seed (\d+)\n", got.err)[1])
        assert main(["generate", str(run), "--max_tokens", "20", "--seed", seeds[-1]]) == 0
        assert capsys.readouterr() == (got.out, "")
    assert seeds[0] != seeds[1]
    assert main(["generate", str(run), "--max_tokens", "5", "--temperature", "0", "--step", "plain"]) == 0
    assert capsys.readouterr().err == "", "nothing is drawn"


@pytest.mark.parametrize("typed", ["The fox\n", "The fox", "a\n\nb\n", ""])
def test_a_prompt_from_stdin(typed, run, capsys, monkeypatch):
    """One newline, that of the last line, is none of the text's."""
    command = ["generate", str(run), "--seed", "1", "--max_tokens", "4"]
    assert main([*command, "--prompt", typed.removesuffix("\n")]) == 0
    expected = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="ascii"))
    assert main([*command, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == expected


def test_a_prompt_that_is_typed_is_asked_for(run, capsys, monkeypatch):
    """In a line that stays open: the time that a silent terminal shows would be written over what is typed."""
    typed = io.TextIOWrapper(io.BytesIO(b"The fox\n"))
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(["generate", str(run), "--seed", "1", "--max_tokens", "4", "--prompt", "-"]) == 0
    assert capsys.readouterr().err.startswith("the prompt, then Ctrl-D: ")


def test_prompts_are_repeated(run, capsys, monkeypatch):
    command = ["generate", str(run), "--seed", "1", "--max_tokens", "4"]
    assert main([*command, "--prompt", "a", "--prompt", "b", "--prompt", "c"]) == 0
    expected = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"c\n")))
    assert main([*command, "--prompt", "a", "--prompt", "b", "--prompt=-"]) == 0
    assert capsys.readouterr() == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "stdin is not UTF-8" in fails(capsys, *command, "--prompt", "-", status=1)


def test_evaluate_a_run_and_a_file(run, book, tmp_path, capsys):
    assert main(["evaluate", str(run), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert 0 < own["bits_per_byte"] < 9
    low, high = own["accuracy_95"]
    assert low <= own["accuracy"] <= high
    pictures = tmp_path / "pictures"
    assert main(["evaluate", str(run), "--file", str(book), "--json", "--plots", str(pictures)]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == book.stat().st_size
    short = tmp_path / "short.txt"
    short.write_text("Hi.")
    assert main(["evaluate", "--file", str(short), str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 3
    short.write_bytes(b"Hi, caf\xe9.")
    error = fails(capsys, "evaluate", run, "--file", short, status=1)
    assert "iconv -f LATIN1" in error
    assert main(["evaluate", str(run), "--file", str(short), "--json", "--data.ascii_only", "true"]) == 0
    capsys.readouterr()
    (tmp_path / "taken").write_text("a file")
    error = fails(capsys, "evaluate", run, "--plots", tmp_path / "taken", status=1)
    assert "taken exists and is not empty; nothing is overwritten: choose another --plots" in error
    assert (pictures / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_presets_and_corpora(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for folder in ("", "series", "events") for name in preset_names(folder))
    assert "2,648" in out
    assert len({re.match(r"  \S+ +[\d,]*   ", line).end() for line in out.splitlines() if line.startswith(" ")}) == 1
    assert out.index("stories") < out.index("start here") < out.index("minimal-transformer ")
    assert main(["presets", "gpt"]) == 0
    assert "max_length: 128" in capsys.readouterr().out
    assert main(["corpora"]) == 0
    assert "stories" in capsys.readouterr().out
    assert main(["corpora", "shift"]) == 0
    assert "\t" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--preset", "transformer-nan"], "Did you mean 'transformer-nano'"),
        (["train", "--modle.hidden_size", "3"], "Did you mean --model.hidden_size"),
        (["train", "--learning_rate", "3"], "Did you mean --training.optimizer.learning_rate?"),
        (["train", "--data.text.pth", "x"], "Did you mean --data.path?"),
        (["train", "--mixer", "tau"], "Did you mean --model.mixer?"),
        (["train", "--model.logit_scale", "2"], "unknown option --model.logit_scale."),  # growth records it
        (
            ["train", "--training.steps", "five"],
            "train: --training.steps: expected a whole number, got 'five'\n",
        ),
        (["train", "--training.steps", "2.5e0"], "training.steps: expected a whole number, got 2.5\n"),
        (
            ["train", "--training.strategy", "dp"],
            "training.strategy: expected 'auto', 'ddp' or 'fsdp', got 'dp'. Did you mean 'ddp'?",
        ),
        (["train", "--data.kind", "storys", "--training.steps", "1", "--out", "x"], "Did you mean 'stories'"),
        (["train", "--preset", "transformer-nano", "--training.steps", "1"], "--out is missing"),
        (["train", "--preset", "transformer-nano", "--out", "x"], "warmup-cosine needs an end, and no budget is given"),
        (
            ["train", *TINY, "--training.tokens", "9", "--out", "OUT"],
            "the budget is one of --training.steps, .epochs, .tokens, .seconds, .flops; got steps and tokens",
        ),
        (["train", "--config", "nowhere.yaml"], "cannot read --config nowhere.yaml"),
        (
            ["train", *TINY, "--data.path", "BOOK", "--model.mixer", "atention", "--out", "OUT"],
            "Did you mean 'attention'",
        ),
        (
            ["train", "--from", "RUN", "--training.steps", "1", "--data.tokenizer.kind", "bpe", "--out", "OUT"],
            "their own",
        ),
        (
            ["train", *TINY, "--data.path", "BOOK", "--model.block.conv_width", "-1", "--out", "OUT"],
            "model.block.conv_width: expected a number of at least 0, got -1",
        ),
        (["train", "--resume", "nowhere"], "nowhere"),
        (["generate", "nowhere"], "no run at nowhere"),
        (["presets", "transformer-nan"], "Did you mean 'transformer-nano'"),
        (["corpora", "storys"], "Did you mean 'stories'"),
        (["train", "--resume", "x", "--training.steps", "9"], "takes no other option"),
        (["generate"], "the following arguments are required: RUN"),
        (["generate", "RUN", "--max_tokens", "many"], "--max_tokens: expected a whole number, got 'many'\n"),
        (["generate", "RUN", "--top_p", "x"], "--top_p: expected a number, got 'x'\n"),
        (["generate", "RUN", "--prompt", "--top_k", "3"], "--prompt: expected a value\n"),
        (["train", "--data.path"], "--data.path: expected a value\n"),
        (["train", "--model.mixer", "["], "--model.mixer: '[' is not YAML"),
        (
            ["train", "--model.mixer.heads", "null"],
            "expected a whole number, got null; leave it out",
        ),
        (
            ["train", "--model.mixer", "tau", "--model.mixer.kind", "liquid"],
            "--model.mixer.kind is given twice, also as --model.mixer; give it once",
        ),
        (["generate", "RUN", "--max_tokens", "0"], "at least 1"),
        (["generate", "RUN", "--prompt", "-", "--prompt", "-"], "--prompt - is given more than once"),
        (["generate", "RUN", "--seed", "1", "--seed", "2"], "--seed is given more than once"),
        (
            ["train", "--training.freeze", "embedding.*"],
            "training.freeze: expected a list, got 'embedding.*'; a list is written as '[",
        ),
        (["generate", "RUN", "--temperature", ".nan"], "must be a number from 0"),
        (["generate", "RUN", "--seed", str(2**70)], "seed must be a whole number"),
        (["evaluate", "RUN", "--file", "nowhere.txt"], "there is no file nowhere.txt; check --file"),
        (["events", "example", "--process", "hawks1"], "Did you mean 'hawkes1'"),
    ],
)
def test_mistakes_get_one_clear_line(arguments, message, run, book, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = {"RUN": run, "BOOK": book, "OUT": tmp_path / "x"}
    missing = message in ("nowhere", "no run at nowhere", "there is no file nowhere.txt; check --file")
    error = fails(capsys, *[given.get(a, a) for a in arguments], status=1 if missing else 2)
    assert message in error
    assert error.count("\n") <= 3
    assert not (tmp_path / "x").exists(), "a mistake must not leave a directory behind"


def test_whole_numbers_may_have_exponents(capsys):
    given = ["--training.tokens", "2.5e6", "--model.hidden_size=1e2", "--training.optimizer.learning_rate", "1e1"]
    assert main(["train", *given, "--print_config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["training"]["tokens"], config["model"]["hidden_size"]) == (2_500_000, 100)
    assert config["training"]["optimizer"]["learning_rate"] == 10.0


def test_unknown_keys_in_a_config_file(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text("training: {seed: null, steps: null}")
    assert "training.seed: expected a whole number, got null; leave it out" in fails(capsys, "train", "--config", path)
    path.write_text("training: {precision: null}")
    assert "expected 'auto', '32-true', 'bf16-mixed' or '64-true', got null" in fails(capsys, "train", "--config", path)
    path.write_text("model: {depth: {layer: 3}}")
    assert "unknown option 'model.depth.layer'. Did you mean 'layers'?" in fails(capsys, "train", "--config", path)
    path.write_text("- 1")
    assert "must hold a mapping" in fails(capsys, "train", "--config", path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"short", "less than one window"),
        (b"x" * 500 + b"\xff" + b"x" * 500, "UTF-8"),
        (b"x" * 500 + b"\x00" + b"x" * 500, "NUL"),
    ],
)
def test_bad_text_files(content, message, tmp_path, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    error = fails(capsys, "train", *TINY, "--data.path", path, "--out", tmp_path / "out", status=1)
    assert message in error
    assert str(path) in error
    assert not (tmp_path / "out").exists()  # left no directory in the way of the corrected command


@pytest.mark.parametrize(
    ("given", "kinds", "fitting"),
    [
        (["--model.mixer.adaptation", "0.5"], "mixer liquid, and the kind is attention", ["--model.mixer", "liquid"]),
        (["--data.labelled=true"], "corpus stories, and the kind is text", ["--data", "stories"]),
        (
            ["--model.depth.method", "rk4"],
            "depth flow, and the kind is discrete",
            ["--model.depth", "{kind: flow, n_steps: 3}"],
        ),
    ],
)
def test_an_option_of_another_kind_names_its_kinds(given, kinds, fitting, capsys):
    command = ["train", "--print_config", *given]
    other = [] if "stories" not in fitting else ["--data", "text"]
    assert f"It is one of {kinds}." in fails(capsys, *command, *other)
    assert main([*command, *fitting]) == 0
    capsys.readouterr()


def test_options_of_kinds_in_a_list(capsys):
    """They go to the mixers that have them; another kind takes the place of all."""
    given = ["train", "--preset", "composite-nano", "--print_config"]
    assert main([*given, "--model.mixer.heads", "2", "--model.mixer.channels", "64"]) == 0
    mixers = yaml.safe_load(capsys.readouterr().out)["model"]["mixer"]
    assert [mixer["kind"] for mixer in mixers] == ["spectral", "spectral", "spectral", "attention"]
    assert [mixer.get("channels") for mixer in mixers] == [64, 64, 64, None]
    assert [mixer.get("heads") for mixer in mixers] == [None, None, None, 2]
    assert mixers[3]["keys"] == "previous"
    assert "unknown option 'model.mixer[1].temperature'" in fails(capsys, *given, "--model.mixer.temperature", "9")
    assert main([*given, "--model.mixer.heads", "2", "--model.mixer", "tau"]) == 0
    mixer = yaml.safe_load(capsys.readouterr().out)["model"]["mixer"]
    assert (mixer["kind"], mixer["heads"]) == ("tau", 2)
    assert main([*given, "--model.mixer", "[attention, {kind: tau, heads: 2}]"]) == 0
    assert [m["kind"] for m in yaml.safe_load(capsys.readouterr().out)["model"]["mixer"]] == ["attention", "tau"]


def test_evaluating_refuses_options_of_another_corpus(run, capsys, tmp_path, monkeypatch):
    error = fails(capsys, "evaluate", run, "--data.cut", "true")
    assert "unknown option 'data.cut'. It is one of corpus stories, and the kind is text" in error
    error = fails(capsys, "evaluate", run, "--file", "x.txt", "--data.path", "y.jsonl", status=1)
    assert "there is no file x.txt" in error
    odd = tmp_path / "data.jsonl.text"
    odd.write_text("The fox who had a plan.\n" * 40)
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(run), "--file", odd.name, "--json"]) == 0
    capsys.readouterr()


def test_evaluating_does_not_deal_out_a_file_anew(tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "notes.jsonl", str(tmp_path / "run")
    path.write_text("".join(json.dumps({"text": f"note {i} of many"}) + "\n" for i in range(200)))
    corpus = ["--data.kind", "jsonl", "--data.path", str(path), "--data.valid_fraction", "0.34"]
    assert main(["train", *TINY[:6], *TINY[8:], *corpus, "--out", out]) == 0
    for option, value in (("batch_size", "2"), ("seq_len", "2"), ("valid_fraction", "0.5")):
        error = fails(capsys, "evaluate", out, f"--data.{option}", value)
        assert f"--data.{option} would score text that was trained on" in error
    monkeypatch.chdir(tmp_path)
    error = fails(capsys, "evaluate", out, "--data.path", "./notes.jsonl", "--data.batch_size", "2")
    assert "--data.batch_size would score" in error
    held_out = ["--data.valid_path", str(path), "--data.batch_size", "2"]
    assert main(["evaluate", out, *held_out]) == 0
    capsys.readouterr()


@pytest.mark.slow
def test_bad_lines_are_counted_at_the_end(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    good = "".join(json.dumps({"text": f"The hen number {i} went out to look for corn."}) + "\n" for i in range(300))
    path.write_text(good + "{broken\n" + '{"text": 3}\n')
    arguments = [a for a in TINY if a not in ("--data.kind", "text")]
    options = ["--data.kind", "jsonl", "--data.path", str(path), "--data.valid_fraction", "0.34"]
    assert main(["train", *arguments, *options, "--training.tokens", "9000", "--out", str(tmp_path / "out")]) != 0
    capsys.readouterr()
    budget = [a for a in arguments if a not in ("--training.steps", "6")]
    assert main(["train", *budget, *options, "--training.tokens", "14000", "--out", str(tmp_path / "out")]) == 0
    assert "2 bad lines skipped" in capsys.readouterr().err


def test_an_existing_run_is_never_overwritten(run, book, capsys):
    before = (run / "model.safetensors").read_bytes()
    assert "not empty" in fails(capsys, "train", *TINY, "--data.path", book, "--out", run, status=1)
    assert (run / "model.safetensors").read_bytes() == before


def test_damage_is_refused_by_name(run, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    error = fails(capsys, "generate", copy, status=1)
    assert "model.safetensors" in error
    assert "checkpoints/step-" in error
    good = sorted((copy / "checkpoints").iterdir())[-1]
    assert main(["generate", str(good), "--max_tokens", "3"]) == 0


def test_unknown_verb(capsys):
    assert "Did you mean 'train'" in fails(capsys, "trian")
