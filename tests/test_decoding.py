"""The compiled decoding step against the model's forward: values, states, rows, and what has no such step."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from slow import slow_where
from subjects import CASES, PRESETS, SHARED, build, random_ids

from glissando.config import merge
from glissando.decoding import NotCompiled, decoder_of, step_from
from glissando.decoding.decoder import Decoder
from glissando.errors import ConfigError, InputError, LengthError, UnknownNameError
from glissando.generation import Continuation, Sampling, generate
from glissando.kernels import cached
from glissando.kernels.drawing import ENDED
from glissando.kernels.products import SUMS
from glissando.mixers import Attention
from glissando.model import LanguageModel, ModelConfig
from glissando.quantisation import round_weights
from glissando.sampling import RowSampler, Sampler
from glissando.state import leaves

#: cases without a compiled step, and the option that is why
PLAIN = {
    "window": "attention.window",
    "filter": "spectral.filter",
    "phase_gate": "spectral.phase_gate",
    "dynamics": "liquid.dynamics `dense`",
    "layer": "liquid.layer `published`",
}
_USUAL = {"window": None, "filter": False, "phase_gate": False, "dynamics": "diagonal", "layer": "gated"}


def reasons(model: LanguageModel) -> list[str]:
    """Why the model has no compiled step: options of its mixers and depth that PLAIN lists."""
    return [
        reason
        for options in (*model.config.mixers, model.config.depth)
        for name, reason in PLAIN.items()
        if getattr(options, name, _USUAL[name]) != _USUAL[name]
    ]


def closeness(model: LanguageModel) -> float:
    """1e-5 of the largest logit; where a temperature T divides lambdas that float32 rounds, 1e-5 / 10 T."""
    steepest = min(
        [float(m.log_temperature.exp().min()) for m in model.modules() if hasattr(m, "log_temperature")] or [1.0]
    )
    return 1e-5 / min(1.0, 10 * steepest)


def decoded(model: LanguageModel, ids: torch.Tensor):
    """The logits after the last of ids (B, T), one compiled step a token, and the rows behind it."""
    decoder = Decoder(model)
    rows = decoder.rows(model.init_state(len(ids)))
    for t in range(ids.shape[1]):
        logits, rows = decoder.step(ids[:, t], rows)
    return logits, rows


def with_ragged_rows(model: LanguageModel, control: torch.Tensor | None):
    """A state behind 5, 3 and 9 tokens."""
    ids, counts = random_ids(model, 3, 9, seed=1), torch.tensor([5, 3, 9])
    mask = torch.arange(9) < counts.unsqueeze(1)
    _, state = model(ids, model.init_state(3), mask=mask, control=control)
    return state


#: Variants whose compiled step is no other one's, though they share the code of a plain one.
COMPILED = {f"mixer:{name}" for name in ("attention-rope-on-value", "attention-no-rope", "attention-previous",
                                         "liquid-impulse")}  # fmt: skip


@pytest.mark.parametrize("case", slow_where({*PRESETS, *SHARED} - COMPILED, CASES))
@torch.no_grad()
def test_compiled_equals_plain(case):
    model = build(case, torch.float32)
    names = model.config.controls
    control = torch.randn(3, len(names)) if names else None
    if reasons(model):
        with pytest.raises(NotCompiled, match=reasons(model)[0]):
            Decoder(model)
        return
    state = with_ragged_rows(model, control)
    decoder = Decoder(model, with_control=control is not None)
    rows = decoder.rows(state)
    ids = random_ids(model, 3, 8, seed=2)
    for t in range(8):
        logits, state = model(ids[:, t : t + 1], state, control=control)
        found, rows = decoder.step(ids[:, t], rows, control)
        scale = logits.abs().max()
        torch.testing.assert_close(found / scale, logits[:, 0] / scale, rtol=0, atol=closeness(model))
    for found, expected in zip(leaves(decoder.state(rows)), leaves(state), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=20 * closeness(model))


@torch.no_grad()
def test_a_model_with_dials_decodes_without_a_control():
    model = build("depth:flow", torch.float32)
    ids = random_ids(model, 1, 6, seed=0)
    expected, _ = model(ids)
    found, _ = decoded(model, ids)
    torch.testing.assert_close(found, expected[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", ["attention", "tau"])
@torch.no_grad()
def test_caches_grow(mixer):
    model = build(f"mixer:{mixer}-default", torch.float32)
    ids = random_ids(model, 2, 300, seed=3)
    expected, _ = model(ids)
    found, rows = decoded(model, ids)
    torch.testing.assert_close(found, expected[:, -1], rtol=1e-4, atol=1e-5)
    assert [len(pages) for pages in rows.pages] == [5, 5]


@pytest.mark.parametrize("mixer", ["attention", "tau"])
@torch.no_grad()
def test_keys_whose_weights_vanish_are_left_out(mixer):
    model = LanguageModel.from_config({
        "vocab_size": 37, "hidden_size": 16, "depth": {"layers": 2},
        "mixer": {"kind": mixer, "heads": 2, "forget_gate": True},
    })  # fmt: skip
    for name, parameter in model.named_parameters():
        if name.endswith("forget.bias"):
            parameter.fill_(-3.0)  # about exp(-3) a token: 25 keys count
    ids = random_ids(model, 1, 120, seed=3)
    expected, _ = model(ids)
    found, _ = decoded(model, ids)
    torch.testing.assert_close(found, expected[:, -1], rtol=1e-4, atol=1e-5)


def test_weights_below_all_rounding_are_0_and_a_nan_stays():
    scores, tops = np.zeros(16, np.float32), np.empty(16, np.float32)
    scores[:6] = 3.0, -66.9, -67.1, -1e4, -np.inf, 0.0
    cached.softmax_weights(scores, 5, tops)
    assert scores[0] == 1
    assert scores[1] == pytest.approx(np.exp(-69.9), rel=1e-4)
    assert not scores[2:].any()
    broken = np.zeros(16, np.float32)
    broken[1:3] = np.nan, -100.0
    cached.softmax_weights(broken, 3, tops)
    assert np.isnan(broken[1])


@pytest.mark.parametrize("size", [3, 24, 40, 130])
@pytest.mark.parametrize("place", [0, 63, 128])
def test_rows_of_weight_0_are_not_read_by_64(place, size):
    """Two heads, one of values, over 64, 64 and three slots: of the first two one slot has a weight."""
    weights, values = np.zeros((2, 192), np.float32), np.full((3, 64 * size + 64), np.nan, np.float32)
    weights[:, place], weights[:, 130] = 2, 0.5
    pages = np.array([page.ctypes.data - 8 for page in values], np.int64)
    table = np.full((192, size), np.nan, np.float32)
    for slots in (slice(place - place % 64, place - place % 64 + 64), slice(128, 192)):
        table[slots] = np.arange(64 * size).reshape(64, size) + place
    out, sums = np.empty(2 * size, np.float32), np.empty(SUMS, np.float32)
    values[:, : 64 * size] = table.reshape(3, 64 * size)
    cached.weighted_values(weights, 2, 1, size, pages, 8, False, 131, sums, out)
    expected = (2 * table[place] + 0.5 * table[130]) / 2.5
    np.testing.assert_allclose(out.reshape(2, size), np.stack([expected] * 2), rtol=1e-6)


@torch.no_grad()
def test_rows_are_independent_and_can_leave():
    model = build("preset:composite-nano", torch.float32)
    decoder, state = Decoder(model), with_ragged_rows(model, None)
    ids = random_ids(model, 3, 2, seed=4)
    all_rows = decoder.rows(state)
    decoder.step(ids[:, 0], all_rows)
    kept = decoder.select(all_rows, [2, 0])
    together, _ = decoder.step(ids[[2, 0], 1], kept)
    alone = decoder.select(all_rows, [2])
    one, _ = decoder.step(ids[[2], 1], alone)
    assert torch.equal(together[0], one[0])


@pytest.mark.parametrize("case", ["preset:spectral-delta-nano", "preset:tauformer-nano", "preset:hybrid-ode-nano"])
def test_greedy_texts_are_those_of_the_plain_step(case):
    model = build(case, torch.float32)
    prompts = [[1, 2, 3], [4], [5, 6]]
    texts = [
        list(Continuation(model, prompts, 20, Sampling(temperature=0), step=step))  # type: ignore[arg-type]
        for step in ("compiled", "plain")
    ]
    assert texts[0] == texts[1]


def test_the_step_follows_the_weights():
    model = build("preset:spectral-delta-nano", torch.float32)
    first = decoder_of(model, "auto", False)
    assert decoder_of(model, "auto", False) is first
    model.embedding.weight.data.mul_(2)  # past autograd's count of changes
    second = decoder_of(model, "auto", False)
    assert second is not first
    model.config = replace(model.config, logit_scale=0.5)
    assert decoder_of(model, "auto", False) is not second


def test_weights_that_changed_after_rounding_are_kept_whole():
    model = build("preset:composite-nano", torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    round_weights(model, "int8")
    small = decoder_of(model, "compiled", False).weight_bytes
    model.load_state_dict(before)
    assert decoder_of(model, "compiled", False).weight_bytes > 1.4 * small
    with pytest.raises(ConfigError, match="int8 already"):
        round_weights(model, "bf16")


@torch.no_grad()
def test_small_scales_lose_no_digits():
    model = build("mixer:attention-default", torch.float32)
    model.config = replace(model.config, logit_scale=1e-6)
    ids = random_ids(model, 1, 3, seed=7)
    expected, _ = model(ids)
    decoder = Decoder(model)
    rows = decoder.rows(model.init_state(1))
    for t in range(3):
        found, rows = decoder.step(ids[:, t], rows)
    torch.testing.assert_close(found, expected[:, -1], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_rows_that_stay_take_the_room_that_they_need():
    model = build("mixer:attention-default", torch.float32)
    decoder = Decoder(model)
    ids, counts = random_ids(model, 2, 300, seed=8), torch.tensor([300, 20])
    with torch.no_grad():
        _, state = model(ids, model.init_state(2), mask=torch.arange(300) < counts.unsqueeze(1))
    rows = decoder.rows(state)
    kept = decoder.select(rows, [1])
    assert ([len(pages) for pages in rows.pages], len(kept.pages[0])) == ([5, 1], 1)
    assert torch.equal(decoder.step(ids[1:, 0], kept)[0], decoder.step(ids[:, 0], rows)[0][1:])


@pytest.mark.parametrize(
    "case",
    [
        "preset:composite-nano",
        "preset:tauformer-nano",
        "mixer:attention-previous",
        "mixer:attention-grouped",
        pytest.param("preset:hybrid-ode-nano", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_caches_in_bf16_equal_the_plain_step_to_their_rounding(case):
    model = build(case, torch.float32)
    ids, state = random_ids(model, 3, 68, seed=2), with_ragged_rows(model, None)
    decoder, whole = Decoder(model, caches="bf16"), Decoder(model)
    assert decoder.page_bytes < 0.7 * whole.page_bytes
    rows = decoder.rows(state)
    _, rows = decoder.step(ids[:, :54], rows)
    _, state = model(ids[:, :54], state)
    for t in range(54, 68):
        kept = decoder.state(rows)
        logits, _ = model(ids[:, t : t + 1], kept)  # the latest key and value are not rounded
        _, state = model(ids[:, t : t + 1], state)
        found, rows = decoder.step(ids[:, t], rows)
        assert 0 < (found - logits[:, 0]).norm() / logits.norm() < 2**-8
    kept = decoder.state(rows)
    halved = [
        torch.equal(found, found.to(torch.bfloat16).float()) and not torch.equal(expected, expected.bfloat16().float())
        for found, expected in zip(leaves(kept), leaves(state), strict=True)
    ]
    assert sum(halved) >= 2  # values of two layers at least
    again = decoder.rows(kept)
    assert torch.equal(decoder.step(ids[:, 0], again)[0], decoder.step(ids[:, 0], rows)[0])


def test_caches_in_bf16_need_a_compiled_step_and_something_to_keep():
    model = build("preset:composite-nano", torch.float32)
    model.caches_precision = "bf16"
    assert decoder_of(model, "auto", False).page_bytes < 0.7 * Decoder(model).page_bytes
    with pytest.raises(ConfigError, match="caches in bf16 need the compiled step: the plain step was requested"):
        decoder_of(model, "plain", False)
    with pytest.raises(ConfigError, match="keeps no keys or values"):
        Decoder(build("preset:liquid-ssm-nano", torch.float32), caches="bf16")
    with pytest.raises(UnknownNameError, match="bf16"):
        Decoder(model, caches="bf17")


def test_bfloat16_is_rounded_as_pytorch_does():
    numbers = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, -3e38, float("inf"), float("nan"), 1e-40])
    numbers = torch.cat([numbers, torch.randn(1000, generator=torch.Generator().manual_seed(0))])
    page = np.zeros(len(numbers) + 1, np.uint16)
    cached.write_slot(page.ctypes.data, 2, True, len(numbers), 0, 1, numbers.numpy())
    found, expected = torch.from_numpy(page[1:]).view(torch.bfloat16), numbers.bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int16), expected.nan_to_num().view(torch.int16))


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@torch.no_grad()
def test_rounded_weights_are_those_that_the_plain_step_computes_with(precision):
    model = build("preset:composite-nano", torch.float32)
    whole = Decoder(model).weight_bytes
    ids = random_ids(model, 2, 8, seed=5)
    exact, _ = model(ids)
    round_weights(model, precision)
    expected, _ = model(ids)
    decoder = decoder_of(model, "compiled", False)
    assert decoder.weight_bytes < 0.7 * whole
    rows = decoder.rows(model.init_state(2))
    for t in range(8):
        found, rows = decoder.step(ids[:, t], rows)
    torch.testing.assert_close(found, expected[:, -1], rtol=1e-4, atol=1e-4)
    assert 0 < (expected - exact).abs().max() < 0.2 * exact.abs().max()


def test_what_computes_otherwise_is_not_compiled():
    model = build("mixer:attention-default", torch.float32)
    with pytest.raises(NotCompiled, match="float64"):
        Decoder(build("mixer:attention-default"))
    handle = model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="norm has hooks"):
        decoder_of(model, "compiled", False)
    handle.remove()

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.depth.blocks[0].mlp.up.__class__ = Adapted
    with pytest.raises(ConfigError, match=r"blocks.0.mlp.up is a Adapted, which may compute something else"):
        decoder_of(model, "compiled", False)
    model.depth.blocks[0].mlp.up.__class__ = torch.nn.Linear
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match="autocast"):
        decoder_of(model, "compiled", False)

    class Louder(Attention):
        def forward(self, x, state=None, ctx=None):
            y, state = super().forward(x, state, ctx)
            return 2 * y, state

    model.depth.blocks[0].mixer.__class__ = Louder
    with pytest.raises(NotCompiled, match="mixer `Louder`"):
        Decoder(model)
    with pytest.raises(ConfigError, match="mixer `Louder`; use `auto` or `plain`"):
        step_from(model, model.init_state(1), "compiled", False)


def test_wrong_inputs_raise():
    positions = {"max_length": 2}
    model = LanguageModel.from_config(merge(ModelConfig, CASES["mixer:attention-default"], positions))
    decoder = Decoder(model)
    rows = decoder.rows(model.init_state(1))
    with pytest.raises(InputError, match="from 0 to 36, got 37"):
        decoder.step(torch.tensor([37]), rows)
    with pytest.raises(InputError, match="one or more for each of 1 rows"):
        decoder.step(torch.tensor([1, 2]), rows)
    with pytest.raises(InputError, match="with_control"):
        decoder.step(torch.tensor([1]), rows, torch.ones(1, 1))
    with pytest.raises(InputError, match="must be int64"):
        decoder.step(torch.tensor([1.0]), rows)
    other = build("mixer:attention-grouped", torch.float32)
    with pytest.raises(InputError, match="the state is of another model"):
        decoder.rows(other.init_state(1))
    with pytest.raises(InputError, match="the state is of another model"):
        decoder.rows(build("preset:delta-nano", torch.float32).init_state(1))
    dials = Decoder(build("depth:flow", torch.float32), with_control=True)
    with pytest.raises(InputError, match=r"the control must be \(1, 2\), got \(1, 1\)"):
        dials.step(torch.tensor([1]), dials.rows(build("depth:flow", torch.float32).init_state(1)), torch.ones(1, 1))
    for _ in range(2):
        decoder.step(torch.tensor([1]), rows)
    with pytest.raises(LengthError, match="learned positions for 2 tokens"):
        decoder.step(torch.tensor([1]), rows)
    with pytest.raises(UnknownNameError, match="int8"):
        Decoder(model, "int9")
    with pytest.raises(UnknownNameError, match="compiled"):
        generate(LanguageModel.from_preset("transformer-nano"), "a", step="compield")


@pytest.mark.parametrize("caches", ["float32", "bf16"])
@pytest.mark.parametrize("case", ["preset:composite-nano", "preset:tauformer-nano", "preset:hybrid-ode-nano"])
@torch.no_grad()
def test_rows_that_share_pages_go_on_as_rows_with_pages_of_their_own(case, caches):
    """Copies of one text, one of which leaves and joins another batch, and a cut back to a mark."""
    model = build(case, torch.float32)
    decoder, ids = Decoder(model, caches=caches), random_ids(model, 1, 200, seed=4)
    rows = decoder.rows(model.init_state(1))
    decoder.step(ids[:, :100], rows)
    mark, after = decoder.mark(rows), random_ids(model, 3, 150, seed=5)
    decoder.step(ids[:, 100:150], rows)
    copies = decoder.select(rows, [0, 0, 0])
    assert len({id(page) for pages in copies.pages for page in pages}) == (2 + 3 if decoder.page_bytes else 0)
    decoder.step(after[:, :70], copies)
    alone = decoder.join(decoder.select(copies, [1]), decoder.cut(rows, mark))
    found = decoder.step(torch.cat([after[1:2, 70:], ids[:, 100:180]]), alone)[0]
    decoder.step(after[:, 70:], copies)
    for text, logits in ((torch.cat([ids[:, :150], after[1:2]], 1), found[0]), (ids[:, :180], found[1])):
        expected = decoder.step(text, decoder.rows(model.init_state(1)))[0][0, -80:]
        assert torch.equal(logits, expected)


@torch.no_grad()
def test_a_text_that_ends_in_a_call_keeps_the_state_before_its_last_token():
    model = build("preset:composite-nano", torch.float32)
    decoder, rows = Decoder(model), Decoder(model).rows(model.init_state(2))
    samplers = [RowSampler(Sampling(temperature=0, allowed=(token,)), torch.Generator()) for token in (5, 9)]
    logits = np.zeros((2, 4, model.config.vocab_size), np.float32)
    written = decoder.write(np.array([1, 2]), rows, None, Sampler(samplers, 37), np.array([4, 3]), 5, logits)
    assert written.tolist() == [[5, ENDED, ENDED, ENDED], [9, 9, 9, ENDED]]
    assert rows.filled.tolist() == [1, 3]
    for row, text in enumerate(([1], [2, 9, 9])):
        alone = decoder.rows(model.init_state(1))
        expected = decoder.step(torch.tensor([text]), alone)[0][0]
        assert torch.equal(torch.from_numpy(logits[row, : len(text)]), expected)
        for found, leaf in zip(
            leaves(decoder.state(decoder.select(rows, [row]))), leaves(decoder.state(alone)), strict=True
        ):
            assert torch.equal(found, leaf)


def test_rows_are_freed_without_a_collection_of_garbage():
    """A state that was asked for kept them: a server went far beyond its memory."""
    model = build("mixer:attention-grouped", torch.float32)
    decoder = Decoder(model)
    rows = decoder.rows(model.init_state(2))
    array = weakref.ref(rows.filled)
    gc.disable()
    try:
        decoder.state(rows)
        del rows
        assert array() is None
    finally:
        gc.enable()


def test_pages_live_as_long_as_any_thread_writes_to_them(monkeypatch):
    """Ctrl-C ends the call where one thread is interrupted, while another one still runs."""
    model = LanguageModel(ModelConfig(vocab_size=50, hidden_size=32, mixer={"kind": "attention", "heads": 2}))
    decoder = Decoder(model.eval())
    rows = decoder.rows(model.init_state(2))
    decoder.step(torch.tensor([1, 2]), rows)
    pages = [weakref.ref(page) for each in rows.pages for page in each]
    left, ended, alive = threading.Event(), threading.Event(), []

    def run(*arguments):
        if arguments[-2] == 0:
            raise KeyboardInterrupt
        left.wait(10)
        alive.extend(page() is not None for page in pages)
        ended.set()

    monkeypatch.setattr("glissando.decoding.decoder.run", run)
    monkeypatch.setattr("glissando.kernels.compiled._WORK_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with contextlib.suppress(KeyboardInterrupt):
        decoder.step(torch.tensor([1, 2]), rows)
    del rows
    gc.collect()
    left.set()
    assert ended.wait(10)
    assert alive == [True, True]


def test_rows_that_are_kept_take_no_registers():
    """Prefixes keep many, and count what `bytes_of` says."""
    model = build("mixer:attention-default", torch.float32)
    decoder = Decoder(model)
    rows = decoder.rows(model.init_state(2))
    decoder.step(torch.tensor([1, 2]), rows)
    assert rows.registers.nbytes
    assert not decoder.select(rows, [0]).registers.nbytes
