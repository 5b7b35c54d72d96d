"""Hugging Face's interface says what the library says: the same logits, tokens, losses and gradients."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from graphs import weighted
from slow import slow_where
from subjects import build, random_ids
from tolerances import assert_close

from glissando import pretrained
from glissando.data.tokenizers import ByteTokenizer, load_tokenizer, train_bpe
from glissando.errors import ConfigError, InputError, MissingExtraError, RunError
from glissando.evaluation.scoring import token_losses
from glissando.generation import Continuation, Sampling
from glissando.mixers.base import ContextError
from glissando.model import LanguageModel

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from glissando.hf import GlissandoCache, GlissandoConfig, GlissandoForCausalLM, fast_tokenizer  # noqa: E402

#: one model for each kind of state, and for each kind of head
STATES = ["preset:transformer-plus-nano", "preset:tauformer-nano", "preset:liquid-ssm-nano", "depth:flow"]
#: a state that grows and one of one size are quick, the others slow
GENERATING = slow_where({"preset:tauformer-nano", "depth:flow"}, STATES)
HEADS = ["preset:continuous-transformer", "preset:gpt", "mixer:tau-learned"]
TEXTS = [
    "",
    "a line\nand a tab\t",
    "h\u00e9llo w\u00f6rld \u0100 \U0001f600",
    " spaces  and <|endoftext|>",
    "nul \x00 inside",
]


def wrapped(case: str, dtype: torch.dtype = torch.float64) -> GlissandoForCausalLM:
    return GlissandoForCausalLM.of(build(case, dtype))


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts as a batch with padding on the left; what stands in it must not matter."""
    width = max(map(len, prompts))
    ids = [[7] * (width - len(p)) + p for p in prompts]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def ours(model: GlissandoForCausalLM, prompts: list[list[int]], n: int, sampling: Sampling, **options) -> list[list]:
    steps = list(Continuation(model.model, prompts, n, sampling, **options))
    return [list(row) for row in zip(*steps, strict=True)]


PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9]]


@pytest.mark.parametrize("case", slow_where(STATES[:3], STATES + HEADS))
def test_saved_and_loaded_says_the_same(case, tmp_path):
    model = wrapped(case)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is GlissandoForCausalLM
    assert again.config.model == model.config.model
    assert not again.training
    assert again.num_parameters() == model.model.num_parameters()
    ids = random_ids(model.model, 2, 9, 0)
    with torch.no_grad():
        # Not bit for bit: what a product rounds to may depend on where in memory its weights begin.
        assert_close(again(ids).logits, model(ids).logits)
        assert torch.equal(model(ids).logits, model.model(ids)[0])
    for name, saved in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], saved), name


