"""Sampling, streaming and stopping."""

from __future__ import annotations

import itertools
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import build

from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import ConfigError, NotFiniteError, UnknownNameError
from glissando.generation import Continuation, Sampling, computing, generate, stream
from glissando.model import LanguageModel
from glissando.sampling import RowSampler, Sampler


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(3)
    model = LanguageModel.from_preset("transformer-nano", hidden_size=32, depth={"layers": 2}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.embedding.weight[128:] -= 3.0 * model.norm.weight  # mostly ASCII, so that texts have characters
    return model


def test_greedy_is_the_argmax_of_the_whole_prefix(model):
    """Decoding from a state says what a full pass over the text would say."""
    ids = [0, 72, 105]
    steps = Continuation(model, [ids], 12, Sampling(temperature=0))
    for (token,) in steps:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids]))[0][0, -1].argmax())
        ids = [*ids, token]


def test_a_row_says_the_same_in_any_company(model):
    prompts = ["a", "the long way round", "", "xyz"]
    together = generate(model, prompts, max_tokens=12, temperature=1.0, seed=5)
    for row, prompt in enumerate(prompts):
        assert generate(model, prompt, max_tokens=12, temperature=1.0, seed=5 + row) == [together[row]]


def test_streamed_pieces_are_the_generated_text(model):
    for seed in range(2):
        pieces = list(stream(model, "hello", max_tokens=30, temperature=1.2, seed=seed))
        assert "".join(pieces) == generate(model, "hello", max_tokens=30, temperature=1.2, seed=seed)[0]
        assert all(pieces)


def test_seeds_decide(model):
    texts = {generate(model, "a", max_tokens=9, temperature=1.0, seed=s)[0] for s in range(4)}
    assert len(texts) == 4


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    st.integers(1, 12),
    st.floats(0.05, 1.0),
    st.floats(0.1, 3.0),
)
def test_probabilities_keep_the_likeliest(logits, top_k, top_p, temperature):
    z = torch.tensor(logits, dtype=torch.float64)
    full = (z / temperature).softmax(-1)
    p = Sampling(temperature, top_k, top_p).weights(z)
    assert full[p > 0].max() == full.max()
    kept = p > 0
    assert int(kept.sum()) <= top_k
    if (~kept).any():
        assert full[kept].min() >= full[~kept].max() - 1e-12
    # Without the least likely one that was kept, top_p would not be reached.
    within = full / full.topk(min(top_k, len(z))).values.sum()
    assert float(within[kept].sum() - within[kept].min()) < top_p + 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("coldest", [{"temperature": 1e-40}, {"temperature": 1e-320}, {"top_p": 1e-300}])
def test_the_smallest_numbers_are_greedy(coldest, dtype):
    """A number that float32 does not have is no division by zero."""
    logits = torch.tensor([[-2.0, 30.0, 29.99], [0.0, -1.0, 5.0]], dtype=dtype)
    assert Sampling(**coldest).weights(logits).tolist() == [[0, 1, 0], [0, 0, 1]]


def test_temperature_zero_draws_the_likeliest():
    logits = torch.tensor([0.1, 0.9, 0.3]).expand(2, 3)
    assert Sampling(temperature=0).draw(logits, torch.tensor([0.0, 0.999])).tolist() == [1, 1]


