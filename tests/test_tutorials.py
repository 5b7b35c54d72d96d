"""Blocks of the tutorials and the tour run in their order and print what stands below; the program that sees to it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "docs" / "tutorials.py"
SPEC = importlib.util.spec_from_file_location("tutorials", SOURCE)
tutorials = importlib.util.module_from_spec(SPEC)
sys.modules["tutorials"] = tutorials  # where dataclasses look their module up
SPEC.loader.exec_module(tutorials)
#: pages that take seconds; the others are trained, compared or traced for up to two minutes
QUICK = {"stream-and-serve"}


@pytest.mark.parametrize("page", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in tutorials.PAGES
])  # fmt: skip
@pytest.mark.slow
def test_a_tutorial_prints_what_is_written(page):
    if page == "stream-and-serve" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    assert tutorials.check(tutorials.PAGES[page]) == []


@pytest.mark.parametrize("page", tutorials.PAGES)
def test_every_output_of_a_tutorial_is_compared(page):
    """An output is checked only right behind its block."""
    result = tutorials.blocks(tutorials.PAGES[page].read_text())
    assert not [block.line for block in result if block.kind == "text"]
    assert sum(block.output is not None for block in result) >= 4
    assert {block.kind for block in result} <= {"bash", "python", "yaml"}


@pytest.fixture
def page(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text)
        return path

    return write


MADE_UP = """# A page

```python title="mine.py"
ANSWER = 6
```

```python title="mine.py (continued)"
ANSWER *= 7
```

```bash
python -c "import mine; print(mine.ANSWER)" > answer.txt
glissando --version | cut -d " " -f 1
echo "port 8000"
```

```text
glissando
port 8000
```

```python
seven = int(open("answer.txt").read()) // 6
print("one\\ntwo\\nthree\\nloss 1.02 in 3 s")
```

```text
one
...
loss 1.00 in 17 s
```

<!-- status 3 -->
```bash
echo no; exit 3
```

```text
no
```

<!-- not run: why -->
```bash
no-such-program
```

```python
print(seven)
```

```text
7
```
"""


def test_the_blocks_of_a_page_run_in_order_in_one_place(page):
    assert tutorials.check(page(MADE_UP)) == []


@pytest.mark.parametrize(
    ("written", "changed", "said"),
    [
        ("ANSWER *= 7", "ANSWER *= 8", "printed: 8"),
        pytest.param("glissando\nport", "port", "1 lines are written, 2 are printed", marks=pytest.mark.slow),
        ("loss 1.00", "loss 1.20", "written: loss 1.20"),
        pytest.param("text\n7", "text\n8", "written: 8", marks=pytest.mark.slow),
    ],
)
def test_what_differs_is_reported_and_written(page, written, changed, said):
    path = page(MADE_UP.replace(written, changed))
    problems = tutorials.check(path, write=True)
    assert len(problems) == 1
    assert said in problems[0]
    assert tutorials.check(path) == []
    assert "one\n...\nloss 1.02 in 3 s\n" in path.read_text()


@pytest.mark.parametrize(
    ("written", "changed"),
    [("exit 3", "exit 4"), ("<!-- status 3 -->", ""), ("print(seven)", "print(eight)"), ("not run: why", "status 0")],
)
def test_a_block_that_ends_otherwise_is_an_error(page, written, changed):
    with pytest.raises(tutorials.Differs, match="ends with"):
        tutorials.check(page(MADE_UP.replace(written, changed)))


def test_a_comment_stands_before_a_block(page):
    with pytest.raises(tutorials.Differs, match="before no block"):
        tutorials.check(page("<!-- output differs -->\nwords\n"))


@pytest.mark.parametrize(
    ("written", "printed", "within", "same"),
    [
        ("loss 1.00", "loss 1.09", None, True),
        ("loss 1.00", "loss 1.12", None, False),
        ("loss 1.00", "loss 1.12", "20 %", True),
        ("gap -0.01", "gap +0.02", "0.05", True),
        ("gap -0.01", "gap +0.06", "0.05", False),
        ("4 rows", "5 rows", "20 %", False),
        ("loss 1.00", "cost 1.00", None, False),
        ("differ by 3e-07", "differ by 1e-06", None, True),
        ("differ by 3e-07", "differ by 1e-03", None, False),
        ("took 3 s, 1.2k tok/s, bf16-mixed", "took 81.5 s, 800 tok/s, 32-true", None, True),
        ("a\n...\nz", "a\nz", None, False),
        ("a\n...\nz", "a\nb\nz", None, True),
    ],
)
def test_outputs_agree_as_far_as_is_stated(written, printed, within, same):
    assert (tutorials.agree(written + "\n", printed + "\n", within) is None) == same
