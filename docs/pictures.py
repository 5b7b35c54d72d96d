"""Pictures of the documents, drawn as SVG from the records of docs/comparison; `make test` compares the two.

python docs/pictures.py            says which picture is not what its records say, and fails if any is not
python docs/pictures.py --write    draws them all, into docs/pictures
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import yaml
from diagrams import laws, leaking_state, parts
from drawing import DOCS, Chart, rows, ticks

FOLDER = DOCS / "pictures"
#: of the models that are recommended, everywhere alike
MODEL = {
    "spectral-delta-nano": "blue", "composite-nano": "green", "hybrid-ode-nano": "red",
    "transformer-plus-nano": "orange", "liquid-ssm-nano": "grey", "delta-nano": "violet",
}  # fmt: skip

#: of the models of research/forgetting.py
FORGETFUL = {
    "delta-wide-far": "red", "delta-far": "orange", "delta-wide": "violet", "spectral-delta": "green",
    "delta": "blue", "window": "ink", "spectral": "grey", "liquid": "grey",
}  # fmt: skip

_CONTEXTS = {256: "256", 1024: "1,024", 4096: "4,096", 16384: "16,384"}
#: the entropy of the 128 held-out stories, in bits per byte: tests tie it to the code
FLOOR = 0.2893


def learning_curves() -> str:
    chart = Chart(
        "What a million parameters learn",
        "Held-out bits per byte after 2, 8.1 and 33.4 MB of stories, and their floor.",
        ("stories read in training (MB); a mark is a seed", ticks(2, 8.1, 33.4)),
        ("held-out bits per byte", ticks(0.25, 0.3, 0.35, 0.4, 0.45, 0.5)),
        (1.7, 39),
        (0.25, 0.505),
        "x",
    )
    bits = _bits()
    chart.line([(1.7, FLOOR), (39, FLOOR)], "red", 1.5, ' stroke-dasharray="5 4"')
    chart.label(1.8, FLOOR, f"exact floor {FLOOR:.3f}: no model can be lower", "red", by=(0, 17))
    places = {
        "transformer-plus-nano": (8.1, 0.413, "start", (10, 0)),
        "composite-nano": (2, 0.473, "start", (58, 5)),
        "spectral-delta-nano": (1.8, 0.322, "start", (0, 0)),
        "delta-nano": (8.1, 0.326, "start", (8, 0)),
    }
    for name, (x, y, anchor, by) in places.items():
        line = [(size / 1e6, seeds) for (size, model), seeds in sorted(bits.items()) if model == name]
        chart.line([(size, sum(seeds) / len(seeds)) for size, seeds in line], MODEL[name])
        for size, seeds in line:
            for value in seeds:
                chart.mark(size, value, MODEL[name], 3)
        chart.label(x, y, name, MODEL[name], anchor, by)
    return chart.svg()


def _bits() -> dict[tuple[int, str], list[float]]:
    """(bytes, model): held-out bits per byte of each seed, of stories."""
    found: dict[tuple[int, str], list[float]] = {}
    for row in rows("recipe"):
        if row["corpus"] == "stories":
            found.setdefault((int(row["bytes"]), row["model"]), []).append(float(row["bits_per_byte"]))
    return found


def state_size() -> str:
    chart = Chart(
        "What a model keeps of what it read",
        "Bits per byte against bytes of state.",
        (
            "state of one text (bytes), after 256 to 16,384 tokens",
            {1e5: "100 k", 1e6: "1 M", 1e7: "10 M", 1e8: "100 M"},
        ),
        ("held-out bits per byte after 8.1 MB", ticks(0.28, 0.32, 0.36, 0.40, 0.44)),
        (3e4, 1.5e8),
        (0.27, 0.45),
        "x",
    )
    bits = _bits()
    sizes: dict[str, list[float]] = {}
    for row in rows("decoding"):
        sizes.setdefault(row["model"], []).append(float(row["state_bytes"]))
    chart.line([(3e4, FLOOR), (1.5e8, FLOOR)], "red", 1.5, ' stroke-dasharray="5 4"')
    chart.label(1.4e8, FLOOR, f"floor {FLOOR:.3f}", "red", "end", (0, 16))
    for name in ("spectral-delta-nano", "composite-nano", "transformer-plus-nano"):
        seeds = bits[8_100_000, name]
        mean = sum(seeds) / len(seeds)
        low, high = min(sizes[name]), max(sizes[name])
        if high > low:
            chart.line([(low, mean), (high, mean)], MODEL[name], 4)
        chart.mark(low, mean, MODEL[name], 5)
        chart.mark(high, mean, MODEL[name], 5)
        side = "start" if name == "spectral-delta-nano" else "end"
        chart.label(
            low if side == "start" else high, mean, name, MODEL[name], side, (-4 if side == "start" else 4, -12)
        )
        if high == low:
            chart.label(low, mean, "never grows:", MODEL[name], by=(-4, -28))
    return chart.svg()


def milliseconds() -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows("decoding"):
        points.setdefault(row["model"], []).append((float(row["context"]), float(row["milliseconds"])))
    chart = Chart(
        "What a token costs",
        "Milliseconds of one core for a token against tokens read before it.",
        ("tokens read before", dict(_CONTEXTS)),
        ("CPU time of a token (ms), compiled step", ticks(0, 2, 4, 6, 8, 10)),
        (220, 19000),
        (0, 10),
        "x",
    )
    for name, line in points.items():
        chart.line(line, MODEL[name])
        for point in line:
            chart.mark(*point, MODEL[name])
    chart.label(256, 9, "from the top:", "soft")
    for place, name in enumerate(sorted(points, key=lambda name: -points[name][-1][1]), 1):
        chart.label(256, 9, name, MODEL[name], by=(0, 18 * place))
    return chart.svg()


def flow() -> str:
    chart = Chart(
        "One flow, five settings of its dial",
        "Paths of the representation over depth for five settings of the mood dial.",
        ("distance from the start, sad left, happy right", ticks(-1, -0.5, 0, 0.5, 1)),
        ("distance that all settings share", ticks(0, 0.5, 1, 1.5)),
        (-1.2, 1.2),
        (-0.2, 1.5),
        height=330,
    )
    colours = {"-1": "orange", "-0.5": "orange", "0": "grey", "0.5": "blue", "1": "blue"}
    paths: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows("flow"):
        paths.setdefault((row["u"], row["prompt"]), []).append((float(row["apart"]), float(row["along"])))
    for (u, prompt), points in paths.items():
        if prompt != "mean" and u in ("-1", "1"):
            chart.line(points, colours[u], 1, ' opacity="0.4"')
    for (u, prompt), points in paths.items():
        if prompt == "mean":
            chart.line(points, colours[u], 3 if u in ("-1", "0", "1") else 2)
            chart.mark(*points[-1], colours[u], 4)
            words = {"-1": "u = -1, sad", "0": "u = 0", "1": "u = 1, happy"}.get(u)
            if words:
                chart.label(*points[-1], words, colours[u], {"-1": "end", "0": "middle"}.get(u, "start"), (0, -12))
    return chart.svg()


def forecast() -> str:
    record = [{name: float(value) for name, value in row.items() if value} for row in rows("forecast")]
    values = [(row["time"], row["value"]) for row in record if "value" in row]
    ahead = [row for row in record if "low" in row]
    chart = Chart(
        "A forecast at uneven times",
        "Values before and after the time of a forecast, its median and 90 % interval.",
        ("time since the last value that was read (s)", ticks(-15, -10, -5, 0, 5, 10)),
        ("value a, which the packaged model forecasts", ticks(-1.5, -1, -0.5, 0, 0.5, 1, 1.5)),
        (-18.5, 12.5),
        (-1.7, 1.7),
    )
    chart.area(
        [chart.at(row["time"], row["low"]) for row in ahead]
        + [chart.at(row["time"], row["high"]) for row in ahead[::-1]],
        "blue",
        0.22,
    )
    chart.line([(row["time"], row["median"]) for row in ahead], "blue")
    chart.line([(0, -1.7), (0, 1.1)], "soft", 1, ' stroke-dasharray="3 3"')
    for time, value in values:
        chart.mark(time, value, "ink" if time <= 0 else "orange", 3)
    chart.label(-18, 1.55, "values read", "ink")
    chart.label(12.3, 1.25, "median, 90 % interval", "blue", "end")
    chart.label(0.5, -1.45, "what came", "orange")
    return chart.svg()


#: of the picture of hazards
_SECONDS = 20


def hazard() -> str:
    record = rows("hazard")
    curve = [(float(row["time"]), float(row["hazard"]), float(row["truth"])) for row in record if row["hazard"]]
    events = [float(row["time"]) for row in record if not row["hazard"]]
    start = events[len(events) // 2] - 2
    end = start + _SECONDS
    curve = [row for row in curve if start <= row[0] <= end]
    chart = Chart(
        "Each event makes others likelier",
        "The hazard of a model of events beside the true one.",
        ("seconds; a stroke is an event", {start + t: f"{t}" for t in range(0, _SECONDS + 1, 4)}),
        ("hazard (events a second)", ticks(0, 1, 2, 3, 4)),
        (start, end),
        (-0.3, 4.2),
    )
    chart.line([(t, model) for t, model, _ in curve], "blue", 2.6)
    chart.line([(t, truth) for t, _, truth in curve], "orange", 1.6, ' stroke-dasharray="5 3"')
    for t in events:
        if start <= t <= end:
            x, y = chart.at(t, -0.04)
            chart.path([(x, y), (x, y + 12)], "ink", 1.4)
    chart.label(end, 3.9, "the model", "blue", "end")
    chart.label(end, 3.9, "the true process", "orange", "end", (0, 18))
    return chart.svg()


#: layers from the first to the last, and lines of a picture with more of them than MODEL has names
_FIVE = ("blue", "green", "orange", "violet", "red")


def kernels() -> str:
    layers: dict[str, list[tuple[float, float]]] = {}
    for row in rows("kernels"):
        layers.setdefault(row["layer"], []).append((float(row["period"]), float(row["decay_time"])))
    above = Chart(
        "Channels that decay and rotate",
        "Decay time against period of every channel of four spectral layers, and the kernels of four channels.",
        ("period (tokens)", ticks(3, 10, 30, 100, 300)),
        ("decay time (tokens)", ticks(1, 3, 10, 30)),
        (2.5, 420),
        (0.8, 60),
        "xy",
    )
    for place, (layer, channels) in enumerate(layers.items()):
        above.dust(channels, _FIVE[place], 4)
        above.label(2.8, 50, f"layer {layer}", _FIVE[place], by=(0, 6 + 17 * place))
    start = [(6 * t**0.7, t) for t in (1, 32)]
    above.line(start, "ink", 1.5, ' stroke-dasharray="5 4"')
    above.label(400, 0.9, "dashed: before training", "ink", "end")
    layer, channels = list(layers.items())[len(layers) // 2]
    channels = sorted(channels, key=lambda channel: channel[1])
    below = Chart(
        f"Kernels of four channels of layer {layer}",
        "",
        ("age (tokens)", ticks(1, 3, 10, 30, 100)),
        ("Re K(age) = exp(-age / decay time) cos(2\u03c0 age / period)", ticks(-0.5, 0, 0.5, 1)),
        (0.5, 150),
        (-0.75, 1.75),
        "x",
        height=300,
    )
    for place in range(4):
        period, decay = channels[place * (len(channels) - 1) // 3]
        ages = [0.5 * 300 ** (step / 240) for step in range(241)]
        kernel = [(t, math.exp(-t / decay) * math.cos(2 * math.pi * t / period)) for t in ages]
        below.line(kernel, _FIVE[place], 1.8)
        below.label(
            150, 1.75, f"decay time {decay:.2g}, period {period:.2g}", _FIVE[place], "end", (0, 10 + 17 * place)
        )
    return below.below(above).svg()


def dial() -> str:
    record = rows("dial")
    means = [row for row in record if row["prompt"] == "mean"]
    across = ("mood dial, u", ticks(-1.5, -1, -0.5, 0, 0.5, 1, 1.5))
    above = Chart(
        "What the mood dial does",
        "Above: the mood of each text and their mean against u. Below: perplexity of held-out text read at u.",
        across,
        ("mood of the text, judged by the grammar; a dot is a text", ticks(-1, -0.5, 0, 0.5, 1)),
        (-1.65, 1.65),
        (-1.1, 1.1),
        height=290,
    )
    texts = [row for row in record if row["prompt"] != "mean" and row["mood"]]
    apart = [0.07 * (int(row["prompt"]) * 0.618034 % 1 * 2 - 1) for row in texts]
    above.dust([(float(t["u"]) + by, float(t["mood"])) for t, by in zip(texts, apart, strict=True)], "grey", 3.2)
    above.line([(float(row["u"]), float(row["mood"])) for row in means], "blue", 3)
    for row in means:
        above.mark(float(row["u"]), float(row["mood"]), "blue", 4)
    above.label(0.62, -0.55, "mean of 96 texts", "blue")
    costs = [(float(row["u"]), float(row["cost"])) for row in means]
    below = Chart(
        "What it costs",
        "",
        across,
        ("perplexity of held-out text over that without a control", ticks(1, 1.02, 1.04, 1.06)),
        (-1.65, 1.65),
        (0.99, 1.07),
        height=240,
    )
    below.line(costs, "blue")
    for cost in costs:
        below.mark(*cost, "blue")
    return below.below(above).svg()


def dial_baselines() -> str:
    """Success and cost as docs/figures.yaml has them."""
    chart = Chart(
        "The dials, and steering without one",
        "Success in both directions against the perplexity of held-out text, for two dials and two baselines.",
        (
            "perplexity of held-out text against the base's (per cent)",
            {x: f"+{x}" if x else "0" for x in range(0, 60, 10)},
        ),
        ("texts with the requested label (%)", ticks(0, 20, 40, 60, 80, 100)),
        (-4, 60),
        (0, 107),
        height=330,
    )
    figures = yaml.safe_load((DOCS / "figures.yaml").read_text())["dial"]
    ways = {
        "dial": ("the dial", "blue", "start", (9, 19)),
        "addition_at_cost": ("activation addition, as cheap", "violet", "start", (9, 5)),
        "none": ("no steering", "grey", "start", (9, 5)),
        "addition": ("activation addition", "violet", "end", (36, 24)),
        "prefix": ("prompt-prefixing", "orange", "middle", (0, 22)),
    }
    for way, (words, colour, anchor, by) in ways.items():
        (mood, mood_cost), (speech, speech_cost) = figures[way]["mood"], figures[way]["speech"]
        chart.mark(100 * (mood_cost - 1), mood, colour, 5)
        chart.ring(100 * (speech_cost - 1), speech, colour, 5)
        chart.label(100 * (mood_cost - 1), mood, words, colour, anchor, by)
    chart.mark(31, 10, "soft", 5)
    chart.label(31, 10, "mood", "soft", by=(10, 5))
    chart.ring(43, 10, "soft", 5)
    chart.label(43, 10, "speech", "soft", by=(10, 5))
    return chart.svg()


def growth() -> str:
    record = [(int(row["parameters"]), float(row["flops"]), float(row["valid_loss"])) for row in rows("growth")]
    chart = Chart(
        "A model that grows while it trains",
        "Held-out loss against training FLOPs, from 2,648 to 7,232 to 19,328 parameters.",
        ("training FLOPs of all sizes", {1e10: "10\u00b9\u2070", 1e11: "10\u00b9\u00b9", 1e12: "10\u00b9\u00b2"}),
        ("held-out loss (nats a target); at the top: parameters", ticks(0, 1, 2, 3, 4, 5)),
        (3e9, 2.4e12),
        (0, 5.6),
        "x",
        height=330,
    )
    before = 3e9
    for parameters, colour in zip(sorted({size for size, _, _ in record}), _FIVE, strict=False):
        points = [(flops, loss) for size, flops, loss in record if size == parameters]
        chart.line([(before, 0), (before, 5)], "soft", 1.2, ' stroke-dasharray="5 4"')
        chart.label(before, 5.15, f"{parameters:,}", colour, by=(2, 0))
        chart.line(points, colour, 2.6)
        before = points[-1][0]
    return chart.svg()


def forgetting() -> str:
    """Right answers by distance beside 64 other facts."""
    chart = Chart(
        "A fact beside 64 others",
        "Right answers of eight models against the tokens since the fact.",
        ("tokens since the fact", {10.0**p: f"{10**p:,}" for p in (3, 4, 5)}),
        ("right (%)", ticks(0, 20, 40, 60, 80, 100)),
        (250, 4e5),
        (-3, 104),
        "x",
        height=330,
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows("forgetting"):
        if row["others"] == "64":
            middle = math.sqrt(float(row["from"]) * float(row["below"]))
            curves.setdefault(row["model"], []).append((middle, 100 * float(row["accuracy"])))
    for place, (name, colour) in enumerate(FORGETFUL.items(), 1):
        chart.line(curves[name], colour)
        for point in curves[name]:
            chart.mark(*point, colour, 3)
        if place < 6:
            chart.label(280, 96, name, colour, by=(4, 17 * place))
    chart.label(1e3, 27, "window", "ink")
    chart.label(5e3, 6, "spectral, liquid", "grey")
    return chart.svg()


def remembered() -> str:
    """Bits of 65 facts that a state holds against its bytes."""
    chart = Chart(
        "What a state remembers of 65 facts",
        "Bits held by states of eight models, 10,000 and 100,000 tokens after the fact.",
        ("bytes of state", {3e3: "3,000", 1e4: "10,000", 3e4: "30,000", 1e5: "100,000", 3e5: "300,000"}),
        ("bits held from 10,000 tokens (dots), from 100,000 (rings)", ticks(0, 100, 200, 300, 390)),
        (1.7e3, 5e5),
        (-90, 425),
        "x",
        height=330,
    )
    chart.line([(1.7e3, 390), (5e5, 390)], "red", 1.5, ' stroke-dasharray="5 4"')
    chart.label(1.8e3, 390, "all: 65 facts of 6 bits", "red", by=(0, 17))
    places = {
        "delta-wide-far": (9, -7), "delta-far": (9, 5), "delta-wide": (-9, 5), "spectral-delta": (-9, 5),
        "delta": (9, 5), "window": (-9, 4), "spectral": (9, -6), "liquid": (9, 15),
    }  # fmt: skip
    held = {(row["model"], row["from"]): row for row in rows("forgetting") if row["others"] == "64"}
    for name, (x, y) in places.items():
        size, colour = float(held[name, "10000"]["state_bytes"]), FORGETFUL[name]
        near, far = (float(held[name, start]["bits_held"]) for start in ("10000", "100000"))
        chart.mark(size, near, colour, 4)
        chart.ring(size, far, colour, 4)
        chart.label(size, near, name, colour, "start" if x > 0 else "end", (x, y))
    return chart.svg()


PICTURES: dict[str, Callable[[], str]] = {
    draw.__name__.replace("_", "-"): draw
    for draw in (
        learning_curves, state_size, milliseconds, parts, laws, leaking_state, flow, forecast, hazard, kernels, dial,
        dial_baselines, growth, forgetting, remembered,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="draw them all")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    other = [
        name
        for name, draw in PICTURES.items()
        if not (FOLDER / f"{name}.svg").is_file() or draw() != (FOLDER / f"{name}.svg").read_text()
    ]
    for name in other:
        if options.write:
            (FOLDER / f"{name}.svg").write_text(PICTURES[name]())
        else:
            print(f"docs/pictures/{name}.svg is not what its records say; python docs/pictures.py --write draws it")
    return int(bool(other) and not options.write)


if __name__ == "__main__":
    sys.exit(main())
