"""One contract: a text read at once, in pieces, or token by token gives the same logits and the same state.

python examples/split_law.py
"""

from __future__ import annotations

import argparse

import torch

import glissando
from glissando.presets import preset_names
from glissando.state import state_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a shorter text")
    length = 12 if parser.parse_args().quick else 512
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (1, length))
    print(f"{'preset':28}{'in pieces':>12}{'by token':>12}{'state bytes':>14}")
    for name in preset_names():
        if not name.endswith("-nano"):
            continue
        model = glissando.LanguageModel.from_preset(name).double().eval()
        with torch.no_grad():
            whole, _ = model(ids)
            halves, state = read(model, ids, [length // 3, length])
            tokens, state = read(model, ids, list(range(1, length + 1)))
        gaps = [float((part - whole).abs().max()) for part in (halves, tokens)]
        print(f"{name:28}{gaps[0]:12.1e}{gaps[1]:12.1e}{state_bytes(state):14,}")
        assert max(gaps) < 1e-9


def read(model: glissando.LanguageModel, ids: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, object]:
    """The logits of the pieces that end at `ends`, joined, and the state after them."""
    state, logits, start = model.init_state(batch_size=1), [], 0
    for end in ends:
        piece, state = model(ids[:, start:end], state, donate=True)
        logits.append(piece)
        start = end
    return torch.cat(logits, 1), state


if __name__ == "__main__":
    main()
