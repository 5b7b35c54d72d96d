"""How a whole model grows: the table of its parameters, see glissando.growth.lifts."""

from __future__ import annotations

from torch import nn

from glissando.growth.depths import depth_table
from glissando.growth.lifts import Grows, Reads, Table, append, grow_norm, linear, tables, tile, under
from glissando.model import ComplexHead, LanguageModel


def model_table(model: LanguageModel, grown: LanguageModel) -> Table:
    """How every parameter and buffer goes into those of `grown`."""
    size = tile(model.config.hidden_size, grown.config.hidden_size)
    pair = model.width // model.config.hidden_size
    width = size * tile(pair, pair)
    words = append(model.config.vocab_size, grown.config.vocab_size)
    table = under("embedding", {"weight": Grows(words, size)})
    table |= under("depth", depth_table(model.depth, grown.depth, width))
    if model.position_embedding is not None:
        places = model.position_embedding.num_embeddings
        table |= under("position_embedding", {"weight": Grows(tile(places, places), size)})
    table |= tables({"lift": linear(model.lift, width, size), "norm": grow_norm(model.norm, width)})
    if isinstance(model.head, ComplexHead):
        bias = {} if model.head.bias is None else {"bias": Grows(words, tile(2, 2))}
        table |= under("head", {"weight": Grows(words, Reads(size), tile(2, 2)), **bias})
    elif isinstance(model.head, nn.Linear):
        table |= under("head", linear(model.head, words, width))
    return table if model.head_bias is None else table | {"head_bias": Grows(words)}