def test_frequencies_follow_the_probabilities():
    z = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(100, 3)
    rows = [RowSampler(Sampling(temperature=1.0), torch.Generator().manual_seed(i)) for i in range(100)]
    sampler = Sampler(rows, 3)
    drawn = torch.cat([torch.from_numpy(sampler.draw(z)[:, 0]) for _ in range(40)]).bincount(minlength=3) / 4000
    assert (drawn - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.03


class Parrot(LanguageModel):
    """Says one fixed text, then the end of text."""

    def __init__(self, text: str) -> None:
        super().__init__(build("preset:minimal-transformer").config, ByteTokenizer(10))
        self.script = [*text.encode(), 10]

    def forward(self, ids, state=None, **_):
        state = state or self.init_state(ids.shape[0])
        position = state.position + ids.shape[1]
        said = (position - 1).tolist()
        next_ids = [self.script[min(p, len(self.script) - 1)] for p in said]
        hot = torch.nn.functional.one_hot(torch.tensor(next_ids), 256).float() * 50
        return hot.unsqueeze(1).expand(-1, ids.shape[1], -1), state._replace(position=position)

    def logits(self, features):
        return features


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ((), "one, two, naïve three"),
        ("two", "one, "),
        (["three", "o, n"], "one, tw"),
        ("ïve", "one, two, na"),
        ("ee!", "one, two, naïve three"),
        (["e", "one"], ""),
    ],
)
def test_stop_texts(stop, expected):
    parrot = Parrot("one, two, naïve three")
    assert generate(parrot, "", stop=stop, temperature=0, max_tokens=99) == [expected]
    assert "".join(stream(parrot, "", stop=stop, temperature=0, max_tokens=99)) == expected


def test_what_is_held_back_is_given_at_the_end():
    assert generate(Parrot("abc"), "", stop="cd", temperature=0, max_tokens=3) == ["abc"]


def test_characters_are_never_split():
    assert list(stream(Parrot("né€𝄞"), "", temperature=0)) == ["n", "é", "€", "𝄞"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 to"),
        ({"seed": 2**63}, "seed must be a whole number"),
        ({"max_tokens": -5}, "max_tokens must be a whole number of at least 0"),
        ({"stop": ""}, "stop text is empty"),
        ({"stop": None}, "stop must be a text, or a list of texts .* got None"),
        ({"stop": ["a", 3]}, "stop must be a text"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"temperature": float("inf")}, "from 0 to 1e\\+300, such as 0.8, got inf"),
        ({"temperature": None}, "temperature must be a number from 0 to .* got None"),
        ({"top_p": "a"}, r"top_p must be in \(0, 1\], got a"),
        ({"logit_bias": [(5, 1.0)]}, r"logit_bias must be numbers by token id, .* got \[\(5, 1.0\)\]"),
        ({"allowed": 5}, "allowed must be several token ids, .* got 5"),
        ({"temperature": 10**400}, "temperature must be a number from 0 to 1e\\+300, such as 0.8, got 1000"),
    ],
)
def test_mistakes_are_named(model, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, "a", **options)


def test_prompts_are_texts(model):
    with pytest.raises(ConfigError, match=r"prompts must be a text, or a list of texts .* got \[1, 2\]"):
        generate(model, [1, 2])
    with pytest.raises(ConfigError, match="prompt must be a text"):
        next(stream(model, 5))


def test_training_is_put_back_module_by_module():
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 2}).train()
    model.depth.blocks[1].eval()  # a frozen part
    before = [module.training for module in model.modules()]
    pieces = stream(model, "a", max_tokens=2, temperature=0)
    next(pieces)
    assert [module.training for module in model.modules()] == before, "between two pieces, too"
    assert any(before)
    assert not all(before)
    with computing(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()


def test_a_thread_that_computes_while_another_puts_training_back_is_stopped():
    """Dropout would have been on in its text without a word."""
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}).train()
    first, second = computing(model), computing(model)
    with torch.enable_grad():  # which is each thread's own; here is one, that leaves in another order than it came
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        with pytest.raises(RuntimeError, match=r"call model.eval\(\) before several threads use it"):
            second.__exit__(None, None, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_computes_no_numbers_says_so(temperature):
    """Greedy decoding would take some token for the likeliest of NaNs."""
    model = LanguageModel.from_preset("transformer-nano", hidden_size=16)
    with torch.no_grad():
        model.norm.weight.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="logits are not finite, so that no token can be sampled"):
        list(Continuation(model, [[1, 2]], 3, Sampling(temperature=temperature)))


