"""The benchmarks of decoding and of the server: every text has its length, and no prompt is known before."""

from __future__ import annotations

import pytest
from engines import request_for, run_down, submit

from benchmarks import serving
from benchmarks.speed import endless
from glissando.generation import generate
from glissando.model import LanguageModel
from glissando.serving.engine import Engine


@pytest.mark.parametrize("preset", ["liquid-ssm-nano", "transformer-nano"])
def test_endless_texts_have_their_length_and_are_counted(preset):
    """A plain model would end some of the 32 texts before 96 tokens: each token is the end with probability 1/256."""
    model, tokenizer = endless(preset)
    generate(model, ["a" * 64] * 32, max_tokens=96)
    assert tokenizer.decoded == 32 * 96


def test_the_servers_prompts_are_never_read_before():
    """Turn by turn, as clients send them: a prompt that began as an earlier one did would be read from where they
    part."""
    model = LanguageModel.from_preset("liquid-ssm-nano").eval()
    engine = Engine(model)
    for turn in range(2):
        for n in range(32):
            prompt = bytes(serving._prompt(10_000 * turn + n)).decode()
            submit(engine, request_for(model, prompt, 2))
        run_down(engine)
    assert engine.tokens_reused == 0
    assert engine.tokens_read == 2 * 32 * (1 + serving._PROMPT)
