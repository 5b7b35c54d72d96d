"""Penalties and biases: OpenAI's definition, the same in generate() and in the server."""

from __future__ import annotations

import pytest
import torch
from engines import Listener, model_of, request_for, run_down

from glissando.errors import ConfigError
from glissando.generation import Continuation, generate, stream
from glissando.model import LanguageModel
from glissando.sampling import Sampling
from glissando.serving.engine import Engine


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return model_of("liquid-ssm-nano").double()


def test_the_logits_by_the_definition():
    """z - frequency * count - presence * (count > 0) + bias."""
    z = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.25, logit_bias=((0, 10.0), (2, -1.0)))
    shifted = sampling.shifted(z, torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0]]))
    assert shifted.tolist() == [[11.0, 2 - 0.75, 2.0, 4 - 1.25], [11.0, 2.0, 2.0, 4.0]]
    assert z[0].tolist() == [1.0, 2.0, 3.0, 4.0], "the model's own are not changed"
    assert Sampling().shifted(z).equal(z)


def test_penalties_make_greedy_texts_repeat_less_and_a_bias_of_minus_100_bans(model):
    def written(**options: object) -> list[int]:
        sampling = Sampling(0.0, **options)  # type: ignore[arg-type]
        return [int(row[0] or 0) for row in Continuation(model, [[0, 79, 110]], 40, sampling)]

    plain = written()
    assert len(set(written(presence_penalty=100.0))) > len(set(plain))
    banned = max(plain, key=plain.count)
    assert banned not in written(logit_bias=((banned, -100.0),))
    assert set(written(logit_bias=((97, 100.0),))) == {97}


def test_the_prompt_is_not_counted(model):
    """Else a forbidding penalty would forbid the prompt's own tokens."""
    options = {"max_tokens": 1, "temperature": 0, "presence_penalty": 100.0}
    for prompt in ("aaaa", "Once upon"):
        assert generate(model, prompt, **options) == generate(model, prompt, max_tokens=1, temperature=0)


def test_the_engine_writes_what_generate_does(model):
    """Beside texts with other penalties, and with none."""
    kinds = [{}, {"frequency_penalty": 0.7}, {"presence_penalty": 1.5, "logit_bias": {101: 4.0}}]
    kinds.append({"repetition_penalty": 1.4, "min_p": 0.1})
    engine, listeners = Engine(model), []
    for number, kind in enumerate(kinds):
        biases = tuple(kind.get("logit_bias", {}).items())
        sampling = Sampling(0.8, None, None, number, **{**kind, "logit_bias": biases})
        request = request_for(model, "Once upon", 15)
        listeners.append(Listener())
        engine.submit(type(request)(request.ids, 15, sampling), [listeners[-1]])
    run_down(engine)
    expected = [generate(model, "Once upon", max_tokens=15, seed=n, **kind)[0] for n, kind in enumerate(kinds)]
    assert [each.text for each in listeners] == expected
    assert len(set(expected)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be a number from -1e"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be a number from -1e"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias must be numbers from -1e\+100 to 1e\+100, or -inf, by token id"),
        ({"logit_bias": {999: 1.0}}, "logit_bias has the token 999, outside the vocabulary of 256"),
    ],
)
def test_impossible_values_are_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, "Once", max_tokens=1, **options)


def test_a_stream_that_goes_on_elsewhere_cannot_count(model):
    with pytest.raises(ConfigError, match="the state of a stream does not keep"):
        stream(model, "Once", resumable=True, frequency_penalty=0.5)
    assert (
        "".join(stream(model, "Once", max_tokens=9, frequency_penalty=0.5))
        == generate(model, "Once", max_tokens=9, frequency_penalty=0.5)[0]
    )