def test_a_model_without_tokenizer_says_what_to_do():
    model = LanguageModel.from_preset("transformer-nano", vocab_size=300)
    with pytest.raises(ConfigError, match="load_tokenizer"):
        generate(model, "a")


def test_an_empty_prompt_of_ids_is_refused(model):
    with pytest.raises(ConfigError, match="a prompt is empty"):
        next(Continuation(model, [[]], 1, Sampling()))


@pytest.mark.serial
@pytest.mark.slow
def test_decoding_costs_what_the_state_costs():
    """A token behind 4096 others reads five times the bytes of one behind 64, weights and caches, and costs less than
    ten times as much: nothing is recomputed, which would cost 64 times."""
    model = LanguageModel.from_preset("transformer-nano").eval()

    def seconds(context: int) -> float:
        steps = Continuation(model, [[1] * context], 65, Sampling(temperature=0))
        next(steps)
        began = time.process_time()
        list(steps)
        return time.process_time() - began

    seconds(64)
    assert min(seconds(4096) for _ in range(3)) < 10 * min(seconds(64) for _ in range(3))


def test_learned_positions_end_the_text_and_never_raise():
    model = build("preset:gpt", torch.float32)  # 64 positions
    assert sum(1 for _ in Continuation(model, [[1] * 60], 100, Sampling(temperature=0))) == 5
    assert sum(1 for _ in Continuation(model, [[1] * 64], 100, Sampling(temperature=0))) == 1


def test_a_long_prompt_beside_it_does_not_cut_a_short_one():
    model = build("preset:gpt", torch.float32)  # 64 positions
    prompts = [[1, 2, 3], [1] * 60, [4] * 40]
    together = list(Continuation(model, prompts, 30, Sampling(temperature=0)))
    for row, prompt in enumerate(prompts):
        alone = [step[0] for step in Continuation(model, [prompt], 30, Sampling(temperature=0))]
        assert [step[row] for step in together if step[row] is not None] == alone
    assert [sum(step[row] is not None for step in together) for row in range(3)] == [30, 5, 25]


def test_a_text_that_positions_cut_is_reported():
    small = {"hidden_size": 16, "depth": {"layers": 1}, "mixer.heads": 2}
    model, calls = LanguageModel.from_preset("gpt", vocab_size=256, max_length=64, **small), []
    model.tokenizer = ByteTokenizer(0)
    for asked in (4, 500):
        list(stream(model, "x" * 50, max_tokens=asked, seed=1, when_full=lambda asked=asked: calls.append(asked)))
    assert calls == [500]


def test_dropout_is_off_while_generating():
    torch.manual_seed(0)
    model = LanguageModel.from_preset("minimal-transformer", block={"mlp_dropout": 0.5, "mixer_dropout": 0.5})
    assert model.training
    texts = {generate(model, "abc", max_tokens=20, temperature=0)[0] for _ in range(6)}
    assert len(texts) == 1
    assert model.training


def test_rows_that_end_leave_the_batch():
    """A row that has ended costs nothing more: the model is asked about the others alone."""
    parrot = Parrot("abcdefgh")
    widths = []
    parrot.register_forward_pre_hook(lambda _, args: widths.append(len(args[0])))
    steps = Continuation(parrot, [[10], [10]], 4, Sampling(temperature=0), ends=lambda row, token: row == 1)
    assert list(steps) == [[97, 97], [98, None], [99, None], [100, None]]
    assert widths == [2, 1, 1, 1]  # the last token is said, and not read any more


