"""What a transformers model reads in the place of ids, and what it shows of its layers."""

from __future__ import annotations

import pytest
import torch
from slow import slow_where
from subjects import build
from tolerances import assert_close

from glissando.errors import ConfigError, InputError

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from glissando.hf import GlissandoForCausalLM  # noqa: E402

#: each depth, learned positions, and a map behind the embedding
CASES = ["preset:liquid-ssm-nano", "depth:flow", "depth:tied", "preset:continuous-transformer", "preset:gpt"]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [7, 7, 7, 6, 5, 3, 5]])
MASK = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])


def wrapped(case: str) -> GlissandoForCausalLM:
    return GlissandoForCausalLM.of(build(case, torch.float64))


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_those_of_each_block(case):
    model = wrapped(case)
    output = model(IDS, attention_mask=MASK, output_hidden_states=True)
    hidden, real = output.hidden_states, MASK.bool()
    assert len(hidden) == model.config.num_hidden_layers + 1
    assert all(one.shape == (2, 7, model.model.width) for one in hidden)
    assert_close(model.model.logits(hidden[-1]), output.logits)
    assert model(IDS).hidden_states is None
    # Columns of a padded row are those of the row alone, in every layer.
    alone = model(IDS[1:, 3:], output_hidden_states=True).hidden_states
    for layer, (one, other) in enumerate(zip(hidden, alone, strict=True)):
        assert_close(one[1][real[1]], other[0], str(layer))
    # A state goes on in every layer.
    cache = model(IDS[:, :4], attention_mask=MASK[:, :4], use_cache=True).past_key_values
    later = model(IDS[:, 4:], attention_mask=MASK, past_key_values=cache, output_hidden_states=True).hidden_states
    for layer, (one, other) in enumerate(zip(later, hidden, strict=True)):
        assert_close(one, other[:, 4:], str(layer))


def test_a_hidden_state_is_the_next_blocks_input():
    model = wrapped("preset:transformer-nano")
    blocks, inputs = model.model.depth.blocks, []
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    hidden = model(IDS, output_hidden_states=True).hidden_states
    assert len(hidden) == len(blocks) + 1
    assert all(torch.equal(one, other) for one, other in zip(hidden[:-1], inputs, strict=True))


def test_generate_gives_hidden_states_of_each_token():
    model = wrapped("preset:liquid-ssm-nano")
    ask = {"max_new_tokens": 3, "min_new_tokens": 3, "return_dict_in_generate": True, "output_hidden_states": True}
    output = model.generate(IDS, attention_mask=MASK, **ask)
    mask = torch.nn.functional.pad(MASK, (0, 2), value=1)
    whole = model(output.sequences[:, :-1], attention_mask=mask, output_hidden_states=True).hidden_states
    for layer, expected in enumerate(whole):
        steps = torch.cat([step[layer] for step in output.hidden_states], 1)
        assert_close(steps[:, 3:], expected[:, 3:], str(layer))


def test_a_depth_without_hidden_states_says_so():
    class Deaf(torch.nn.Module):
        accepts = frozenset({"mask"})

        def forward(self, x, state, ctx):
            return x, state

    model = wrapped("preset:transformer-nano")
    model.model.depth = Deaf()
    with pytest.raises(ConfigError, match=r"Deaf adds no hidden states: its forward must call ctx.keep\(x\)"):
        model(IDS, output_hidden_states=True)


@pytest.mark.parametrize("case", slow_where({"depth:tied", "depth:flow"}, CASES))
def test_embeddings_in_the_place_of_ids(case):
    model = wrapped(case)
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    output = model(inputs_embeds=embeddings, attention_mask=MASK, labels=IDS)
    expected = model(IDS, attention_mask=MASK, labels=IDS)
    real = MASK.bool()
    assert torch.equal(output.logits[real], expected.logits[real])
    output.loss.backward()
    assert embeddings.grad.abs().sum() > 0
    ask = {"attention_mask": MASK, "max_new_tokens": 5, "min_new_tokens": 5}
    written = model.generate(inputs_embeds=embeddings, **ask)
    assert written.tolist() == model.generate(IDS, **ask)[:, 7:].tolist()
    beams = model.generate(inputs_embeds=embeddings, num_beams=2, **ask)
    assert beams.tolist() == model.generate(IDS, num_beams=2, **ask)[:, 7:].tolist()


def test_inputs_that_do_not_fit_are_refused():
    model = wrapped("preset:transformer-nano")
    embeddings = model.get_input_embeddings()(IDS)
    for both in ({}, {"input_ids": IDS, "inputs_embeds": embeddings}):
        with pytest.raises(InputError, match="input_ids or inputs_embeds, and not both"):
            model(**both)
    for wrong in (embeddings[..., :-1], embeddings.float(), embeddings[0], embeddings[:, :0]):
        with pytest.raises(InputError, match=r"embeddings \(batch, time >= 1, \d+\) torch.float64"):
            model(inputs_embeds=wrong)
