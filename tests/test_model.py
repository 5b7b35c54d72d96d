"""The model's surface: presets, parameter counts, errors, saving and loading."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from subjects import CASES, DISTINCT, build, random_ids
from tolerances import assert_close
from torch import Tensor

import glissando
from glissando.config import merge
from glissando.errors import ConfigError, InputError, RunError, UnknownNameError
from glissando.mixers import MIXERS, Context, ContextError
from glissando.mixers.attention import Attention, AttentionConfig
from glissando.mixers.liquid import LiquidConfig
from glissando.mixers.tau import TauConfig
from glissando.model import LanguageModel, ModelConfig
from glissando.presets import preset_names, preset_note
from glissando.series import SeriesConfig, SeriesModel
from glissando.state import state_bytes

# continuous-transformer: 2,905,601 with each complex number of its two filters counted once
PUBLISHED = {
    "gpt": 30_503_424,
    "minimal-transformer": 2_648,
    "continuous-transformer": 2_907_649,
    "tauformer": 34_062_756,
    "tauformer-100m": 108_394_896,
}


@pytest.mark.parametrize("name", preset_names())
def test_presets_build_and_say_what_they_are(name: str):
    assert preset_note(name, "about").endswith(".")
    with torch.device("meta"):
        count = LanguageModel.from_preset(name).num_parameters()
    assert count == preset_note(name, "parameters") == PUBLISHED.get(name, count)
    if name.endswith("-nano"):
        assert 0.9e6 < count < 1.1e6


def test_overrides_reach_inside():
    model = LanguageModel.from_preset("transformer-nano", depth={"layers": 2}, **{"mixer.heads": 8})
    assert model.config.depth.layers == 2
    assert model.config.mixer.heads == 8
    assert model.config.hidden_size == 128


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 4}, "Did you mean 'hidden_size'"),
        ({"mixer": {"kind": "attention", "head": 4}}, "Did you mean 'heads'"),
        ({"mixer": {"kind": "atention"}}, "Did you mean 'attention'"),
        ({"hidden_size": "wide"}, "hidden_size: expected a whole number, got 'wide'"),
        ({"mixer": "atention"}, "Did you mean 'attention'"),
        ({"mixer": []}, "empty list"),
        ({"depth": {"kind": "discret"}}, "Did you mean 'discrete'"),
        ({"depth": {"layers": 0}}, "at least 1"),
        ({"mixer": {"kind": "attention", "heads": 3}}, "not a multiple of 3 heads"),
        ({"mixer": {"kind": "attention", "heads": 4, "kv_heads": 3}}, "cannot share"),
        ({"mixer": {"kind": "attention", "window": 0}}, "mixer.window: .*greater than 0, got 0"),
        ({"block": {"conv_width": 1}}, "at least 2"),
    ],
)
def test_mistakes_in_options_are_named(overrides: dict, message: str):
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        LanguageModel.from_preset("transformer-nano", **overrides)


@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (lambda: AttentionConfig(keys="prev"), "'own' or 'previous'"),
        (lambda: AttentionConfig(hedas=4), "unknown option 'hedas'. Did you mean 'heads'"),
        (lambda: Attention(16, heds=4), "Did you mean 'heads'"),
        (lambda: AttentionConfig(rope_width=0), "rope_width: .*greater than 0, got 0"),
        (lambda: TauConfig(horizons=(8.0,)), "horizons"),
        (lambda: TauConfig(keys="prev"), "'own' or 'previous'"),
        (lambda: LiquidConfig(turns="leg"), "'legs' or 'matched'"),
        (lambda: LiquidConfig(steps=(0.1,)), "steps"),
        (lambda: ModelConfig(norm="rmsnorm"), "'rms', 'layer' or 'complex'"),
        (lambda: ModelConfig(init="xaiver"), "'scaled', 'torch' or 'xavier'"),
        (lambda: AttentionConfig(rope=False, rope_on_value=True), "rope_on_value True needs attention.rope: true"),
        (lambda: AttentionConfig(rope=False, rope_width=3), "rope_width 3 needs attention.rope: true"),
    ],
)
def test_options_are_checked_when_they_are_built(build_it, message: str):
    """By Python too, and not by a configuration alone."""
    with pytest.raises(ConfigError, match=message):
        build_it()


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'transformer-nano'"):
        LanguageModel.from_preset("transformer-nan")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, ids: m(ids[0]), r"ids must be \(batch, time >= 1\)"),
        (lambda m, ids: m(ids[:, :0]), r"time >= 1"),
        (lambda m, ids: m(ids.float()), "int64"),
        (lambda m, ids: m(ids, mask=torch.ones(2, 3, dtype=torch.bool)), "mask must have the shape"),
        (lambda m, ids: m(ids, mask=torch.ones(ids.shape)), "mask must be bool"),
        (lambda m, ids: m(ids, m.init_state(5)), "the state holds 5 rows, ids have 2"),
        (lambda m, ids: m(ids, m.init_state(2), donate=True), "no_grad"),
        (lambda m, ids: m(ids, control=torch.ones(3, 1)), "control must be"),
        (lambda m, ids: m(ids, control=[0.7]), "control must be a tensor .* got a list; use torch.tensor"),
        (lambda m, ids: m(ids.tolist()), "ids must be a tensor .* got a list; use torch.tensor"),
        (lambda m, ids: m(ids + 300), "ids must be from 0 to 36, got 3.. to 3..; encode"),
        (lambda m, ids: m(ids - 100), "ids must be from 0 to 36, got -"),
        (lambda m, ids: m(ids, m.init_state(2).depth), "state must be what model.init_state or a call returned"),
    ],
)
def test_mistakes_in_calls_are_named(call, message: str):
    model = build("preset:transformer-nano", torch.float32)
    with pytest.raises(InputError, match=message):
        call(model, random_ids(model, 2, 5, 0))


@pytest.mark.parametrize(
    ("other", "own", "message"),
    [
        ({"depth.layers": 3}, {}, r"its 2.mixer.k has \(4, 5, 4\) numbers a row, and this model's has no;"),
        ({"depth.layers": 1}, {}, r"its 1.mixer.k has no numbers a row, and this model's has \(4, 0, 4\);"),
        ({"mixer": "tau"}, {}, r"its 0.mixer.k has \(4, 5\) numbers a row, and this model's has \(4, 0, 4\);"),
        ({"hidden_size": 32}, {}, r"its 0.mixer.k has \(4, 5, 8\) numbers a row, and this model's has \(4, 0, 4\);"),
        (
            {"depth": {"kind": "flow", "n_steps": 3}},
            {"depth": {"kind": "flow", "n_steps": 1}},
            r"its flow.1.mixer.k has \(4, 5, 4\) numbers a row",
        ),
        (
            {"depth": {"kind": "flow", "n_steps": 1}},
            {"depth": {"kind": "flow", "n_steps": 3}},
            r"its flow.1.mixer.k has no numbers a row",
        ),
    ],
)
def test_a_state_of_another_model_is_reported(other: dict, own: dict, message: str):
    small = {"hidden_size": 16, "depth.layers": 2}
    theirs, model = (LanguageModel.from_config(merge(ModelConfig, small, options)) for options in (other, own))
    ids = random_ids(model, 2, 5, 0)
    _, state = theirs(ids, theirs.init_state(2))
    with pytest.raises(InputError, match=rf"{message}.*start from model.init_state\(batch_size=2\)"):
        model(ids, state)


@pytest.mark.parametrize("signal", ["dt", "control"])
def test_a_signal_that_would_be_ignored_is_refused(signal: str):
    model = build("preset:transformer" if signal == "control" else "preset:gpt", torch.float32)
    with pytest.raises(ContextError, match=f"{signal!r} but does not accept it"):
        model(random_ids(model, 2, 5, 0), **{signal: torch.ones(2, 5) if signal == "dt" else torch.ones(2, 1)})
    with pytest.raises(ContextError, match="Attention"):
        Attention(16, rope=False)(torch.zeros(1, 2, 16), None, Context(dt=torch.ones(1, 2)))


def test_learned_positions_end_with_an_error_that_says_so():
    model = build("preset:gpt", torch.float32)
    model(random_ids(model, 1, 64, 0))
    with pytest.raises(ValueError, match="learned positions for 64 tokens, but was given 65"):
        model(random_ids(model, 1, 65, 0))
    _, state = model(random_ids(model, 1, 60, 0), model.init_state(1))
    with pytest.raises(ValueError, match="was given 65"):
        model(random_ids(model, 1, 5, 0), state)


def test_no_rows_need_no_positions():
    model = LanguageModel.from_preset("liquid-ssm-dense", hidden_size=16, vocab_size=37, depth={"layers": 1})
    logits, state = model(torch.zeros(0, 5, dtype=torch.int64), model.init_state(0))
    assert logits.shape == (0, 5, 37)
    assert len(state.position) == 0


SCALED = {"hidden_size": 16, "block": {"mixer_scale": 0.5}, "head_bias": True, "depth": {"layers": 1, "gated": [0]}}


@pytest.mark.parametrize("case", [*DISTINCT, "scaled", "series"])
def test_a_reset_leaves_nothing_as_it_was(case: str):
    if case in CASES:
        model = LanguageModel.from_config(CASES[case])
    else:
        model = (
            LanguageModel.from_config(SCALED)
            if case == "scaled"
            else SeriesModel(SeriesConfig(inputs=2, outputs=3, hidden_size=8))
        )
    constant = {name: p.detach().clone() for name, p in model.named_parameters() if len(p.unique()) == 1}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.reset_parameters()
    kept = [name for name, p in model.named_parameters() if (p == 7).any()]
    assert not kept
    for name, parameter in model.named_parameters():
        assert name not in constant or torch.equal(parameter, constant[name]), name


def test_a_reset_that_would_lose_the_laplacian_is_refused(tmp_path):
    graph = {"laplacian_weights": "learned"}
    model = LanguageModel.from_preset("tauformer-nano", hidden_size=16, depth={"layers": 1}, mixer=graph)
    model.save(tmp_path / "run")
    loaded = glissando.load(tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    with pytest.raises(ConfigError, match="comes with trained weights alone"):
        loaded.reset_parameters()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    LanguageModel.from_config(loaded.config).reset_parameters()  # a new one of the same configuration has its graph


def test_a_reset_beside_a_learned_diagonal_needs_no_laplacian(tmp_path):
    LanguageModel.from_preset("tauformer-nano", hidden_size=16, depth={"layers": 1}).save(tmp_path / "run")
    loaded = glissando.load(tmp_path / "run")
    loaded.reset_parameters()
    assert all(tensor.isfinite().all() for tensor in loaded.state_dict().values())


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_scaled_initialisation_finds_the_last_projections_of_branches(mixer: str):
    """Whatever a mixer calls what its output is linear in; that of `liquid` starts like any other map."""
    torch.manual_seed(0)
    model = LanguageModel.from_config({"mixer": mixer, "hidden_size": 64, "depth": {"layers": 8}})
    for block, _ in model.depth.applications():
        (last,) = [p for p in block.mixer.silenced() if p.ndim == 2]
        expected = 0.02 if mixer == "liquid" else 0.02 / 4
        assert float(last.detach().std()) == pytest.approx(expected, rel=0.1)
        assert float(block.mlp.down.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.1)


def test_attention_state_is_as_large_as_it_says():
    """2 G K L numbers of keys and values a layer, and 8 bytes a head and key for the forget gate."""
    for context in (10, 100):
        plain = build("mixer:attention-grouped", torch.float32)
        _, state = plain(random_ids(plain, 1, context, 0), plain.init_state(1))
        assert state_bytes(state.depth[0].mixer) == 2 * 2 * 4 * context * 4 + 16
        gated = build("mixer:attention-forget", torch.float32)
        _, state = gated(random_ids(gated, 1, context, 0), gated.init_state(1))
        assert state_bytes(state.depth[0].mixer) == 2 * 16 * context * 4 + 8 * 4 * (context + 1) + 16


def test_forget_gates_stay_exact_behind_a_long_past():
    """In float32 too: what happened 100,000 tokens ago must not blur what happens now."""
    model = build("mixer:attention-forget", torch.float32)
    ids = random_ids(model, 1, 20, 0)
    with torch.no_grad():
        _, state = model(ids[:, :10], model.init_state(1))
        layers = tuple(
            layer._replace(mixer=layer.mixer._replace(decay=layer.mixer.decay - 1e5, total=layer.mixer.total - 1e5))
            for layer in state.depth
        )
        near, _ = model(ids[:, 10:11], state)
        far, _ = model(ids[:, 10:11], state._replace(depth=layers))
    assert (near - far).abs().max() < 1e-4


def test_window_bounds_the_state():
    model = build("mixer:attention-window", torch.float32)
    sizes = set()
    for context in (10, 100, 300):
        _, state = model(random_ids(model, 1, context, 0), model.init_state(1))
        sizes.add(state_bytes(state))
    assert len(sizes) == 1


@pytest.mark.parametrize("case", ["mixer:attention-forget-window-grouped", "mixer:attention-window-1"])
def test_a_donated_window_stays_where_it_is(case: str):
    """Token by token, in room for twice the window (at least 64 slots), and what is computed stays the same."""
    model = build(case)
    ids = random_ids(model, 2, 170, 0)
    places: list[int] = []
    with torch.no_grad():
        _, state = model(ids[:, :90], model.init_state(2), donate=True)
        _, kept = model(ids[:, :90], model.init_state(2))
        for t in range(90, 170):
            got, state = model(ids[:, t : t + 1], state, donate=True)
            expected, kept = model(ids[:, t : t + 1], kept)
            assert_close(got, expected, "donated")
            places.append(state.depth[0].mixer.k.data_ptr())
        more = random_ids(model, 2, 7, 1)
        assert_close(model(more, state)[0], model(more, kept)[0], "a chunk behind a donated window")
    assert len(set(places)) == 1
    assert state.depth[0].mixer.k.shape[2] == 64


@pytest.mark.parametrize("options", ["window", "forget-window-grouped", "previous-window"])
def test_long_chunks_behind_a_window_are_one_text(options: str, monkeypatch: pytest.MonkeyPatch):
    """Chunks of hundreds take the window's blocks, a few tokens its mask: no pair that no window holds is computed."""
    model = build(f"mixer:attention-{options}")
    ids, pairs, fused = random_ids(model, 2, 700, 0), [], F.scaled_dot_product_attention

    def count(q: Tensor, k: Tensor, *rest: Tensor, **given: object) -> Tensor:
        pairs.append(q.shape[2] * k.shape[2])
        return fused(q, k, *rest, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    with torch.no_grad():
        whole, state, parts = model(ids)[0], model.init_state(2), []
        for chunk in ids.split([300, 3, 250, 1, 146], 1):
            logits, state = model(chunk, state)
            parts.append(logits)
    assert_close(torch.cat(parts, 1), whole, "chunks")
    assert max(pairs) < 64 * 70


def test_a_donated_prompt_is_not_kept_behind_the_window():
    model = build("mixer:attention-window", torch.float32)
    with torch.no_grad():
        _, state = model(random_ids(model, 1, 500, 0), model.init_state(1), donate=True)
    assert state.depth[0].mixer.k.shape[2] == 5


@pytest.mark.parametrize("name", ["transformer-nano", "minimal-transformer", "gpt"])
def test_saved_models_load_identically(name: str, tmp_path):
    model = build(f"preset:{name}", torch.float32)
    model.save(tmp_path / "model")
    again = glissando.load(tmp_path / "model")
    ids = random_ids(model, 2, 9, 0)
    assert torch.equal(model(ids)[0], again(ids)[0])
    assert again.config == model.config
    assert not again.training
    with pytest.raises(RunError, match="not empty"):
        model.save(tmp_path / "model")


def test_a_saved_model_is_replaced_where_that_is_asked_for(tmp_path):
    place, (old, new) = tmp_path / "model", (LanguageModel.from_preset("minimal-transformer") for _ in range(2))
    old.save(place)
    with pytest.raises(RunError, match="or overwrite=True"):
        new.save(place)
    new.save(place, overwrite=True)
    assert torch.equal(glissando.load(place).embedding.weight, new.embedding.weight)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("mine", ["notes.txt", "checkpoints/step-00000001/x", "metrics.csv", "optimizer.safetensors"])
def test_nothing_else_is_ever_replaced(mine, tmp_path):
    model, place = LanguageModel.from_preset("minimal-transformer"), tmp_path / "model"
    model.save(place)
    (place / mine).parent.mkdir(parents=True, exist_ok=True)
    (place / mine).write_text("mine")
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match="overwrite=True does not replace it"):
        model.save(place, overwrite=True)
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before


