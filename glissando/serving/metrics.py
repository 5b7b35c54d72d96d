"""What /metrics returns, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from glissando.serving.engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class _OfEngines:
    """Sums over the models, read off the engines when asked, so that a step counts nothing twice."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines

    def collect(self) -> Iterator[Metric]:
        def total(name: str) -> int:
            return sum(getattr(engine, name) for engine in self.engines)

        pool = self.engines[0].pool  # shared
        kept = sum(engine.prefixes.bytes for engine in self.engines)
        yield GaugeMetricFamily("glissando_texts_running", "Texts under way, or being read for", total("running"))
        yield GaugeMetricFamily("glissando_texts_waiting", "Texts for which nothing was read yet", total("waiting"))
        yield GaugeMetricFamily("glissando_memory_bytes", "Bytes taken, or promised, until answers are sent", pool.used)
        yield GaugeMetricFamily("glissando_memory_limit_bytes", "Bytes that texts may take", pool.memory)
        yield GaugeMetricFamily("glissando_prefix_bytes", "Bytes of states kept to go on from", kept)
        yield CounterMetricFamily("glissando_tokens_read", "Tokens of prompts read", total("tokens_read"))
        yield CounterMetricFamily("glissando_tokens_reused", "Tokens of prompts known before", total("tokens_reused"))
        yield CounterMetricFamily("glissando_tokens_written", "Tokens written", total("tokens_written"))


class Metrics:
    """One server's numbers, in a registry of its own."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngines(engines))
        self.requests = Counter(
            "glissando_requests", "Requests by path and HTTP status", ["path", "status"], registry=self.registry
        )
        self.disconnects = Counter(
            "glissando_disconnects", "Clients that left before their text was done", registry=self.registry
        )
        self.first_token = Histogram(
            "glissando_first_token_seconds", "From request to first token", buckets=_SECONDS, registry=self.registry
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
