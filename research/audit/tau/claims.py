"""The claims of the Tauformer."""

from __future__ import annotations

from research.audit.claim import Claim
from research.audit.tau import form, training

SYSTEM = "Tauformer"

CLAIMS = (
    Claim(
        "tau-cache",
        SYSTEM,
        "The cache is half of a standard one",
        "half of (K, V)",
        form.cache_as_published,
        form.cache_corrected,
    ),
    Claim(
        "tau-learns",
        SYSTEM,
        "Attention by one number a head, at temperature 1, learns a language model",
        "validation 4.9255 at step 100, 2.3585 at 2000, best 1.9146 at 4500; no baseline",
        training.learns_as_published,
        training.learns_corrected,
        notes="bytes and a small model here. As published: no gradient through lambda, as in the sparse path of the "
        "author's crate `tauformer`; the article says that it flows. Corrected: lambda has gradients, and T is 1 or "
        "learned from 0.2; gates: importance, a forget gate and an output gate",
    ),
    Claim(
        "tau-speed",
        SYSTEM,
        "It takes about 20 % less time a token",
        "about 20 %, beside a nanoGPT (an earlier post of its author's, and doi 10.36227/techrxiv.176800983.30631144)",
        form.speed_as_published,
        form.speed_corrected,
        notes="tuned.org.uk/posts/012_topological_transformer_tauformer_domain_memory_in_attention; measured here in "
        "training, beside PyTorch's fused softmax attention in the same model",
    ),
    Claim(
        "tau-throughput",
        SYSTEM,
        "The run of 5,000 steps took 2 hours at 60K tokens a second",
        "655,360,000 tokens, about 60K tokens/s on an H100, 2 hours",
        form.throughput_as_published,
        form.throughput_corrected,
    ),
    Claim(
        "tau-perplexities",
        SYSTEM,
        "The perplexities are those of the validation losses beside them",
        "107.47 at 4.9255, 6.59 at 2.3585; best at step 4500, or 4600",
        form.perplexity_as_published,
        form.perplexity_corrected,
    ),
    Claim(
        "tau-drift",
        SYSTEM,
        "Loss and tau fall together, as learning lowers the energies",
        "claimed of the run's restarts; its author concedes that recalibration contributes",
        training.drift_as_published,
        training.drift_corrected,
    ),
    Claim(
        "tau-laplacian",
        SYSTEM,
        "A Laplacian of the domain helps",
        "claimed without a comparison",
        training.laplacian_as_published,
        training.laplacian_corrected,
        notes="the text's own graph: context columns of its bytes, merged to the head's size",
    ),
    Claim(
        "tau-epiplexity",
        SYSTEM,
        "The scalar raises what is learned, the area under the loss curve above its end",
        "claimed without a comparison",
        training.epiplexity_as_published,
        training.epiplexity_corrected,
    ),
)
