"""What the tests' own settings replace, as it is."""

from __future__ import annotations

from glissando import machine, precision

known_precision = precision.resolved_precision
git_state = machine.git_state