def test_weights_that_do_not_fit_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    wrapped(STATES[0]).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    last = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=r"model\.norm\.weight"):
        GlissandoForCausalLM.from_pretrained(tmp_path)
    save_file(
        weights | {"model.norm.weight": last, "model.extra": last.clone()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(RunError, match=r"unexpected_keys.*model\.extra"):
        GlissandoForCausalLM.from_pretrained(tmp_path)


def test_a_graph_file_is_not_needed_behind_weights(tmp_path):
    from glissando.mixers.tau.laplacian import save

    graph = tmp_path / "graph.safetensors"
    save(graph, weighted(8), {})
    tau = {"key_size": 8, "laplacian": str(graph), "laplacian_weights": "fixed"}
    model = GlissandoForCausalLM.of(
        LanguageModel.from_preset("tauformer-nano", hidden_size=16, depth={"layers": 1}, mixer={"kind": "tau", **tau})
    )
    model.save_pretrained(tmp_path / "saved")
    graph.unlink()
    again = GlissandoForCausalLM.from_pretrained(tmp_path / "saved").model.depth.blocks[0].mixer
    assert torch.equal(again.laplacian, model.model.depth.blocks[0].mixer.laplacian)
    assert again.laplacian.abs().max() > 0


def test_a_run_directory_loads(tmp_path):
    inner = LanguageModel.from_preset("transformer-plus-nano", hidden_size=16, depth={"layers": 1})
    inner.tokenizer = ByteTokenizer(10)
    inner.save(tmp_path / "run")
    ids = random_ids(inner, 2, 9, 0)
    model = GlissandoForCausalLM.from_run(tmp_path / "run")
    assert torch.equal(model(ids).logits, inner(ids)[0])
    assert model.generation_config.eos_token_id == 10
    half = GlissandoForCausalLM.from_run(tmp_path / "run", dtype=torch.bfloat16)
    assert half.dtype == half(ids).logits.dtype == torch.bfloat16
    weights = tmp_path / "run" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(RunError, match=r"model\.safetensors"):
        GlissandoForCausalLM.from_run(tmp_path / "run")


def test_a_configuration_names_mistakes():
    with pytest.raises(ConfigError, match="hidden_size"):
        GlissandoConfig(model={"hiden_size": 8})
    with pytest.raises(ConfigError, match="GlissandoConfig\\(model="):
        GlissandoConfig(hidden_size=8)
    config = AutoConfig.for_model("glissando", model={"hidden_size": 24})
    assert (config.hidden_size, config.vocab_size) == (24, 256)
    assert not hasattr(config, "max_position_embeddings")
    assert (
        GlissandoForCausalLM.of(
            LanguageModel.from_preset("gpt", hidden_size=12, vocab_size=9)
        ).config.max_position_embeddings
        == 128
    )
    assert AutoModelForCausalLM.from_config(config).model.config.hidden_size == 24


# ---------------------------------------------------------------------- generation


@pytest.mark.parametrize("case", GENERATING)
def test_greedy_rows_padded_on_the_left_are_ours(case):
    model = wrapped(case)
    batch = padded(PROMPTS)
    expected = ours(model, PROMPTS, 10, Sampling(temperature=0))
    for options in ({}, {"use_cache": False}, {"prefill_chunk_size": 3}):
        got = model.generate(**batch, max_new_tokens=10, **options)[:, batch["input_ids"].shape[1] :]
        assert got.tolist() == expected, options


def test_rows_end_where_ours_end():
    model = wrapped(STATES[0])
    free = ours(model, PROMPTS, 12, Sampling(temperature=0))
    eos = free[0][4]
    expected = ours(model, PROMPTS, 12, Sampling(temperature=0), ends=lambda _, token: token == eos)
    got = model.generate(**padded(PROMPTS), max_new_tokens=12, eos_token_id=eos, pad_token_id=0)[:, 7:].tolist()
    for row, tokens in zip(got, expected, strict=True):
        said = [token for token in tokens if token is not None]
        assert row == said + [0] * (len(row) - len(said))
    assert len(set(map(tuple, expected))) > 1


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 1.7, "top_k": 20, "top_p": 0.9}]
)
def test_sampling_has_the_probabilities_of_ours(options):
    """Hugging Face draws by multinomial: other random numbers, from the same distribution."""
    model = wrapped(STATES[0])
    z, given = 3 * torch.randn(6, 50, dtype=torch.float64), {"temperature": 1.0} | options
    settings = transformers.GenerationConfig(do_sample=True, **({"top_k": 0} | given))
    warped = model._get_logits_processor(settings, device="cpu")(torch.zeros(6, 1, dtype=torch.int64), z)
    weights = Sampling(**given).weights(z)
    assert_close(warped.softmax(-1), weights / weights.sum(-1, keepdim=True), "probabilities", tolerance=1e-12)


@pytest.mark.parametrize("case", GENERATING)
def test_beams_keep_their_own_states(case):
    """Beams that go on from states say what beams that read everything anew say."""
    model = wrapped(case)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "return_dict_in_generate": True}
    batch = padded(PROMPTS)
    cached = model.generate(**batch, **options, output_scores=True)
    plain = model.generate(**batch, **options, output_scores=True, use_cache=False)
    assert cached.sequences.tolist() == plain.sequences.tolist()
    assert_close(cached.sequences_scores, plain.sequences_scores, "scores", tolerance=1e-5)  # float32 in Hugging Face
    greedy = model.generate(**batch, max_new_tokens=8)
    assert cached.sequences[::2].tolist() != greedy.tolist()  # or the beams had nothing to reorder


