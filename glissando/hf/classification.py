"""A class for each text, from what a language model reads at its last token."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from glissando.errors import InputError
from glissando.hf.base import GlissandoPreTrainedModel
from glissando.hf.config import GlissandoConfig
from glissando.model import LanguageModel
from glissando.series import last


class GlissandoForSequenceClassification(GlissandoPreTrainedModel):
    """scores = W f, f (B, D) the input of the language model's head at the last real token of each row, W (labels, D).

    W is new where only a language model was saved. Padding is what attention_mask says, on either side.
    """

    own_options: ClassVar[frozenset[str]] = frozenset({"num_labels", "id2label", "label2id", "problem_type"})
    own_weights: ClassVar[frozenset[str]] = frozenset({"score.weight"})

    def __init__(self, config: GlissandoConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(self.model.width, config.num_labels, bias=False)
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel, **options: Any) -> Self:
        """The same model, not a copy of it, and a new W.

        options  num_labels (2 by default), id2label, label2id, problem_type
        """
        wrapped, like = super().of(model, **options), model.embedding.weight
        wrapped.score.to_empty(device=like.device).to(like.dtype)
        wrapped._init_weights(wrapped.score)
        return wrapped

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.score:
            nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        control: Tensor | None = None,
        dt: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **absent: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """input_ids (B, T) -> logits (B, labels), other arguments as GlissandoForCausalLM's.

        labels  (B,) classes, or numbers for a regression, as config.problem_type says

        Raises InputError where rows end in the padding token and no attention_mask says whether it is padding.
        """
        self._require_absent(absent)
        if attention_mask is None and input_ids is not None and len(input_ids) > 1:
            self._require_no_padding(input_ids)
        features, hidden = self._read(
            input_ids, inputs_embeds, attention_mask, None, output_hidden_states, control=control, dt=dt
        )
        logits = self.score(last(features, None if attention_mask is None else attention_mask.bool()))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        output = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=hidden)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _require_no_padding(self, ids: Tensor) -> None:
        pad = self.config.pad_token_id
        rows = torch.nonzero(ids[:, -1] == pad).flatten().tolist() if pad is not None else []
        if rows:
            raise InputError(
                f"row {rows[0]} of input_ids ends in {pad}, which pads rows and also ends texts: give attention_mask, "
                "0 at padding, as the tokenizer returns it"
            )
