"""What --help and the API page say: a text of its own for every option, a line for every argument."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import glissando
from glissando.block import BlockConfig, MLPConfig
from glissando.cli import COMMANDS, events, installed, main, series
from glissando.cli.help import documented, is_section
from glissando.config import hints_of
from glissando.data.corpora import CORPORA, TOKENIZERS
from glissando.depth import DEPTHS
from glissando.mixers import MIXERS
from glissando.series import SeriesConfig, SeriesData
from glissando.training.config import OPTIMIZERS, TrainingConfig
from glissando.training.schedules import SCHEDULES

REGISTRIES = (MIXERS, DEPTHS, CORPORA, TOKENIZERS, OPTIMIZERS, SCHEDULES)
SECTIONS = [glissando.ModelConfig, SeriesConfig, SeriesData, TrainingConfig, BlockConfig, MLPConfig]
SECTIONS += [cls for registry in REGISTRIES for cls in registry.options.values()]
CALLS = [
    glissando.generate, glissando.grow, glissando.load, glissando.load_state, glissando.register_probe,
    glissando.save_state, glissando.stream, glissando.LanguageModel.forward, glissando.SeriesModel.forward,
    glissando.RNN.forward, glissando.SeriesModel.load, glissando.LanguageModel.from_preset,
]  # fmt: skip


def test_every_option_has_a_text_of_its_own():
    for cls in SECTIONS:
        texts = documented(cls)
        names = [field.name for field in dataclasses.fields(cls) if not is_section(hints_of(cls)[field.name])]
        assert set(names) <= set(texts), f"{cls.__name__}: an option without a text"
        assert len({texts[name] for name in names}) == len(names), f"{cls.__name__}: two options with one text"
        assert set(texts) <= {field.name for field in dataclasses.fields(cls)}, f"{cls.__name__}: a text of no option"


def test_every_argument_has_a_line_of_the_table():
    """Under `Args:`, which the API page shows as a table."""
    for call in CALLS:
        section = re.search(r"\nArgs:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(call), re.DOTALL)[1]
        documented_names = re.findall(r"^    \**(\w+): ", section, re.MULTILINE)
        names = [name for name in inspect.signature(call).parameters if name != "self"]
        if call is glissando.generate:  # whose others are those of `stream`
            names = names[:2]
            others = [name for name in inspect.signature(call).parameters if name not in names]
            assert set(others) <= set(inspect.signature(glissando.stream).parameters)
        assert documented_names == names, call.__qualname__


@pytest.mark.parametrize("command", [*COMMANDS, *installed()])
def test_positional_arguments_are_in_capitals(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, _, rest = capsys.readouterr().out.partition("\n\n")
    words = re.findall(r"(?<![-\w.|])[a-z][a-z_]*\b", usage.replace("usage: ", ""))
    actions = {
        "glissando",
        command,
        "options",
        *{"series": series.actions(), "events": events.actions()}.get(command, ()),
    }
    assert set(words) <= actions | ({"build", "show"} if command == "laplacian" else set())
    listed = re.search(r"positional arguments:\n(.*?)\n\n", rest, re.DOTALL)
    assert listed is None or not re.search(r"^  [a-z]", listed[1], re.MULTILINE)
