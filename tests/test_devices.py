"""--device of the commands that run a model."""

from __future__ import annotations

import pytest
import torch

from glissando.cli import main
from glissando.errors import ConfigError
from glissando.machine import available_devices, find_device
from glissando.model import LanguageModel

COMMANDS = {
    "generate": ["--prompt", "a"],
    "evaluate": [],
    "steer": ["--out", "steered"],
    "serve": ["--port", "0"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("devices")
    model = LanguageModel.from_config({"hidden_size": 16, "mixer": "spectral", "depth": {"layers": 1}})
    model.save(folder / "run")
    return str(folder / "run")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_that_is_not_there_is_an_error_that_names_those_that_are(command, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([command, run, *COMMANDS[command], "--device", "hpu"]) == 2
    printed = capsys.readouterr().err
    assert "--device hpu is not available here" in printed
    assert "available: auto, cpu" in printed


def test_auto_is_the_accelerator_or_the_cpu(monkeypatch):
    assert find_device("auto").type == available_devices()[-1]
    assert find_device("cpu") == torch.device("cpu")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert find_device("auto").type == "cuda"
    assert find_device("cuda:1") == torch.device("cuda:1")
    for wrong in ("cuda:2", "cuda:x", "cpu:1", "mps", "Cuda", ""):
        with pytest.raises(ConfigError, match=r"available: auto, cpu, cuda \(2|available: auto, cpu, cuda\."):
            find_device(wrong)


def test_the_commands_run_where_they_are_reported(run, capsys, monkeypatch):
    moved: list[object] = []
    to = LanguageModel.to
    monkeypatch.setattr(LanguageModel, "to", lambda self, *given: (moved.extend(given), to(self, *given))[1])
    given = ["--prompt", "ab", "--max_tokens", "3", "--seed", "1", "--step", "plain"]
    texts = []
    for device in ("cpu", "auto"):
        assert main(["generate", run, *given, "--device", device, "--weights", "bf16", "--threads", "1"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] or find_device("auto").type != "cpu"
    assert main(["evaluate", run, "--device", "auto", "--data.valid_rows", "1", "--threads", "1"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert [str(device) for device in moved] == ["cpu", *[str(find_device("auto"))] * 2]
