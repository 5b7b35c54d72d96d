"""What the tests of the playground share: a browser, two models that are served, and visits to them."""

from __future__ import annotations

import pytest

# playground needs playwright, without which these files are skipped: it is imported late.


@pytest.fixture(scope="package")
def first_page():
    from playground import browsing

    with browsing() as page:
        yield page


@pytest.fixture(scope="package")
def liquid():
    from playground import served

    with served("liquid-ssm-nano") as liquid:
        yield liquid


@pytest.fixture(scope="package")
def hybrid():
    from playground import served

    with served("hybrid-ode-nano") as hybrid:
        yield hybrid


@pytest.fixture
def visit(first_page):
    from playground import visiting

    with visiting(first_page) as visit:
        yield visit