def test_a_streamer_receives_every_token():
    class Ear(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.received: list[int] = []

        def put(self, value) -> None:
            self.received += value.flatten().tolist()

        def end(self) -> None:
            self.received.append(-1)

    model, streamer = wrapped(STATES[1]), Ear()
    out = model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=6, streamer=streamer)
    assert streamer.received == [*out[0].tolist(), -1]


def test_generation_goes_on_from_a_cache():
    model = wrapped(STATES[2])
    batch = padded(PROMPTS)
    whole = model.generate(**batch, max_new_tokens=9)
    first = model.generate(**batch, max_new_tokens=4, return_dict_in_generate=True)
    cache = first.past_key_values
    assert isinstance(cache, GlissandoCache)
    assert cache.get_seq_length() == 7 + 4 - 1  # the last token was not read
    kept = copy.deepcopy(cache)
    assert kept.memo == {}  # no copies of modules
    assert pickle.loads(pickle.dumps(cache)).memo == {}
    mask = F.pad(batch["attention_mask"], (0, 4), value=1)
    for past in (cache, kept):
        more = model.generate(first.sequences, attention_mask=mask, past_key_values=past, max_new_tokens=5)
        assert more.tolist() == whole.tolist()


def test_a_cache_that_does_not_fit_the_tokens_is_reported():
    model, ids = wrapped(STATES[0]), torch.tensor(PROMPTS[:1])
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ConfigError, match=f"has read {ids.shape[1]} tokens and input_ids has {ids.shape[1]}"):
        model.generate(ids, past_key_values=cache, max_new_tokens=3)
    more = torch.cat([ids, ids[:, :1]], 1)
    with pytest.raises(InputError, match=r"holds 1 rows and input_ids has 3; .*batch_repeat_interleave"):
        model.generate(more, past_key_values=cache, num_beams=3, max_new_tokens=3)
    cache.batch_repeat_interleave(3)
    model.generate(more, past_key_values=cache, num_beams=3, max_new_tokens=3)


def test_a_dial_steers_generation():
    model = wrapped("depth:flow")
    for value in (-2.0, 2.0):
        dial = torch.full((3, 2), value, dtype=torch.float64)
        expected = ours(model, PROMPTS, 8, Sampling(temperature=0), control=dial)
        for control in (dial, dial.unsqueeze(1).expand(-1, 14, -1)):  # 7 + 8 - 1 tokens are read
            got = model.generate(**padded(PROMPTS), max_new_tokens=8, control=control)[:, 7:]
            assert got.tolist() == expected
    with pytest.raises(ConfigError, match="control is given for 7 tokens"):
        model.generate(**padded(PROMPTS), max_new_tokens=8, control=dial.unsqueeze(1).expand(-1, 7, -1))
    with pytest.raises(ContextError, match="control"):
        wrapped(STATES[0])(torch.tensor([[1]]), control=dial[:1])


def test_time_steps_are_read_token_by_token():
    model = wrapped("mixer:liquid-input-only")
    dt = 0.2 + torch.rand(3, 14, dtype=torch.float64)
    plain = model.generate(**padded(PROMPTS), max_new_tokens=8, dt=dt, use_cache=False)
    assert model.generate(**padded(PROMPTS), max_new_tokens=8, dt=dt).tolist() == plain.tolist()
    assert model.generate(**padded(PROMPTS), max_new_tokens=8).tolist() != plain.tolist()
    mask = F.pad(padded(PROMPTS)["attention_mask"], (0, 7), value=1).bool()
    with torch.no_grad():
        logits, _ = model.model(plain[:, :-1], dt=dt, mask=mask)
    assert logits[:, 6:].argmax(-1).tolist() == plain[:, 7:].tolist()


@pytest.mark.parametrize("case", GENERATING)
def test_assisted_generation_and_prompt_lookup_write_the_same(case):
    model, prompt = wrapped(case), torch.tensor(PROMPTS[:1])
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=4, **options), expected)
    assert torch.equal(model.generate(prompt, assistant_model=model, **options), expected)
    shifted = wrapped(case)  # an assistant that is mostly wrong, whose drafts are undone
    with torch.no_grad():
        for parameter in shifted.parameters():
            parameter.add_(0.05)
    assert torch.equal(model.generate(prompt, assistant_model=shifted, **options), expected)


