r"""Formulas of the pages as MathML, which browsers draw without a script.

latex2mathml leaves what it does not know as text: `&` and `\\` of an `aligned`, `\|`, an unknown command. Chromium
ignores `mathvariant`, which it writes for `\mathbb R` but not for `\mathbb{R}`. Both are errors here.
"""

from __future__ import annotations

import re

from latex2mathml.converter import convert

_CODE = re.compile(r"^( *)```.*?^\1```|^ {4}[^\n]*$|`[^`\n]*`|<!--.*?-->", re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$])\$(?=\S)((?:[^$\n]|\n(?!\n))+?)(?<=\S)\$(?!\d)", re.DOTALL)
#: what browsers draw as it is meant: `normal`, and `italic` on the single letters that are italic anyway
_VARIANT = re.compile(r'mathvariant="(?!normal"|italic")([^"]+)"')


class FormulaError(ValueError):
    """A formula that the site cannot draw."""


def mathml(tex: str, display: bool = False) -> str:
    """The <math> element of a formula. Raises FormulaError for one with a part that would be drawn wrongly."""
    html = convert(tex.strip(), display="block" if display else "inline")
    if "\\" in html or "<mi>&</mi>" in html or "<mi>&amp;</mi>" in html:
        raise FormulaError(
            f"latex2mathml does not know a part of the formula {tex.strip()!r}; write it in other commands "
            r"(instead of `aligned` a formula a line, instead of \| \Vert)"
        )
    if variant := _VARIANT.search(html):
        raise FormulaError(
            f"browsers ignore mathvariant={variant[1]!r}, as which the formula {tex.strip()!r} is written; "
            r"put the letter in braces, as in \mathbb{R}, or leave the font out"
        )
    return html


def formulas(page: str) -> list[tuple[str, bool]]:
    """Those of a page in Markdown, outside code: TeX, and whether it is a display formula."""
    found = _FORMULA.findall(_CODE.sub("", page))
    return [(display or inline, bool(display)) for display, inline in found]
