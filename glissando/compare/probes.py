"""The probes by name: a generated corpus with the settings that its figures are published for.

Adding one is its line in `PROBES`. A name with a number is a load: recall of so many pairs, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from glissando.errors import unknown_name


class Probe(NamedTuple):
    """A corpus with its options, and what a reader must know to set its figures beside others."""

    corpus: str
    options: dict[str, Any]
    about: str
    seq_len: int
    batch_size: int = 32

    def data(self) -> dict[str, Any]:
        """As a data section."""
        sizes = {"seq_len": self.seq_len, "batch_size": self.batch_size}
        return {"corpus": self.corpus, **sizes, self.corpus: dict(self.options)}


def _recall(pairs: int) -> Probe:
    about = f"{pairs} pairs, all asked for; Arora et al. 2023 (MQAR), without filler and with 47 keys and values"
    return Probe("recall", {"pairs": pairs}, about, 4 * pairs)


_MAMBA = "Gu and Dao 2023"
_AFTER = "after Merrill et al. 2024"
PROBES: dict[str, Probe] = {
    "recall-8": _recall(8),
    "recall-16": _recall(16),
    "recall-32": _recall(32),
    "copy": Probe("copy", {}, "10 symbols of 8, T = 100; Arjovsky et al. 2016", 128),
    "induction": Probe("induction", {"length": 256}, f"length 256, 16 tokens; {_MAMBA}", 257),
    "selective_copy": Probe("selective_copy", {}, f"16 symbols in 128 (published: 4096), 16 tokens; {_MAMBA}", 145),
    "selective_copy-4096": Probe(
        "selective_copy", {"length": 4096}, f"16 symbols in 4096, 16 tokens; {_MAMBA}", 4113, 4
    ),
    "parity": Probe("parity", {}, "1 to 40 bits, of every prefix, held out alike; lengths of Delétang et al. 2023", 64),
    "tracking": Probe("tracking", {"items": 5}, f"S5, 1 to 40 moves of three: none, a swap, a turn; {_AFTER}", 64),
}


def select_probes(names: Sequence[str]) -> list[str]:
    """The probes so named and those whose names begin so: `recall` is every recall-...

    A name that is a probe is that probe alone: `selective_copy` is not `selective_copy-4096`.

    Raises UnknownNameError for a name that is no probe and begins none.
    """
    chosen: list[str] = []
    for name in names:
        found = [name] if name in PROBES else [probe for probe in PROBES if probe.startswith(f"{name}-")]
        if not found:
            raise unknown_name("probe", name, {*PROBES, *(probe.partition("-")[0] for probe in PROBES)})
        chosen += found
    return list(dict.fromkeys(chosen))
