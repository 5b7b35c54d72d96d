"""Models on CUDA compute what they compute on a CPU in float64; the commands use a GPU. Skipped where none is found."""

from __future__ import annotations

import pytest
import test_tau_attention
import test_tau_triton
import torch
from subjects import CASES, build, ragged, random_ids
from test_laws import gradients, in_pieces
from tolerances import assert_close, assert_tensors_close
from torch import Tensor
from torch.nn import functional as F
from training_runs import crash_in, curve, mapping, options

import glissando
from glissando.cli import main
from glissando.mixers.delta.scan import delta_rule
from glissando.model import LanguageModel
from glissando.presets import preset_names
from glissando.state import leaves

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
cases = pytest.mark.parametrize("case", CASES)

#: bfloat16 and compiled graphs: one of each mixer, and the flow
TRAINED = ("delta-nano", "hybrid-ode-nano", "liquid-ssm-nano", "spectral-delta-nano", "tauformer-nano")


class Crash(Exception):
    """Stands for a power cut."""


def weigh(logits: Tensor, mask: Tensor) -> Tensor:
    """A scalar that depends on every logit at a real position, with the same weights on every device."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits * weights.to(logits))[mask.to(logits.device)].sum()


def pair(case: str) -> tuple[LanguageModel, LanguageModel]:
    """A case's model in float64 on the CPU, and the same weights in float32 on the GPU."""
    exact, model = build(case), build(case, torch.float32)
    exact.load_state_dict(model.state_dict())
    return exact, model.to("cuda")


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.float().cpu() for name, tensor in tensors.items()}


@cases
def test_values_and_gradients_are_those_of_the_cpu(case: str):
    """In float32, against float64: the forward pass as a whole, in pieces, token by token, and of a row alone."""
    exact, model = pair(case)
    ids = random_ids(model, 3, 40, seed=5)
    masked = "mask" in model.depth.accepts
    mask = ragged(*ids.shape, seed=5) if masked else torch.ones_like(ids, dtype=torch.bool)
    there, mask_there = ids.to("cuda"), mask.to("cuda")
    given = {"mask": mask_there} if masked else {}
    whole = model(there, **given)[0]
    grads = gradients(model, weigh(whole, mask))
    pieces, state = in_pieces(model, there, [5, 6, 20], mask_there if masked else None)
    split_grads = gradients(model, weigh(pieces, mask))
    assert {leaf.device.type for leaf in leaves(state)} <= {"cuda"}
    with torch.no_grad():
        donated, _ = in_pieces(model, there, [7, *range(20, 40)], mask_there if masked else None, donate=True)
        alone = model(there[1:2, mask_there[1]])[0]
    expected = exact(ids, **({"mask": mask} if masked else {}))[0]
    assert_close(whole[mask_there].cpu(), expected[mask].float(), "values")
    assert_close(pieces[mask_there], whole[mask_there], "split")
    assert_close(donated[mask_there], whole[mask_there], "token by token")
    assert_close(alone[0], whole[1, mask_there[1]], "a row alone")
    expected_grads = on_cpu(gradients(exact, weigh(expected, mask)))
    assert_tensors_close(on_cpu(grads), expected_grads, "gradient of")
    assert_tensors_close(on_cpu(split_grads), expected_grads, "split gradient of")


@pytest.mark.parametrize("kind", ["attention", "delta", "liquid", "spectral", "tau"])
def test_a_row_of_many_tiles_and_chunks(kind: str):
    """1,500 tokens, more than any kernel takes at once; a state is given, and no length divides another."""
    case = f"mixer:{kind}-default"
    exact, model = pair(case)
    ids = random_ids(model, 2, 1500, seed=3)
    mask = torch.ones_like(ids, dtype=torch.bool)
    whole = in_pieces(model, ids.to("cuda"), [701])[0]
    expected = in_pieces(exact, ids, [701])[0]
    assert_close(whole.cpu(), expected.float(), "values")
    if kind == "tau":  # some of millions of distances are so near 0 that rounding decides their gradients' signs
        return
    got, wanted = (gradients(m, weigh(x, mask) / 1500) for m, x in ((model, whole), (exact, expected)))
    assert_tensors_close(on_cpu(got), on_cpu(wanted), "gradient of")