def with_dials() -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel.from_preset("hybrid-ode-nano", hidden_size=16, **{"mixer.heads": 2}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_a_dial_turns_while_text_streams():
    """What is said is what the model says when every token is read with the dial as it stood then."""
    model, asked = with_dials(), []

    def dial() -> torch.Tensor:
        asked.append(3.0 if len(asked) < 6 else -3.0)
        return torch.tensor([[asked[-1], 0.0]])

    said = [step[0] for step in Continuation(model, [[10, 97, 98]], 12, Sampling(temperature=0), control=dial)]
    control = torch.tensor([[[asked[max(0, t - 2)], 0.0] for t in range(14)]])
    with torch.no_grad():
        logits, _ = model(torch.tensor([[10, 97, 98, *said[:-1]]]), control=control)
    assert logits[0, 2:].argmax(-1).tolist() == said
    fixed = [step[0] for step in Continuation(model, [[10, 97, 98]], 12, Sampling(temperature=0), control=dial())]
    assert fixed != said
    turned = iter([{"mood": 3.0}] * 20)
    pieces = "".join(stream(model, "ab", max_tokens=8, temperature=0, control=lambda: next(turned)))
    assert pieces == generate(model, "ab", max_tokens=8, temperature=0, control={"mood": 3.0})[0]


def test_a_dial_is_named_and_turns():
    model = with_dials()
    texts = [generate(model, "a", max_tokens=30, control=c)[0] for c in ({"mood": 3.0}, {"mood": -3.0}, [3.0, 0.0])]
    assert texts[0] == texts[2] != texts[1]
    with pytest.raises(UnknownNameError, match="Did you mean 'mood'"):
        generate(model, "a", control={"mod": 1.0})
    with pytest.raises(ConfigError, match="2 numbers \\(mood, speech\\); got"):
        generate(model, "a", control=[1.0])
    with pytest.raises(ConfigError, match=r"2 numbers \(mood, speech\); got 0\.7"):
        generate(model, "a", control=0.7)
    for value in (float("nan"), -1e308, "b"):
        with pytest.raises(ConfigError, match=rf"from -1e9 to 1e9, such as .*; got mood={re.escape(str(value))}"):
            generate(model, "a", control={"mood": value})
    with pytest.raises(ConfigError, match="takes no control"):
        generate(LanguageModel.from_preset("transformer-nano"), "a", control=[1.0])


def test_between_two_pieces_the_reader_has_gradients_and_the_model_its_mode(model):
    model.train()
    frozen = model.backbone if hasattr(model, "backbone") else next(iter(model.children()))
    frozen.eval()
    modes = [module.training for module in model.modules()]
    for _ in stream(model, "hello", max_tokens=4):
        assert torch.is_grad_enabled()
        assert [module.training for module in model.modules()] == modes
    left = stream(model, "hello", max_tokens=4)
    next(left)
    assert torch.is_grad_enabled()
    model.eval()


def test_two_texts_may_be_read_in_turns(model):
    alone = [list(stream(model, "aaaa", max_tokens=4, seed=1)), list(stream(model, "bbbb", max_tokens=20, seed=2))]
    texts: list[list[str]] = [[], []]
    streams = [stream(model, "aaaa", max_tokens=4, seed=1), stream(model, "bbbb", max_tokens=20, seed=2)]
    for pieces in itertools.zip_longest(*streams):
        for text, piece in zip(texts, pieces, strict=True):
            text += [] if piece is None else [piece]
    assert texts == alone


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn():
    torch.manual_seed(0)
    small = {"hidden_size": 32, "depth": {"layers": 1}, "head_bias": True}
    grown = LanguageModel.from_preset("transformer-nano", vocab_size=400, **small)
    grown.tokenizer = ByteTokenizer()
    with torch.no_grad():
        grown.head_bias[300:] = 50.0
    for temperature in (0, 5.0):
        drawn = list(Continuation(grown, [[1, 2]], 40, Sampling(temperature)))
        assert max(row[0] for row in drawn) < 256
    assert generate(grown, ["hello"], max_tokens=40, temperature=5.0)


def test_no_prompts_are_reported_as_such(model):
    with pytest.raises(ConfigError, match="prompts is an empty list"):
        generate(model, [])
