"""The probes by name: a generated corpus with the settings that its figures are published for.

A name with a number is a load: recall of so many pairs, and so on. `register_probe` adds one from any file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from glissando.errors import ConfigError, unknown_name


class Probe(NamedTuple):
    """data: a data section, {kind: recall, pairs: 8, ...}; about: what a reader must know to set its figures beside
    others."""

    data: Mapping[str, Any]
    about: str


PROBES: dict[str, Probe] = {}


def register_probe(name: str, data: Mapping[str, Any], about: str = "") -> Probe:
    """Add a probe for `glissando compare --probes NAME`: a corpus whose answers are scored.

    Args:
        name: Name of the probe.
        data: Data section of its corpus, such as {"kind": "recall", "pairs": 8, "seq_len": 32}.
        about: Setting and source, for the report.

    Raises:
        ConfigError: Another probe has the name.
    """
    probe = Probe(dict(data), about)
    if PROBES.setdefault(name, probe) != probe:
        raise ConfigError(f"probe {name!r} is registered already, as {PROBES[name]}; choose another name")
    return probe


for _pairs in (8, 16, 32):
    register_probe(
        f"recall-{_pairs}",
        {"kind": "recall", "pairs": _pairs, "seq_len": 4 * _pairs},
        f"{_pairs} pairs, all queried; Arora et al. 2023 (MQAR), without filler and with 47 keys and values",
    )
for _pairs, _length, _rows in ((64, 512, 8), (256, 2048, 2)):
    register_probe(
        f"mqar-{_pairs}",
        {"kind": "mqar", "pairs": _pairs, "seq_len": _length, "batch_size": _rows, "valid_rows": 64},
        f"{_pairs} pairs in {_length:,} tokens, vocabulary 8,192, queries spread by a power law; Arora et al. 2023",
    )
register_probe("copy", {"kind": "copy", "seq_len": 128}, "10 symbols of 8, T = 100; Arjovsky et al. 2016")
register_probe(
    "induction", {"kind": "induction", "length": 256, "seq_len": 257}, "length 256, 16 tokens; Gu and Dao 2023"
)
register_probe(
    "selective_copy",
    {"kind": "selective_copy", "seq_len": 145},
    "16 symbols in 128 (published: 4096), 16 tokens; Gu and Dao 2023",
)
register_probe(
    "selective_copy-4096",
    {"kind": "selective_copy", "length": 4096, "seq_len": 4113, "batch_size": 4},
    "16 symbols in 4096, 16 tokens; Gu and Dao 2023",
)
register_probe(
    "parity",
    {"kind": "parity", "seq_len": 64},
    "1 to 40 bits, of every prefix, held out alike; lengths of Delétang et al. 2023",
)
register_probe(
    "tracking",
    {"kind": "tracking", "items": 5, "seq_len": 64},
    "S5, 1 to 40 moves of three: none, a swap, a rotation; after Merrill et al. 2024",
)


def select_probes(names: Sequence[str]) -> list[str]:
    """The probes of these names, and those that a name begins: `recall` is every recall-...

    A name that is a probe is that probe alone: `selective_copy` is not `selective_copy-4096`.

    Raises UnknownNameError for a name that is no probe and begins none.
    """
    chosen: list[str] = []
    for name in names:
        matches = [name] if name in PROBES else [probe for probe in PROBES if probe.startswith(f"{name}-")]
        if not matches:
            raise unknown_name("probe", name, {*PROBES, *(probe.partition("-")[0] for probe in PROBES)})
        chosen += matches
    return list(dict.fromkeys(chosen))
