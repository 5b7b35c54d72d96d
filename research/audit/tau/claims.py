"""The claims of the Tauformer."""

from __future__ import annotations

from research.audit.claim import claims
from research.audit.tau import form, training

CLAIMS = claims(
    "Tauformer",
    {
        "tau-cache": (form, "cache", "The cache is half of a standard one", "half of (K, V)"),
        "tau-learns": (
            training,
            "learns",
            "Attention by one number a head, at temperature 1, learns a language model",
            "validation 4.9255 at step 100, 2.3585 at 2000, best 1.9146 at 4500; no baseline",
            "bytes and a small model here. As published: no gradient through lambda, as in the sparse path of the "
            "author's crate `tauformer`; the article says that it flows. Corrected: lambda has gradients, and T is 1 "
            "or learned from 0.2; gates: importance, a forget gate and an output gate",
        ),
        "tau-speed": (
            form,
            "speed",
            "It takes about 20 % less time a token",
            "about 20 %, beside a nanoGPT (an earlier post of its author's, and doi "
            "10.36227/techrxiv.176800983.30631144)",
            "tuned.org.uk/posts/012_topological_transformer_tauformer_domain_memory_in_attention; measured here in "
            "training, beside PyTorch's fused softmax attention in the same model",
        ),
        "tau-throughput": (
            form,
            "throughput",
            "The run of 5,000 steps took 2 hours at 60K tokens a second",
            "655,360,000 tokens, about 60K tokens/s on an H100, 2 hours",
        ),
        "tau-perplexities": (
            form,
            "perplexity",
            "The perplexities are those of the validation losses beside them",
            "107.47 at 4.9255, 6.59 at 2.3585; best at step 4500, or 4600",
        ),
        "tau-drift": (
            training,
            "drift",
            "Loss and tau fall together, as learning lowers the energies",
            "claimed of the run's restarts; its author concedes that recalibration contributes",
        ),
        "tau-laplacian": (
            training,
            "laplacian",
            "A Laplacian of the domain helps",
            "claimed without a comparison",
            "the text's own graph: context columns of its bytes, merged to the head's size",
        ),
        "tau-epiplexity": (
            training,
            "epiplexity",
            "The scalar raises what is learned, the area under the loss curve above its end",
            "claimed without a comparison",
        ),
    },
)
