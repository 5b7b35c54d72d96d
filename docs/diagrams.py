"""Diagrams of the documents that need no record: the parts of a model, the laws of the contract, a state that leaks."""

from __future__ import annotations

import math

from drawing import Chart, Drawing, ticks


def parts() -> str:
    drawing = Drawing(
        "Blocks, mixers and depth",
        "Tokens are embedded and pass through blocks. The depth decides how blocks follow each other. In a block a "
        "mixer moves information along time, from state to state, and an MLP works on each token.",
        392,
    )

    def box(x: float, y: float, width: float, words: str, colour: str) -> None:
        drawing.box(x, y, width, 28, colour, 0.18)
        if words:
            drawing.text(x + width / 2, y + 18.5, words, "", "middle")

    drawing.text(79, 58, "tokens", "soft", "middle")
    drawing.arrow(79, 62, 79, 74)
    box(20, 76, 118, "embedding", "grey")
    drawing.arrow(79, 104, 79, 118)
    drawing.box(12, 120, 134, 158, "violet", 0.06)
    drawing.text(20, 137, "depth", "", "start", "violet")
    for y, words in ((146, "block 1"), (190, "block 2"), (242, "block N")):
        box(24, y, 110, words, "blue")
    drawing.arrow(79, 174, 79, 188)
    drawing.text(79, 232, "\u22ee", "soft", "middle")
    drawing.arrow(79, 278, 79, 292)
    box(20, 294, 118, "norm, head", "grey")
    drawing.text(79, 340, "the next token", "soft", "middle")
    drawing.path([(134, 190), (176, 66)], "blue", 1, ' stroke-dasharray="3 3"')
    drawing.path([(134, 218), (176, 200)], "blue", 1, ' stroke-dasharray="3 3"')
    drawing.box(176, 56, 232, 148, "blue", 0.06)
    drawing.text(184, 73, "a block", "", "start", "blue")
    for y, words, colour in ((84, "mixer", "orange"), (144, "MLP", "grey")):
        box(200, y, 62, "norm", "grey")
        drawing.arrow(262, y + 14, 282, y + 14)
        box(284, y, 70, words, colour)
        drawing.arrow(354, y + 14, 376, y + 14)
        drawing.text(386, y + 19, "+", "title", "middle")
        drawing.path([(190, y + 14), (190, y + 42), (386, y + 42), (386, y + 24)], "soft", 1.5)
        drawing.arrow(190, y + 14, 200, y + 14)
    drawing.box(176, 222, 232, 118, "orange", 0.06)
    drawing.text(184, 239, "a mixer, along time", "", "start", "orange")
    for x, time in ((196, "t-1"), (259, "t"), (322, "t+1")):
        box(x, 266, 46, "", "orange")
        drawing.arrow(x + 23, 312, x + 23, 296)
        drawing.text(x + 23, 328, f"x({time})", "soft", "middle")
        drawing.arrow(x + 23, 266, x + 23, 250)
        drawing.arrow(x - 18, 280, x - 2, 280)
    drawing.arrow(368, 280, 404, 280)
    drawing.text(404, 272, "state", "soft", "end")
    drawing.text(12, 364, "depth: discrete, flow (an ODE with dials), tied", "", "start", "violet")
    drawing.text(12, 382, "mixer: attention, spectral, liquid, delta, tau", "", "start", "orange")
    return drawing.svg()


def laws() -> str:
    drawing = Drawing(
        "The contract's three laws",
        "Split: one call, or two with a state in between. Batch: a row alone, or beside others. All parameters learn.",
        400,
    )

    def box(x: float, y: float, width: float, words: str, colour: str = "grey") -> None:
        drawing.box(x, y, width, 26, colour, 0.18)
        drawing.text(x + width / 2, y + 17.5, words, "", "middle")

    drawing.text(12, 56, "Split law", "", "start", "blue")
    drawing.text(82, 56, "one call, or two with the state in between", "soft")
    for x, words in ((12, "a"), (62, "b")):
        box(x, 70, 50, words)
        box(x, 166, 50, f"y({words})")
    box(12, 118, 100, "forward", "blue")
    drawing.arrow(62, 98, 62, 116)
    drawing.arrow(62, 146, 62, 164)
    drawing.text(132, 136, "=", "title", "middle")
    for x, words in ((152, "a"), (272, "b")):
        box(x, 70, 72, words)
        drawing.arrow(x + 36, 98, x + 36, 116)
        box(x, 118, 72, "forward", "blue")
        drawing.arrow(x + 36, 146, x + 36, 164)
        box(x, 166, 72, f"y({words})")
        drawing.arrow(x + 72, 131, x + 118, 131)
        drawing.text(x + 94, 124, "state", "soft", "middle")
    drawing.text(12, 232, "Batch law", "", "start", "green")
    drawing.text(90, 232, "a row does not depend on others, nor on padding", "soft")
    box(12, 246, 80, "row 1", "green")
    box(92, 246, 60, "padding")
    box(12, 274, 140, "row 2")
    drawing.text(178, 276, "=", "title", "middle")
    box(204, 258, 80, "row 1", "green")
    drawing.text(296, 276, "for row 1", "soft")
    drawing.text(12, 340, "No dead parameters", "", "start", "orange")
    drawing.text(162, 340, "each has a gradient", "soft")
    box(12, 354, 60, "loss", "orange")
    drawing.arrow(74, 367, 202, 367)
    drawing.text(136, 361, "gradient", "soft", "middle")
    box(204, 354, 150, "every parameter", "orange")
    return drawing.svg()


#: of the picture of a leaking state: times of the observations; the input is 1 until the second and 0 after it
_TIMES = (0.0, 1.0, 1.3, 2.1, 4.0, 4.4, 7.5, 10.0)


def leaking_state() -> str:
    """x' = -x / tau + u for three time constants, and its exact steps at uneven times."""

    def after(x: float, u: float, dt: float, tau: float) -> float:
        return math.exp(-dt / tau) * x + tau * (1 - math.exp(-dt / tau)) * u

    chart = Chart(
        "A state that leaks, x' = -x/\u03c4 + u",
        "Three time constants: lines are the equation, points the exact steps at uneven times.",
        ("time; the input u is 1 in the grey part, then 0", ticks(0, 2, 4, 6, 8, 10)),
        ("state x", ticks(0, 0.25, 0.5, 0.75, 1)),
        (0, 10.2),
        (0, 1.05),
    )
    chart.area([chart.at(*corner) for corner in ((0, 0), (1, 0), (1, 1.05), (0, 1.05))], "grey", 0.18)
    for tau, colour, place in ((1, "orange", 0.13), (2, "blue", 0.36), (8, "green", 0.86)):
        top = after(0, 1, 1, tau)
        fine = ((t, after(0, 1, t, tau) if t < 1 else after(top, 0, t - 1, tau)) for t in (i / 20 for i in range(201)))
        chart.line([*fine], colour)
        x = 0.0
        for before, now in zip(_TIMES, (*_TIMES[1:], math.inf), strict=True):
            chart.mark(before, x, colour)
            x = after(x, float(before < 1), now - before, tau)
        chart.label(2.9, place, f"\u03c4 = {tau}", colour)
    return chart.svg()
