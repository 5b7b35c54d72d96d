"""transformers' own tests of every model, on a small model of a preset: run by tests/test_hf_common.py."""

from __future__ import annotations

import os
import unittest

import torch

# Packed by tests/test_hf_common.py from transformers' source distribution.
from hftests import test_modeling_common as common

from glissando.config import merge
from glissando.hf import GlissandoConfig, GlissandoForCausalLM
from glissando.model import ModelConfig
from glissando.presets import load_preset

PRESET = os.environ["GLISSANDO_HF_PRESET"]
WIDTH, VOCABULARY = 32, 99
MODEL = load_preset(PRESET)["model"]
#: a flow counts as a layer, and the tests accept two
LAYERS = 1 if MODEL["depth"].get("kind") == "flow" else 2
SMALLER = {"hidden_size": WIDTH, "vocab_size": VOCABULARY, "depth": {"layers": LAYERS}}


class Small:
    """What the tests ask about the model."""

    batch_size, seq_length, is_training = 2, 7, True
    hidden_size = WIDTH

    @property
    def num_hidden_layers(self) -> int:
        return self.get_config().num_hidden_layers

    def get_config(self) -> GlissandoConfig:
        return GlissandoConfig(merge(ModelConfig, MODEL, SMALLER), eos_token_id=0)

    def prepare_config_and_inputs_for_common(self):
        ids = common.ids_tensor([self.batch_size, self.seq_length], VOCABULARY)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class CommonTest(common.ModelTesterMixin, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (GlissandoForCausalLM,)
    has_attentions = False

    def setUp(self) -> None:
        self.model_tester = Small()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels:  # which they choose by names of classes that they know
            inputs["labels"] = inputs["input_ids"]
        return inputs
