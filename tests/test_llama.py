"""The baseline is the field's own: with the same weights, Hugging Face's Llama computes the same logits."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_close

from glissando.model import LanguageModel


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_transformer_is_llama(kv_heads: int):
    pytest.importorskip("transformers", reason="needs transformers, the peer of the comparison")
    from benchmarks.speed import llama_like

    model = LanguageModel.from_preset("transformer-nano", mixer={"kind": "attention", "kv_heads": kv_heads}).double()
    peer = llama_like(model.float()).double()
    model = model.double()
    ids = torch.randint(0, 256, (2, 70))
    with torch.no_grad():
        # Hugging Face computes the rotation and its norms in float32 whatever the model's dtype.
        assert_close(model(ids)[0], peer(ids).logits, "logits", tolerance=1e-5)
    assert model.num_parameters() == sum(p.numel() for p in peer.parameters())
