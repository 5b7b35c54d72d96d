"""Speed against named peers, as ratios within one run.

Machines are noisy, so the two sides take turns and the figure is the median of the paired ratios.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glissando.block import RMSNorm
from glissando.compare.speed import trainer
from glissando.data.tokenizers import ByteTokenizer
from glissando.errors import GlissandoError
from glissando.model import LanguageModel


def peak_bytes() -> int:
    """The most that this process held, on Linux: what getrusage reports is inherited from the process before it."""
    [line] = [line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class Row:
    """One figure: ours and the peer's median, the median of paired ratios, and what it should reach."""

    name: str
    ours: float
    peer: float | None
    unit: str
    ratio: float | None
    goal: str
    met: bool
    peer_name: str = ""

    def line(self) -> str:
        against = "" if self.peer is None else f"  {self.peer_name}: {self.peer:,.4g} {self.unit}"
        ratio = "" if self.ratio is None else f"  ratio {self.ratio:.2f}"
        verdict = "met" if self.met else "MISSED"
        return f"{self.name:32} {self.ours:,.4g} {self.unit}{against}{ratio}  goal {self.goal}: {verdict}"


def in_turn(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """Pairs of two rates measured one after the other; one round of each warms up."""
    ours(), peer()
    return [(ours(), peer()) for _ in range(rounds)]


def paired(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[float, float, float]:
    """Medians of two rates measured in turn, and of their ratio ours / peer."""
    pairs = in_turn(ours, peer, rounds)
    a, b = zip(*pairs, strict=True)
    return statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in pairs)


def beside(
    name: str,
    ours: Callable[[], float],
    peer: Callable[[], float],
    rounds: int,
    goal: float | None,
    peer_name: str,
    unit: str = "tokens/s",
) -> Row:
    """The row of two rates measured in turn, whose ratio should reach `goal`, if there is one."""
    a, b, ratio = paired(ours, peer, rounds)
    wanted, met = ("none", True) if goal is None else (f"{goal:g}x", ratio >= goal)
    return Row(name, a, b, unit, ratio, wanted, met, peer_name)


def llama_like(model: LanguageModel) -> Any:
    """Hugging Face's Llama of the same shape with the same weights.

    Raises GlissandoError where `transformers` is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise GlissandoError("the peer needs transformers: pip install -e '.[hf]' in a checkout") from error
    c = model.config
    hidden = model.state_dict()["depth.blocks.0.mlp.down.weight"].shape[1]
    shape: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": hidden,
        "num_hidden_layers": c.depth.layers,
        "num_attention_heads": c.mixer.heads,
        "num_key_value_heads": c.mixer.kv_heads or c.mixer.heads,
        "max_position_embeddings": 1 << 16,
        "rms_norm_eps": RMSNorm.eps,
        "tie_word_embeddings": c.tied_head,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    peer = LlamaForCausalLM(LlamaConfig(**shape))
    peer.load_state_dict(_llama_weights(model), strict=False)
    return peer


def _llama_weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    ours = model.state_dict()
    theirs = {"model.embed_tokens.weight": ours["embedding.weight"], "model.norm.weight": ours["norm.weight"]}
    for i in range(model.config.depth.layers):
        a, b = f"depth.blocks.{i}.", f"model.layers.{i}."
        mixer = model.depth.blocks[i].mixer  # type: ignore[index, union-attr]
        sizes = [mixer.head_size * n for n in (mixer.heads, mixer.kv_heads, mixer.kv_heads)]
        parts = ours[a + "mixer.qkv.weight"].split(sizes)
        theirs |= {f"{b}self_attn.{n}_proj.weight": w for n, w in zip("qkv", parts, strict=True)}
        theirs[b + "self_attn.o_proj.weight"] = ours[a + "mixer.out.weight"]
        gate, up = ours[a + "mlp.up.weight"].chunk(2)
        theirs |= {b + "mlp.gate_proj.weight": gate, b + "mlp.up_proj.weight": up}
        theirs[b + "mlp.down_proj.weight"] = ours[a + "mlp.down.weight"]
        theirs[b + "input_layernorm.weight"] = ours[a + "mixer_norm.weight"]
        theirs[b + "post_attention_layernorm.weight"] = ours[a + "mlp_norm.weight"]
    return theirs


class EndlessTokenizer(ByteTokenizer):
    """Bytes, and an end token of an id of its own, which is read and never drawn: every text has its length.

    decoded  number of tokens that `decode` was given: all that `generate` has written
    """

    def __init__(self) -> None:
        super().__init__()
        self.eos_id, self.decoded = self.vocab_size, 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


def endless(preset: str) -> tuple[LanguageModel, EndlessTokenizer]:
    """A new model of `preset` with that tokenizer."""
    tokenizer = EndlessTokenizer()
    model = LanguageModel.from_preset(preset, vocab_size=tokenizer.vocab_size + 1).eval()
    model.tokenizer = tokenizer
    return model, tokenizer


def random_bytes(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))


def training(length: int, precision: str, rounds: int) -> Row:
    """Training tokens/s of `transformer` beside LlamaForCausalLM of the same shape and weights, 4,096 tokens a step."""
    model, ids = LanguageModel.from_preset("transformer"), random_bytes(4096 // length, length + 1)

    def arithmetic() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()

    peer = llama_like(model)
    name, ours = f"training, 3.2M, T {length}, {precision}", trainer(model, ids, arithmetic)
    return beside(name, ours, trainer(peer, ids, arithmetic), rounds, 1.15, "HF Llama")


def decoding(rounds: int) -> Row:
    """Greedy tokens/s behind a context of 512, beside Hugging Face's cached `generate` of the same model."""
    from glissando.generation import Continuation, Sampling

    model = LanguageModel.from_preset("transformer").eval()
    peer = llama_like(model).eval()
    prompt = torch.randint(0, 256, (1, 512), generator=torch.Generator().manual_seed(0))
    new, greedy = 64, Sampling(temperature=0)

    def ours() -> float:
        steps = Continuation(model, prompt.tolist(), new, greedy)
        next(steps)  # the prompt is read before the first token
        began = time.perf_counter()
        count = sum(1 for _ in steps)
        return count / (time.perf_counter() - began)

    def theirs() -> float:
        def seconds(tokens: int) -> float:
            began = time.perf_counter()
            peer.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, use_cache=True)
            return time.perf_counter() - began

        with torch.no_grad():
            return (new - 1) / max(seconds(new) - seconds(1), 1e-9)

    return beside("decoding, 3.2M, context 512", ours, theirs, rounds, 1.5, "HF generate")


def start_up(rounds: int) -> Row:
    """Seconds from `glissando --help` to its end, a process of its own."""

    def once() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "glissando", "--help"], check=True, capture_output=True)
        return time.perf_counter() - began

    once()
    seconds = statistics.median(once() for _ in range(rounds))
    return Row("glissando --help", seconds, None, "s", None, "under 0.5 s", seconds < 0.5)


def loop_cost(rounds: int) -> Row:
    """Milliseconds a step that `glissando train` adds to the bare PyTorch loop over the same batches and model."""
    from benchmarks.loop import added_milliseconds

    added = statistics.median(added_milliseconds() for _ in range(rounds))
    return Row("the training loop's own cost", added, None, "ms a step", None, "under 1 ms", added < 1.0)
