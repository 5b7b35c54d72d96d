"""Garbage is not searched for while tests are collected: modules and cases stay, and the search takes long."""

import gc

import pytest

gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.freeze()
    gc.enable()
