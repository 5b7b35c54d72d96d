"""The experiments on series: whole series are held out, peers compute what ncps does, the follower is exact."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tolerances import assert_close

from research import envelope, irregular_series


@pytest.mark.parametrize("name", ["cfc", "ltc"])
def test_batches_are_single_rows_of_ncps(name: str):
    """Its own modules, given one row at a time, as their batches of times cannot be trusted."""
    networks = pytest.importorskip("ncps.torch")
    wirings = pytest.importorskip("ncps.wirings")
    ours = getattr(irregular_series, name)(3, 5)
    theirs = networks.CfC(3, 5, backbone_units=10) if name == "cfc" else networks.LTC(3, wirings.FullyConnected(5))
    theirs.rnn_cell.load_state_dict(ours.cell.state_dict())
    x, dt = torch.randn(4, 7, 3), 0.2 + torch.rand(4, 7)
    with torch.no_grad():
        rows = [ours.head(theirs(x[i : i + 1], timespans=dt[i : i + 1])[0]) for i in range(4)]
        assert_close(ours(x, dt), torch.cat(rows), "rows", 1e-5)


def test_series_are_split_whole(tmp_path):
    """No value of a held-out file is trained on, and gaps are those of the rows that were dropped."""
    import numpy as np

    for number in range(7):
        np.save(tmp_path / f"{number}.npy", np.arange(60.0).reshape(60, 1) + 1000 * number)
    series = irregular_series.from_folder(tmp_path, drop=0.3)
    assert all(20 < len(values) < 60 for values, _ in series)
    train, valid, test = irregular_series.split(series, 8)
    seen, chosen, held = (set((1e5 * part.x).round().flatten().tolist()) for part in (train, valid, test))
    assert not (seen & chosen) | (seen & held) | (chosen & held)
    scale = float((train.target - train.x).abs().max() / train.dt.max())
    for part in (train, valid, test):
        assert_close(part.target - part.x, scale * part.dt.unsqueeze(-1), "values rise by 1 a row", 1e-4)
    assert float(train.dt.max()) > 1


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (None, ["--data", "nowhere"], "--data nowhere is not there; name a folder"),
        (None, ["--data", "a.txt"], "--data a.txt is a file; name a folder"),
        ({}, ["--data", "traces"], "traces holds 0 .npy files; at least 4"),
        ({0: [[math.nan]] * 40}, [], "0.npy: 40 of its 40 values are not finite"),
        ({0: [["a"]] * 40}, [], r"0.npy must hold real numbers \(time, features\), got <U1"),
        ({0: [[1j]] * 40}, [], "0.npy must hold real numbers .*complex128"),
        ({0: [1.0] * 40}, [], r"0.npy must hold real numbers .*\(40,\)"),
        ({3: [[1.0, 2.0]] * 40}, [], "3.npy has 2 features and .*0.npy 1; all need the same"),
        ({}, ["--window", "100"], "no series to train has the 101 rows .*; take a smaller --window, now 100"),
    ],
)
def test_unusable_series_are_rejected(tmp_path, monkeypatch, made, options, message):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    Path("traces").mkdir()
    if "--data" not in options:
        options = ["--data", "traces", *options]
        for number in range(5):
            np.save(f"traces/{number}.npy", np.array((made or {}).get(number, np.arange(40.0).reshape(40, 1).tolist())))
    monkeypatch.setattr("sys.argv", ["irregular_series", "--drop", "0", *options])
    with pytest.raises(SystemExit, match=message):
        irregular_series.main()


@pytest.mark.parametrize("option", ["--epochs", "--seeds", "--window", "--rates"])
def test_nothing_to_train_is_rejected(option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["irregular_series", option, "0"])
    with pytest.raises(SystemExit):
        irregular_series.main()
    assert f"argument {option}: must be " in capsys.readouterr().err


def test_the_series_of_a_folder_are_compared(tmp_path, monkeypatch, capsys):
    import numpy as np

    rng = np.random.default_rng(0)
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", rng.normal(size=(60, 2)).cumsum(0))
    words = ["--quick", "--models", "liquid", "GRU, dt a feature", "--data", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["irregular_series", *words])
    irregular_series.main()
    printed = capsys.readouterr().out
    assert "5 series, 2 features; windows of 16 steps" in printed
    assert [line.split("  ")[0] for line in printed.splitlines() if "0.01 " in line] == ["liquid", "GRU, dt a feature"]
    assert "time constants of liquid, seed 0" in printed


@pytest.mark.parametrize("name", [name for name in irregular_series.MODELS if name.startswith("delta")])
def test_delta_ages_its_state_and_reads_the_time(name):
    model = irregular_series.MODELS[name](3, 6)
    x, dt = torch.randn(2, 5, 3), torch.rand(2, 5)
    seen = model.model(torch.cat([x, dt.unsqueeze(-1)], -1), dt=dt)[0]
    assert torch.equal(model(x, dt), seen)
    for other in (model.model(torch.cat([x, dt.unsqueeze(-1)], -1))[0], model(x, 2 * dt)):
        assert not torch.equal(other, seen)


def test_the_envelope_rises_fast_and_falls_slowly():
    u, e = envelope.signals(3, 40, seed=0)
    follower = 0.0
    for now, level in zip(u[1], e[1], strict=True):
        share = 2.0 if now > follower else 40.0
        follower = math.exp(-1 / share) * follower + (1 - math.exp(-1 / share)) * now
        assert level == pytest.approx(follower)
    train, other = envelope.standardised([(u, e), envelope.signals(5, 20, seed=1)])
    assert float(train.target.mean()) == pytest.approx(0, abs=1e-5)
    assert not set(train.x.flatten().tolist()) & set(other.x.flatten().tolist())
