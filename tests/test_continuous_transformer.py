"""The Continuous Transformer through the ordinary verbs: its own settings on a text, resumed, evaluated, drawn."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from tolerances import assert_close
from training_runs import assert_same_tensors, call, last_checkpoint, metrics, rewind, text_file, weights

from benchmarks.flow import kept_bytes
from benchmarks.rows import ROWS, select
from glissando.checkpoints import checkpoint_step
from glissando.cli import main
from glissando.mixers.spectral import Spectral
from glissando.model import LanguageModel
from glissando.runs import Run
from research.pictures import base_rates


def options(folder, out, steps: int) -> list[str]:
    """The preset with only its size changed; non-ASCII letters among the words."""
    text = text_file(folder)
    text.write_text("é".join(text.read_text().split(" ")[i] + " " for i in range(1500)))
    small = [
        "--model.hidden_size=12",
        "--data.seq_len=64",
        "--data.stride=16",
        "--data.ascii_only=true",
        f"--training.steps={steps}",
    ]
    often = ["--training.log_every=1", "--training.save_every=2", "--training.sample_every=4"]
    files = ["--data.kind=text", f"--data.path={text}", "--data.max_valid_bytes=300", f"--out={out}"]
    return ["train", "--preset=continuous-transformer", *small, *often, *files, "--training.validate_every=4"]


def test_the_preset_trains_samples_resumes_and_is_drawn(tmp_path, capsys):
    whole = tmp_path / "whole"
    assert main(options(tmp_path, whole, 4)) == 0
    config = Run.open(whole).read_config()
    assert config["training"]["schedule"]["kind"] == "homeostatic"
    assert config["training"]["gradient_checkpointing"] is True
    assert (config["data"]["stride"], config["data"]["ascii_only"]) == (16, True)
    assert "--- step 4" in (whole / "samples.txt").read_text()
    # The homeostatic rate: base * sigmoid(1 / (|grad| + 1e-6) - 0.5).
    for row in metrics(whole):
        factor = torch.sigmoid(torch.tensor(1 / (float(row["grad_norm"]) + 1e-6) - 0.5))
        assert float(row["learning_rate"]) == pytest.approx(3e-4 * factor.item(), rel=1e-3)
    # Going on from an earlier checkpoint ends at the same weights, optimizer and data position.
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    rewind(cut, min(checkpoint_step(path) for path in (cut / "checkpoints").iterdir()))
    expected = weights(whole), last_checkpoint(whole).optimizer
    assert main(["train", "--resume", str(cut)]) == 0
    assert_same_tensors((weights(cut), last_checkpoint(cut).optimizer), expected)
    capsys.readouterr()
    pictures = tmp_path / "pictures"
    assert main(["evaluate", str(whole), "--json", "--plots", str(pictures)]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] > 0
    assert (pictures / "loss.png").is_file()


def test_memory_is_linear_in_time():
    model = LanguageModel.from_preset("continuous-transformer", hidden_size=32)
    model.depth.gradient_checkpointing = False
    ids = torch.randint(0, 256, (1, 2048))
    few, many = (kept_bytes(lambda row=row: model(row)[0], ()) for row in (ids[:, :1024], ids))
    assert many <= 2.05 * few


def test_base_rates_are_those_of_the_dynamics():
    """With r = 0 the decay is e^-gamma, in the picture and in the recurrence alike."""
    torch.manual_seed(0)
    mixer = Spectral(8)
    mixer.reset_parameters()
    with torch.no_grad():
        gamma, turn = base_rates(mixer)
        mixer.project.weight.zero_()
        state = mixer.init_state(1)._replace(h=torch.randn(1, 8, 2))
        after = mixer(torch.zeros(1, 1, 8), state)[1]
    ratio = torch.view_as_complex(after.h[0]) / torch.view_as_complex(state.h[0])
    assert_close(torch.view_as_real(ratio), torch.view_as_real(torch.exp(torch.complex(-gamma, turn))))
    times = (1 / gamma).sort().values
    assert_close(times[[0, -1]], torch.tensor([1.0, 32.0]))


def test_benchmarks_are_chosen_by_name_or_beginning():
    assert select([]) == list(ROWS)
    chosen = select(["hf-training-512-bf16", "spectral"])
    assert chosen[0] == "hf-training-512-bf16"
    assert "spectral-training" in chosen
    with pytest.raises(ValueError, match="spectral-decoding"):
        select(["spectral-decodin"])


@pytest.mark.slow
@pytest.mark.serial
def test_large_blocks_are_kept_by_the_process():
    """In a process of its own: the tests' allocator stays as it is."""
    program = """
import platform, resource, torch
from glissando.allocator import prepare_to_train
prepare_to_train()
if platform.libc_ver()[0] != "glibc":
    raise SystemExit(77)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(24_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# Small blocks cut into freed large ones at first; it settles once there is a spare one.
first, *rest = [faults() for _ in range(40)]
assert max(rest[-10:]) < first / 20, (first, rest)
"""
    ended = call([sys.executable, "-c", program])
    if ended.returncode == 77:
        pytest.skip("this C library's allocator has no such setting")
    assert ended.returncode == 0, ended.stderr
