"""The comparison with llama.cpp: it needs another Python, which it names where it cannot use it."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.__main__ import main

PYTHON = os.environ.get("GLISSANDO_LLAMA_PYTHON")


def test_a_python_that_cannot_start_llama_cpp_is_named(tmp_path, capsys):
    pytest.importorskip("gguf")
    assert main(["llama", "--python", str(tmp_path / "python")]) == 1
    assert "a Python with llama-cpp-python, got" in capsys.readouterr().err
    package = tmp_path / "llama_cpp.py"
    package.write_text("raise ImportError('broken')")
    wrapper = tmp_path / "other"
    wrapper.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    assert main(["llama", "--python", str(wrapper)]) == 1
    error = capsys.readouterr().err
    assert "ImportError: broken" in error
    assert "pip install llama-cpp-python" in error


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="set GLISSANDO_LLAMA_PYTHON to a Python with llama-cpp-python")
def test_llama_cpp_decodes_what_is_exported(capsys):
    """It raises where llama.cpp's logits differ."""
    assert main(["llama", "--python", str(PYTHON), "--rounds", "1", "--contexts", "600"]) == 0
    assert capsys.readouterr().out.count("tokens/s  ratio") == 6