def test_tau_attention_over_many_tiles():
    test_tau_triton.agree(test_tau_attention.problem("plain", (1, 2, 1500, 1500), torch.float32, 0.05, size=64))


def test_the_delta_rule_in_chunks_is_the_recurrence():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, steps, heads, size = 2, 200, 3, 32
    q, k = (F.normalize(draw(rows, steps, heads, size), dim=-1) for _ in range(2))
    v, e, b = draw(rows, steps, heads, 24), draw(rows, steps, heads).sigmoid(), draw(rows, steps, heads).sigmoid()
    g = -draw(rows, steps, heads, 1).exp()
    inputs = (q, k, v, g, e, b, draw(rows, heads, size, 24))
    outcomes = []
    for device, backend in (("cuda", "auto"), ("cpu", "reference")):
        there = [x.to(device).requires_grad_() for x in inputs]
        o, last = delta_rule(*there, backend=backend)  # type: ignore[arg-type]
        grads = torch.autograd.grad(o.square().sum() + last.square().sum(), there)
        outcomes.append([x.detach().cpu() for x in (o, last, *grads)])
    for name, got, expected in zip(("o", "last", "q", "k", "v", "g", "e", "b", "s0"), *outcomes, strict=True):
        assert_close(got, expected, name)


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.endswith("-nano")])
def test_the_text_of_the_cpu_is_written(preset: str):
    """The likeliest token each time, of a model with large weights, whose likeliest tokens are clear."""
    torch.manual_seed(0)
    model = LanguageModel.from_preset(preset)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    texts = ["".join(glissando.stream(model, "Once upon", max_tokens=24, temperature=0.0))]
    texts += ["".join(glissando.stream(model.to("cuda"), "Once upon", max_tokens=24, temperature=0.0))]
    assert texts[0] == texts[1]


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own doings
@pytest.mark.parametrize("preset", TRAINED)
def test_compiled_steps(preset: str):
    torch._dynamo.reset()
    model = build(f"preset:{preset}", torch.float32).to("cuda").train()
    ids = random_ids(model, 2, 65, seed=1).to("cuda")

    def loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())

    outcomes = []
    for run in (torch.compile(loss, fullgraph=True), loss):
        torch.manual_seed(1)
        value = run(ids)
        outcomes.append({"loss": value.detach(), **gradients(model, value)})
    assert_tensors_close(on_cpu(outcomes[0]), on_cpu(outcomes[1]), "compiled")
    torch._dynamo.reset()


@pytest.mark.parametrize("preset", TRAINED)
def test_commands_use_the_gpu(preset: str, tmp_path, monkeypatch, capsys):
    """A training in mixed precision learns, goes on where it was killed, and its run writes and is evaluated."""
    run = tmp_path / "run"
    training = {"accelerator": "auto", "precision": "bf16-mixed", "steps": 30, "log_every": 1, "save_every": 10}
    given = {name: part for name, part in mapping(tmp_path, {"training": training}).items() if name != "model"}
    command = ["train", "--preset", preset, *options(given)]
    with monkeypatch.context() as patch:
        crash_in(patch, 25, Crash())
        with pytest.raises(Crash):
            main([*command, f"--out={run}"])
    assert main(["train", "--resume", str(run)]) == 0
    losses = curve(run)
    assert len(losses) == 30
    assert losses[-1] < losses[0] - 0.2
    assert f'"{torch.cuda.get_device_name()}"' in (run / "environment.json").read_text()
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "ab", "--max_tokens", "5", "--device", "cuda"]) == 0
    assert main(["evaluate", str(run), "--device", "auto"]) == 0
    assert "bits per byte" in capsys.readouterr().out
