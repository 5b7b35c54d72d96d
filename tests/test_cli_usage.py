"""What the program was asked for and cannot do ends with 2, in every command; what else went wrong, with 1."""

from __future__ import annotations

import argparse

import pytest
from command_parsers import parsing

from glissando.cli import COMMANDS, installed, main
from glissando.cli.options import Parser

#: the least that each command takes, its run or file missing
LEAST = {
    "train": ["--resume", "nowhere"],
    "generate": ["nowhere"],
    "evaluate": ["nowhere"],
    "serve": ["nowhere"],
    "export": ["nowhere", "--to", "onnx", "--out", "x"],
    "grow": ["nowhere", "--out", "x"],
    "compare": ["nowhere.yaml", "transformer-nano", "--budget", "tokens=1000", "--out", "x"],
    "series": ["evaluate", "nowhere"],
    "events": ["evaluate", "nowhere"],
    "steer": ["nowhere", "--out", "x"],
    "models": ["storys"],
    "presets": ["transformer-nan"],
    "corpora": ["storys"],
    "laplacian": ["show", "nowhere.safetensors"],
}


def parser_of(command: str, monkeypatch) -> Parser:
    """The parser that a command makes."""
    made: list[Parser] = []

    class Found(BaseException):
        pass

    def take(parser: Parser, _: object) -> None:
        made.append(parser)
        raise Found

    with monkeypatch.context() as patch:
        patch.setattr(parsing(command), "parse", take)
        with pytest.raises(Found):
            main([command])
    return made[0]


@pytest.mark.parametrize("command", [*COMMANDS, *installed()])
def test_a_usage_error_ends_with_2(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parser = parser_of(command, monkeypatch)
    plain = [a for a in parser._actions if a.option_strings and a.dest not in ("help", "imports")]
    wrong = [["--nonsense", "3"], ["--nonsense=3"], *([name, "3"] for name in parser.sections)]
    for action in plain:
        option = action.option_strings[0]
        if action.nargs is None:
            wrong += [[option]]
            wrong += [] if isinstance(action, argparse._AppendAction) else [[option, "1", option, "2"]]
        if getattr(action.type, "__name__", "") in ("whole", "number", "boolean", "numbers"):
            wrong += [[option, "many"], [option, "1,x"]]
    if any(isinstance(a, argparse._StoreAction) and not a.option_strings and a.nargs is None for a in parser._actions):
        wrong.append([])
    for name in parser.sections:
        wrong += [[f"--{name}.nonsense", "3"], [f"--{name}", "["], [f"--{name}", "3"]]
    for arguments in wrong:
        values = arguments and [*LEAST[command], *arguments]
        if "--out" in arguments and "--out" in values[: len(LEAST[command])]:
            values = arguments
        assert main([command, *values]) == 2, values
        printed = capsys.readouterr().err
        assert printed.startswith(f"glissando {command}: "), values
        assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [*COMMANDS, *installed()])
def test_other_errors_end_with_1(command, tmp_path, monkeypatch, capsys):
    """What is not there is no mistake of usage; an unknown name, or a file of options that cannot be read, is one."""
    monkeypatch.chdir(tmp_path)
    assert main([command, *LEAST[command]]) == (2 if command in ("models", "presets", "corpora", "compare") else 1)
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"glissando {command}: ")
    )  # compare says first what it does
    assert not list(tmp_path.iterdir())


def test_an_unknown_option_like_no_other_names_none(capsys):
    assert main(["train", "--lr", "1e-3"]) == 2
    assert "unknown option --lr. See" in capsys.readouterr().err


def test_an_unknown_option_of_a_section_names_the_sections_help(capsys):
    assert main(["train", "--model.mixer.unheard", "3"]) == 2
    assert capsys.readouterr().err.endswith("See `glissando train --help model.mixer`.\n")