def test_a_place_is_checked_before_training(tmp_path):
    glissando.require_new(tmp_path / "new/below")
    assert not (tmp_path / "new").exists(), "nothing is made"
    glissando.require_new(tmp_path)
    file = tmp_path / "file"
    file.write_text("mine")
    for path, message in ((tmp_path, "not empty"), (file, "is a file"), (file / "x", "is a file")):
        with pytest.raises(RunError, match=message):
            glissando.require_new(path)


@pytest.mark.parametrize("nested", [False, True])
def test_options_of_a_saved_model_can_be_changed_where_that_does_something(nested: bool, tmp_path):
    LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}).save(tmp_path / "model")

    def changed(name: str, value: object) -> LanguageModel:
        return glissando.load(tmp_path / "model", merge(ModelConfig, {name: value}) if nested else {name: value})

    assert changed("mixer.window", 8).config.mixer.window == 8
    for name, value, message in (
        ("mixer.bins", 8, "unknown option 'model.mixer.bins'"),
        ("init", "xavier", "init sets where new numbers start"),
    ):
        with pytest.raises(ConfigError, match=message):
            changed(name, value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_scale": 0.0}, "logit_scale must be finite and not 0"),
        ({"logit_scale": float("nan")}, "logit_scale"),
        ({"block": {"mixer_scale": float("inf")}}, "block.mixer_scale: .*finite"),
        ({"mixer": {"kind": "tau", "laplacian": "saved"}}, "laplacian of a new model is nowhere `saved`"),
    ],
)
def test_numbers_of_which_no_logits_come_are_refused(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        LanguageModel.from_preset("transformer-nano", **options)


def test_a_byte_model_has_its_tokenizer(tmp_path):
    model = LanguageModel.from_preset("minimal-transformer")
    model.save(tmp_path / "model")
    assert glissando.load(tmp_path / "model").tokenizer.encode("é") == [195, 169]


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_a_shared_memo_changes_nothing(mixer: str):
    model = LanguageModel.from_config({"hidden_size": 16, "mixer": mixer, "depth": {"layers": 2}}).double().eval()
    ids, memo = torch.randint(0, 256, (2, 9)), {}
    with torch.no_grad():
        for p in model.parameters():  # layers that differ: what is kept of one must not serve another
            p.add_(0.3 * torch.randn_like(p))
    expected = model(ids)[0].detach()  # with gradients, and so without any memo
    with torch.no_grad():
        state = model.init_state(2)
        for t in range(9):
            logits, state = model(ids[:, t : t + 1], state, memo=memo)
            assert torch.allclose(logits[:, 0], expected[:, t], rtol=1e-9, atol=1e-9)
    assert bool(memo) == (mixer in ("liquid", "spectral"))
    with pytest.raises(ValueError, match="memo caches values computed from weights"):
        model(ids, memo=memo)


def test_a_model_of_float64_is_loaded_as_it_was(tmp_path):
    model = build("preset:transformer-nano", torch.float64)
    model.save(tmp_path / "run")
    loaded = glissando.load(tmp_path / "run")
    ids = random_ids(model, 1, 9, 0)
    assert loaded.embedding.weight.dtype == torch.float64
    assert torch.equal(loaded(ids)[0], model.eval()(ids)[0])
