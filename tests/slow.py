"""Cases of a test of which some are slow."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_where(slow: Container[str], cases: Iterable[str]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`; `make slow` alone tries those in `slow`."""
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]
