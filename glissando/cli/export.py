"""glissando export: a run as a folder that other programs run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glissando.cli.inference import add_model_options, inference_overrides
from glissando.cli.options import Options, parse, parser_for, require_out, whole
from glissando.errors import ConfigError, DataError, unknown_name

if TYPE_CHECKING:
    from glissando.model import LanguageModel

EXAMPLE = "glissando export runs/first --to onnx --out exported"

#: --to, and what comes out
TO = {
    "onnx": "one streaming step and a prefill of any length, for ONNX Runtime",
    "web": "a static page that runs these in the browser",
    "torch": "the same as exported programs of PyTorch (.pt2)",
    "safetensors-bf16": "a run with matrices in bfloat16",
    "safetensors-int8": "a run with matrices in int8, with a scale for each output channel",
}
#: held-out tokens for the check, of which it reads some hundreds
_TOKENS = 1024


def main(arguments: Sequence[str]) -> None:
    """Write the folder, check what is in it against the model, and print what the check found."""
    usage = "glissando export RUN --to KIND --out DIR [options]"
    parser = parser_for("export", "Write a run's model for other programs, and check it.", EXAMPLE, usage)
    parser.add_argument("run", help="run directory, or one of its checkpoints")
    parser.add_argument("--to", metavar="KIND", help="; ".join(f"{name}: {about}" for name, about in TO.items()))
    parser.add_argument("--out", metavar="DIR", help="folder to create; nothing is overwritten")
    parser.add_argument(
        "--capacity",
        type=whole,
        help="for onnx, web, torch: largest number of tokens of a text if the state grows (attention, tau); 1024",
    )
    parser.add_argument(
        "--file",
        help="text for the check; by default the held-out text of the run, or built-in stories for a packaged model "
        "whose text is not part of the package",
    )
    add_model_options(parser, computes=False)
    options = parse(parser, arguments)
    if options.to is None:
        raise ConfigError(f"--to is missing: one of {', '.join(TO)}")
    if options.to not in TO:
        raise unknown_name("--to", options.to, TO)
    require_out(options, "name the folder to make, such as --out exported")
    from glissando.runs import require_new

    require_new(Path(options.out))
    _export(options)


def _export(options: Options) -> None:
    from glissando.export import export
    from glissando.loading import load
    from glissando.runs import Run

    model = load(options.run, inference_overrides(options))
    stream = _stream(options, model)
    found = export(model, Run.open(options.run), options.to, options.out, stream, options.capacity)
    print("\n".join(found.lines()))
    print(f"exported: {options.out}", file=sys.stderr)


def _stream(options: Options, model: LanguageModel) -> list[int]:
    """Held-out tokens: of --file, else of the run's own held-out batches."""
    from glissando.data.textfile import open_file
    from glissando.generation import tokenizer_of

    if options.file is None:
        return held_out_tokens(options.run, model)
    tokenizer = tokenizer_of(model)
    with open_file(options.file, "--file").open("rb") as file:
        return [tokenizer.eos_id, *tokenizer.encode(file.read(8 * _TOKENS).decode(errors="replace"))]


def held_out_tokens(path: str, model: LanguageModel) -> list[int]:
    """Some hundreds of tokens of the run's own held-out batches; of built-in stories, which a line says, for a packaged
    model whose text is not part of the package. Raises DataError where the text is not there."""
    from glissando.config import from_dict
    from glissando.data.corpora import CORPORA, StoriesOptions, build_corpus
    from glissando.generation import tokenizer_of
    from glissando.pretrained import missing_text
    from glissando.run_files import require_texts
    from glissando.runs import Run

    tokenizer = tokenizer_of(model)
    run = Run.open(path)
    section = run.read_config().get("data", {})
    data = from_dict(CORPORA.section(), section, "data")
    if (text := missing_text(path, section)) is not None:
        data = StoriesOptions(valid_rows=32)
        print(
            f"the check reads built-in stories: {text}, which {path} was trained on, is not part of the package "
            "(another text: --file TEXT)",
            file=sys.stderr,
        )
    else:
        require_texts(data, run, fix="--file TEXT")
    stream: list[int] = []
    try:
        for batch in build_corpus(data, tokenizer).batches("valid"):
            for row, real in zip(batch.ids, batch.ids >= 0 if batch.mask is None else batch.mask, strict=True):
                stream += row[real].tolist()
            if len(stream) >= _TOKENS:
                break
    except DataError as error:
        raise DataError(f"the check reads the run's held-out text: {error}. Or name a text: --file TEXT") from error
    return stream
