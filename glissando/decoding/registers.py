"""Registers of a program: vectors of one token between instructions, which share memory where their times allow it."""

from __future__ import annotations

from collections.abc import Sequence

#: numbers that a vector's place is a multiple of: a cache line
_LINE = 16


class Register(int):
    """A place in a vector, counted from the vector's beginning: `register + n` is n numbers further in the same one."""

    vector: int

    def __new__(cls, place: int, vector: int) -> Register:
        register = super().__new__(cls, place)
        register.vector = vector
        return register

    def __add__(self, offset: int) -> Register:
        return Register(int(self) + offset, self.vector)


def allocated(
    code: Sequence[Sequence[int]], sizes: Sequence[int], result: Register
) -> tuple[list[list[int]], Register, int]:
    """The instructions with places in memory for registers, the place of the result, and how many numbers all take.

    A vector keeps its place from the first instruction that names it to the last, the result's to the end; only then
    may another one take it. An odd number of cache lines in all, so that those of several rows are in different sets
    of a cache.
    """
    last = {x.vector: n for n, line in enumerate(code) for x in line if isinstance(x, Register)}
    last[result.vector] = len(code)
    places: dict[int, int] = {}
    alive: list[int] = []
    end = _LINE
    for n, line in enumerate(code):
        alive = [vector for vector in alive if last[vector] >= n]
        for vector in dict.fromkeys(x.vector for x in line if isinstance(x, Register)):
            if vector not in places:
                places[vector] = _gap(sizes[vector], [(places[other], sizes[other]) for other in alive])
                alive.append(vector)
                end = max(end, places[vector] + sizes[vector])
    whole = [[int(x) + places[x.vector] if isinstance(x, Register) else int(x) for x in line] for line in code]
    return whole, Register(int(result) + places[result.vector], result.vector), (-(-end // _LINE) | 1) * _LINE


def _gap(size: int, taken: list[tuple[int, int]]) -> int:
    """The first place with room between those that are taken."""
    place = 0
    for begin, length in sorted(taken):
        if place + size <= begin:
            break
        place = max(place, -(-(begin + length) // _LINE) * _LINE)
    return place