def test_a_cache_goes_back():
    model, ids = wrapped(STATES[0]), torch.tensor(PROMPTS[:1])
    cache, short = GlissandoCache(rewind=4), GlissandoCache(rewind=2)
    with torch.no_grad():
        model(ids, past_key_values=short)
        short.crop(-2)
        with pytest.raises(InputError, match=r"start from GlissandoCache\(rewind=4\), or more where it went back"):
            short.crop(1)
        model(ids, past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == ids.shape[1] - 3
        again = model(ids[:, -3:], past_key_values=copy.deepcopy(cache)).logits
        cache.crop(ids.shape[1] - 4)
        further = model(ids[:, -4:], past_key_values=cache).logits
        expected = model(ids).logits
    assert_close(again, expected[:, -3:], "after crop")
    assert_close(further, expected[:, -4:], "after two crops")


def test_what_a_state_cannot_do_is_refused():
    model, batch = wrapped(STATES[0]), padded(PROMPTS)
    with pytest.raises(ConfigError, match="cache_implementation 'static'"):
        model.generate(**batch, cache_implementation="static", max_new_tokens=3)
    with pytest.raises(ConfigError, match="no mixer keeps attention weights"):
        model.generate(**batch, output_attentions=True, return_dict_in_generate=True, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"not used by the model: \['token_type_ids'\]"):
        model.generate(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]), max_new_tokens=3)
    with pytest.raises(TypeError, match="DynamicCache"):
        model.generate(**batch, past_key_values=transformers.DynamicCache(), max_new_tokens=3)
    with pytest.raises(ConfigError, match="pad on the left"):
        model.generate(batch["input_ids"], attention_mask=batch["attention_mask"].flip(1), max_new_tokens=3)
    with pytest.raises(InputError, match="no model has read with this cache yet"):
        GlissandoCache().crop(-2)
    cache = model(torch.tensor(PROMPTS[:1]), use_cache=True).past_key_values
    with pytest.raises(InputError, match=r"this state cannot go back: start from GlissandoCache\(rewind=32\)"):
        cache.crop(1)
    with pytest.raises(ConfigError, match=r"back by 0 tokens, .* start with GlissandoCache\(rewind=32\)"):
        cache.activate_past_recording()
    for ahead, rewind in (({"prompt_lookup_num_tokens": 40}, 40), ({"assistant_model": model}, 32)):
        short = GlissandoCache(rewind=3)
        with pytest.raises(ConfigError, match=rf"back by 3 tokens, .* start with GlissandoCache\(rewind={rewind}\)"):
            model.generate(torch.tensor(PROMPTS[:1]), past_key_values=short, max_new_tokens=3, **ahead)
        assert short.state is None
    assistant, options = wrapped(STATES[0]), {"max_new_tokens": 3, "eos_token_id": None}
    for schedule in ("heuristic", "heuristic_transient"):  # transformers reads it of the assistant alone
        assistant.generation_config.num_assistant_tokens_schedule = schedule
        with pytest.raises(ConfigError, match=f"'{schedule}' of the assistant's .* ever further ahead"):
            model.generate(torch.tensor(PROMPTS[:1]), assistant_model=assistant, **options)
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.num_assistant_tokens = 70
    with pytest.raises(ConfigError, match=r"back by 40 tokens, and 70 are read .* GlissandoCache\(rewind=70\)"):
        model.generate(torch.tensor(PROMPTS[:1]), assistant_model=assistant, **options)
    with pytest.raises(ConfigError, match=r"vocabulary of 37 cannot be resized to 40: .* vocab"):
        model.resize_token_embeddings(pad_to_multiple_of=8)
    assert model.resize_token_embeddings(37) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="does not support Flash Attention 2"):
        model.set_attn_implementation("flash_attention_2")
    with pytest.raises(ValueError, match=r"attention_mask must be \(3, 7\)"):
        model(batch["input_ids"], attention_mask=batch["attention_mask"][:, :5])


# ---------------------------------------------------------------------- training


