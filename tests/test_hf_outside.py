"""A saved model in other people's tools: a process that has not imported this library, and LoRA by peft."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from slow import slow_where
from subjects import build
from tolerances import assert_close

from glissando.data.tokenizers import ByteTokenizer
from glissando.generation import generate

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from glissando.hf import GlissandoConfig, GlissandoForCausalLM, fast_tokenizer  # noqa: E402
from glissando.model import LanguageModel  # noqa: E402

FRESH = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
assert AutoConfig.from_pretrained(path, trust_remote_code=True).model_type == "glissando"
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
batch = tokenizer(["Once upon"], return_tensors="pt")
ids = model.generate(**batch, max_new_tokens=8, do_sample=False)
print(repr(tokenizer.decode(ids[0][batch["input_ids"].shape[1]:], skip_special_tokens=True)))
"""


def test_the_module_beside_the_weights_has_the_classes_that_the_configuration_names(tmp_path, monkeypatch):
    """What the Auto classes import where nothing of ours is."""
    from transformers import dynamic_module_utils

    model = GlissandoForCausalLM.of(LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}))
    model.save_pretrained(tmp_path / "saved")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    named = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    classes = dynamic_module_utils.get_class_from_dynamic_module
    opened = {auto: classes(name, tmp_path / "saved") for auto, name in named.items()}
    assert opened == {"AutoConfig": GlissandoConfig, "AutoModelForCausalLM": GlissandoForCausalLM}


@pytest.mark.slow
def test_the_auto_classes_open_it_without_an_import_of_ours(tmp_path):
    model = GlissandoForCausalLM.of(LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}))
    model.save_pretrained(tmp_path / "saved")
    fast_tokenizer(ByteTokenizer()).save_pretrained(tmp_path / "saved")
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    assert fresh.returncode == 0, fresh.stderr
    written = generate(model.model, "Once upon", max_tokens=8, temperature=0)[0]
    assert fresh.stdout.strip() == repr(written)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft's, of transformers
@pytest.mark.parametrize(
    "case",
    slow_where(
        {"preset:transformer-plus-nano", "preset:tauformer-nano", "preset:liquid-ssm-nano"},
        ["preset:transformer-plus-nano", "preset:tauformer-nano", "preset:liquid-ssm-nano", "depth:flow"],
    ),
)
def test_peft_trains_a_lora(case, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    model = GlissandoForCausalLM.of(build(case, torch.float32))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = {name: p for name, p in lora.named_parameters() if p.requires_grad}
    # Each map is adapted, but for that of a dial, which is not given here.
    added = [p for name, p in trained.items() if "lora_B" in name and ".control." not in name]
    ids = torch.arange(4).repeat(2, 8) + 1
    optimizer, losses = torch.optim.AdamW(trained.values(), lr=1e-2), []
    for _ in range(10):
        loss = lora(input_ids=ids, labels=ids).loss
        loss.backward()
        assert losses or all(p.grad.abs().max() > 0 for p in added)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0], losses
    lora.save_pretrained(tmp_path / "adapter")
    lora.eval()
    with torch.no_grad():
        adapted = lora(input_ids=ids).logits
        merged = lora.merge_and_unload()
        assert_close(merged(ids).logits, adapted, "merged", 1e-5)
        again = GlissandoForCausalLM.of(build(case, torch.float32))
        again.load_state_dict(before)
        loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
        assert_close(loaded(input_ids=ids).logits, adapted, "loaded", 1e-5)


def test_arguments_that_it_has_no_use_for_are_refused_and_none_is_not():
    model = GlissandoForCausalLM.of(LanguageModel.from_preset("transformer-nano", hidden_size=16, depth={"layers": 1}))
    ids = torch.tensor([[1, 2]])
    assert torch.equal(model(ids, position_ids=None, output_attentions=False).logits, model(ids).logits)
    with pytest.raises(TypeError, match="has no token_type_ids: leave that out"):
        model(ids, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(TypeError, match="has no output_attentions"):
        model(ids, output_attentions=True, position_ids=ids)
