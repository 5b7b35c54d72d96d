"""The contract as a stranger meets it: a mixer from outside, the checks that catch a wrong one, and the shape of the
library itself."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from slow import slow_where
from tolerances import assert_close
from torch import Tensor, nn

import glissando
from glissando.config import options
from glissando.errors import ConfigError, InputError
from glissando.generation import generate
from glissando.growth import grow
from glissando.mixers import EMPTY, MIXERS, Context, Liquid, Mixer, Spectral, register_mixer
from glissando.model import LanguageModel
from glissando.presets import preset_names
from glissando.rnn import LiquidRNN
from glissando.serving.engine import Engine
from glissando.serving.session import Piece, Request
from glissando.testing import LawError, check_mixer


@options
class AverageConfig:
    """decay: how much of the average a token keeps."""

    decay: float = 0.8


class AverageState(NamedTuple):
    mean: Tensor  # (B, D)


class Average(Mixer):
    """h_t = decay h_{t-1} + (1 - decay) W x_t: two methods, and nothing else."""

    def __init__(self, hidden_size: int, config: AverageConfig | None = None) -> None:
        super().__init__()
        self.config = config or AverageConfig()
        self.entry = nn.Linear(hidden_size, hidden_size)

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> AverageState:
        weight = self.entry.weight
        return AverageState(weight.new_zeros(batch_size, weight.shape[0], device=device, dtype=dtype))

    def forward(
        self, x: Tensor, state: AverageState | None = None, ctx: Context | None = None
    ) -> tuple[Tensor, AverageState | None]:
        ctx, x = self.context(ctx), self.entry(x)
        h, means = x.new_zeros(x[:, 0].shape) if state is None else state.mean.to(x.dtype), []
        for t in range(x.shape[1]):
            new = self.config.decay * h + (1 - self.config.decay) * x[:, t]
            h = new if ctx.mask is None else torch.where(ctx.mask[:, t : t + 1], new, h)
            means.append(h)
        return torch.stack(means, 1), None if state is None else AverageState(h.to(state.mean.dtype))


@pytest.fixture
def registered():
    """Average under a name of its own."""
    register_mixer("throwaway-average", AverageConfig)(Average)
    return "throwaway-average"


# ---------------------------------------------------------------------- a mixer from outside


def test_two_methods_make_a_mixer(registered: str, tmp_path):
    """Built in a model, streamed, served, saved and loaded; what it has no function for is refused by name."""
    check_mixer(Average, AverageConfig(decay=0.7))
    config = {"hidden_size": 16, "mixer": ["attention", {"kind": registered, "decay": 0.9}], "depth": {"layers": 2}}
    model = LanguageModel.from_config(config).eval()
    assert model.depth.blocks[1].mixer.config.decay == 0.9
    ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        whole, state = model(ids, model.init_state(2))
        first, state = model(ids[:, :4], model.init_state(2))
        rest = [first]
        for t in range(4, 9):
            logits, state = model(ids[:, t : t + 1], state)
            rest.append(logits)
    assert_close(torch.cat(rest, 1), whole, "streamed")
    written = generate(model, "a", max_tokens=5, temperature=0)[0]
    texts: list[Piece] = []
    engine = Engine(model)
    engine.submit(Request((model.tokenizer.eos_id, ord("a")), 5), [texts.append])
    while engine.running or engine.waiting:
        engine.step()
    assert [piece.error for piece in texts if piece.error] == []
    assert texts[-1].finish == "length"
    assert len(written) > 0
    model.save(tmp_path / "run")
    again = glissando.load(tmp_path / "run")
    assert torch.equal(again(ids)[0], model(ids)[0])
    with pytest.raises(ConfigError, match="Average has no method `grow`"):
        grow(model, width=2)


def test_a_mixer_is_a_layer_of_its_own():
    mixer, x = Spectral(16), torch.randn(2, 7, 16)
    y, state = mixer(x, mixer.init_state(2))
    assert y.shape == x.shape
    more, _ = mixer(x, state)
    both, _ = mixer(torch.cat([x, x], 1), mixer.init_state(2))
    assert_close(torch.cat([y, more], 1), both)


def test_the_liquid_layer_in_the_place_of_an_lstm():
    torch.manual_seed(0)
    layer = LiquidRNN(3, 8, adaptation=0.5).double()
    x, dt = torch.randn(2, 9, 3).double(), torch.rand(2, 9).double()
    y, h = layer(x, None, dt)
    mixer = Liquid(8, adaptation=0.5).double()
    mixer.load_state_dict(layer.mixer.state_dict())
    expected, _ = mixer(layer.input(x), mixer.init_state(2), Context(dt=dt))
    assert_close(y, expected, "the parts of the model")
    first, state = layer(x[:, :4], None, dt[:, :4])
    second, after = layer(x[:, 4:], state, dt[:, 4:])
    assert_close(torch.cat([first, second], 1), y, "split law")
    assert_close(after.x, h.x, "the state after")
    with pytest.raises(ValueError, match=r"x must be \(batch, time, 3\)"):
        layer(x[..., :2])
    with pytest.raises(InputError, match=r"dt must be a tensor .* \(2, 9\), got 0.5; use torch.full\(\(2, 9\), 0.5\)"):
        layer(x, dt=0.5)
    with pytest.raises(InputError, match=r"dt must be \(batch, time\), here \(2, 9\), got \(9,\)"):
        layer(x, dt=dt[0])


# ---------------------------------------------------------------------- what the checks catch


class Leaking(Average):
    """The first token sees the last."""

    def forward(self, x: Tensor, state: Any = None, ctx: Any = None) -> tuple[Tensor, Any]:
        y, after = super().forward(x, state, ctx)
        return y + x[:, -1:], after


class Mixing(Average):
    """Rows see each other."""

    def forward(self, x: Tensor, state: Any = None, ctx: Any = None) -> tuple[Tensor, Any]:
        y, after = super().forward(x, state, ctx)
        return y + x.mean(0), after


class InPlace(Average):
    """The state that was given is changed."""

    def forward(self, x: Tensor, state: Any = None, ctx: Any = None) -> tuple[Tensor, Any]:
        y, after = super().forward(x, state, ctx)
        if state is not None and not torch.is_grad_enabled():
            state.mean.copy_(after.mean)
        return y, after


class Dead(Average):
    """A parameter that nothing reads."""

    def __init__(self, hidden_size: int, config: AverageConfig | None = None) -> None:
        super().__init__(hidden_size, config)
        self.unread = nn.Parameter(torch.zeros(3))


class Unmasked(Average):
    """Padding is read."""

    def forward(self, x: Tensor, state: Any = None, ctx: Context | None = None) -> tuple[Tensor, Any]:
        return super().forward(x, state, EMPTY)


class Narrow(Average):
    """A state of float16, whatever was asked for."""

    def init_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> AverageState:
        dtype = dtype if dtype in (None, torch.float64) else torch.float16
        return super().init_state(batch_size, device, dtype)


class Clocked(Average):
    """The time before the first token is read."""

    accepts = frozenset({"mask", "dt"})
    input = "impulse"

    def forward(self, x: Tensor, state: Any = None, ctx: Any = None) -> tuple[Tensor, Any]:
        dt = ctx.dt
        y, after = super().forward(x, state, ctx)
        return (y if dt is None else y + self.time(dt)), after

    def time(self, dt: Tensor) -> Tensor:
        return (dt - 1).unsqueeze(-1)


class Widening(Average):
    """A state in another type than x comes back in the type of x."""

    def forward(self, x: Tensor, state: Any = None, ctx: Any = None) -> tuple[Tensor, Any]:
        y, after = super().forward(x, state, ctx)
        return y, None if after is None else AverageState(after.mean.to(x.dtype))


class Absolute(Clocked):
    """Time starts anew in each piece."""

    def time(self, dt: Tensor) -> Tensor:
        return (dt - 1).cumsum(1).unsqueeze(-1)


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        (Clocked, "time: the time before the first token"),
        (Absolute, r"split law: values, cut at \[4\], with dt"),
        (Leaking, "split law: values"),
        (Mixing, "batch law: row"),
        (InPlace, "state: a call without donate=True changed the state"),
        (Dead, "parameters: unread got no gradient"),
        (Unmasked, "batch law: .*padding"),
        (Narrow, r"state: init_state\(dtype=torch.float32\) has a leaf of torch.float16"),
        (Widening, "state: a leaf of torch.float32 came back as torch.float64"),
    ],
)
def test_the_checks_name_the_law_that_is_broken(mutation: type[Mixer], message: str):
    with pytest.raises(LawError, match=message):
        check_mixer(mutation)


def test_mistakes_of_a_registration(registered: str):
    register_mixer(registered, AverageConfig)(Average)  # the same once more
    with pytest.raises(ConfigError, match=f"mixer '{registered}' is registered already, as .*Average; choose another"):
        register_mixer(registered, AverageConfig)(Dead)
    with pytest.raises(ConfigError, match="the options of mixer 'unlisted' must be a dataclass, got <class 'dict'>"):
        register_mixer("unlisted", dict)(Average)
    assert "unlisted" not in MIXERS
    with pytest.raises(ConfigError, match=r"mixer\.decai.*Did you mean 'decay'"):
        LanguageModel.from_config({"mixer": {"kind": registered, "decai": 0.9}})


# ---------------------------------------------------------------------- the shape of the library

ROOT = Path(glissando.__file__).parent
#: of ours, from the model to a kernel; the kernel is not counted
FRAMES = 8
#: more of a flow: solve, the solver and a step of it
SOLVER_FRAMES = 3


def frames_to_kernels(call: Callable[[], Any]) -> list[str]:
    """The longest way of functions of ours that stand on the stack where a kernel of Numba or the fused attention
    begins."""
    stack: list[str] = []
    longest: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal longest
        inside = frame.f_code.co_filename.startswith(str(ROOT))
        fused = event == "c_call" and getattr(arg, "__name__", "") in ("scaled_dot_product_attention", "linear")
        if (fused or (event == "call" and id(frame.f_code) in kernels)) and len(stack) > len(longest):
            longest = list(stack)
        if event == "call" and inside and id(frame.f_code) not in kernels:
            stack.append(f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_code.co_qualname}")
        elif event == "return" and inside and id(frame.f_code) not in kernels and stack:
            stack.pop()

    packages = ("glissando.kernels.", "glissando.mixers.")
    modules = [module for name, module in sys.modules.items() if name.startswith(packages)]
    found = (value for module in modules for value in vars(module).values())
    # by identity: a code's hash may change at its first call
    kernels = {id(value.py_func.__code__) for value in found if hasattr(value, "py_func")}
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return longest


#: of every mixer
FRAMED = {"continuous-transformer-nano", "hybrid-ode-nano", "liquid-ssm-nano", "spectral-delta-nano", "tauformer-nano"}
NANO = [name for name in preset_names() if name.endswith("-nano")]


@pytest.mark.parametrize("preset", slow_where({*NANO} - FRAMED, NANO))
def test_a_forward_crosses_few_frames_to_a_kernel(preset: str):
    model = LanguageModel.from_preset(preset)
    ids = torch.randint(0, 256, (2, 100))

    def step() -> None:
        nonlocal state
        _, state = model(ids[:, :1], state, donate=True, memo=memo)

    model(ids)  # what is compiled and remembered at the first call
    ways = {"training": frames_to_kernels(lambda: model(ids))}
    model.eval()
    with torch.no_grad():
        memo: dict = {}
        _, state = model(ids, model.init_state(2), donate=True, memo=memo)
        step()
        ways["decoding"] = frames_to_kernels(step)
    for name, way in ways.items():
        assert 4 < len(way) <= FRAMES + (SOLVER_FRAMES if preset == "hybrid-ode-nano" else 0), "\n  ".join(
            [f"{name}: {len(way)} frames", *way]
        )


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those inside `node` and outside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from statements(child)


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports when it is imported, or for its types."""
    package = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    names, found = module_files(), set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in names else node.module)
    return {name for name in found if name in names} - {package.removesuffix(".__init__")}


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one module (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(sorted(part))

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return found


@functools.cache
def module_files() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }


def test_no_import_goes_in_a_circle():
    files = module_files()
    edges = {name: imports_of(path) for name, path in files.items()}
    assert sum(map(len, edges.values())) > 300, "imports are found"
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]
    assert cycles(edges) == []


def test_no_package_imports_one_that_imports_it():
    """A package is a folder, or a module beside the folders."""
    files = module_files()

    def package(path: Path) -> str:
        return path.relative_to(ROOT).with_suffix("").parts[0]

    edges: dict[str, set[str]] = {package(path): set() for path in files.values()}
    for path in files.values():
        edges[package(path)] |= {package(files[name]) for name in imports_of(path)} - {package(path)}
    assert sum(map(len, edges.values())) > 30, "imports are found"
    assert cycles(edges) == []


def test_no_file_is_long():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: n for name, n in long.items() if n > 500} == {}