def test_the_loss_is_ours_shifted():
    model = wrapped(STATES[0])
    ids = random_ids(model.model, 2, 11, 1)
    labels = ids.clone()
    labels[0, :4] = -100
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    losses = token_losses(model.model(ids)[0], targets)
    count = int((targets != -100).sum())
    # Hugging Face scores in float32.
    assert_close(model(ids, labels=labels).loss.double(), losses.sum() / count, "loss", tolerance=1e-6)
    divided = model(ids, labels=labels, num_items_in_batch=7).loss.double()
    assert_close(divided, losses.sum() / 7, "loss over a given number", tolerance=1e-6)
    assert model(ids, labels=labels, return_dict=False)[0] == model(ids, labels=labels).loss


def test_gradients_through_cache_and_columns_to_keep():
    """Two calls with a cache have the gradients of one without."""
    model = wrapped(STATES[1])
    ids = random_ids(model.model, 2, 10, 2)
    model(ids).logits[:, -3:].square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    cache = model(ids[:, :6], use_cache=True).past_key_values
    model(ids[:, 6:], past_key_values=cache, logits_to_keep=3).logits.square().mean().backward()
    for name, p in model.named_parameters():
        if name in expected:
            assert_close(p.grad, expected[name], name)


def test_gradient_checkpointing_recomputes():
    model = wrapped(STATES[0]).train()
    ids = random_ids(model.model, 2, 10, 2)
    model(ids, labels=ids).loss.backward()
    expected = model.model.embedding.weight.grad.clone()
    model.zero_grad()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    assert model.model.depth.gradient_checkpointing
    model(ids, labels=ids).loss.backward()
    assert_close(model.model.embedding.weight.grad, expected, "gradient")
    with pytest.raises(ConfigError, match="re-entry"):
        enable({"use_reentrant": True})
    flow = wrapped("depth:flow")
    getattr(flow, enable.__name__)()
    assert flow.model.depth.gradient_checkpointing


@pytest.mark.slow
def test_trainer_trains_it(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install -e '.[hf]'")
    model = GlissandoForCausalLM.of(LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}))
    row = list(b"\0abcabcabcabcabcabc")
    rows = [{"input_ids": row, "labels": row}] * 16
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=4, learning_rate=0.02, report_to=[],
        use_cpu=True, disable_tqdm=True, save_steps=20, lr_scheduler_type="constant", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=options, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.3 * before
    saved = GlissandoForCausalLM.from_pretrained(tmp_path / "checkpoint-20")
    ids = torch.tensor([row])
    assert torch.equal(saved(ids).logits, model.eval()(ids).logits)


# ---------------------------------------------------------------------- text


@pytest.mark.parametrize("kind", ["bytes", "line", "bpe"])
def test_a_tokenizer_keeps_its_ids(kind, tmp_path):
    if kind == "bpe":
        inner = train_bpe(iter(["the hen who had a plan and the fox who had none"] * 20), 300)
    else:
        inner = ByteTokenizer(0 if kind == "bytes" else 10)
    fast_tokenizer(inner).save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = inner.encode(text)
        assert again(text).input_ids == [inner.eos_id, *ids]
        assert again(text, add_special_tokens=False).input_ids == ids
        assert again.decode(ids) == inner.decode(ids)
    assert again.eos_token_id == again.bos_token_id == again.pad_token_id == inner.eos_id
    rows = again(["a", "longer"], padding=True)
    assert set(rows) == {"input_ids", "attention_mask"}
    assert rows["attention_mask"][0][0] == 0
    assert len(again) == inner.vocab_size


def test_a_tokenizer_comes_from_a_run_and_without_form_is_refused(tmp_path):
    inner = LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1})
    inner.save(tmp_path / "run")
    for name, path in (("stories", pretrained.ROOT / "stories"), (tmp_path / "run",) * 2):
        assert fast_tokenizer(name)("a").input_ids == [0, *load_tokenizer(path).encode("a")]
    with pytest.raises(ConfigError, match="byte 200"):
        fast_tokenizer(ByteTokenizer(200))


def test_a_missing_package_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("glissando.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"-e '\.\[hf\]'"):
        import glissando.hf  # noqa: F401
