"""GET /metrics, in Prometheus' text format: what this process saw of its requests, and what the engine counts.

Names and units are those of DESIGN.md §8, under the prefix `trunkline:`.
"""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PREFIX = "trunkline:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEVICE = "device"  # the tier of the cache; host and disk are yet to come

# Seconds. From a cached prompt on a fast device to a long cold one on a CPU.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)

disable_created_metrics()  # one `…_created` line for every counter, which no dashboard reads


class Metrics:
    """What the API process itself counts. Each has its own registry, so that two servers in one process don't mix."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a choice.", TOKEN_BUCKETS
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds",
            "From the arrival of a choice in the engine to its admission.",
            FIRST_TOKEN_BUCKETS,
        )
        self.request_prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the admission of a choice to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the arrival of a request to the end of a choice.", REQUEST_BUCKETS
        )
        self.request_success = Counter(
            PREFIX + "request_success", "Choices that ended.", ["finished_reason"], registry=self.registry
        )
        self.request_failures = Counter(
            PREFIX + "request_failures", "Requests answered with an error.", ["code"], registry=self.registry
        )

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, documentation, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self.model_name)

    def render(self, engine: dict[str, Any] | None) -> bytes:
        """The page. `engine` is its reply to the call "stats"; None while it cannot answer."""
        page = generate_latest(self.registry)
        if engine is not None:
            registry = CollectorRegistry()
            registry.register(_EngineCollector(engine, self.model_name))
            page += generate_latest(registry)
        return page


class RequestObserver:
    """Times one request, from its making on (api.generation.Observer)."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._newest: dict[int, float] = {}  # choice -> when its newest token came

    def tokens(self, index: int) -> None:
        now = time.perf_counter()
        if not self._newest:
            self._metrics.time_to_first_token.observe(now - self._arrived)
        if index in self._newest:
            self._metrics.inter_token_latency.observe(now - self._newest[index])
        self._newest[index] = now

    def first_token(self, queue_seconds: float, prefill_seconds: float) -> None:
        self._metrics.request_queue_time.observe(queue_seconds)
        self._metrics.request_prefill_time.observe(prefill_seconds)

    def finished(self, reason: str) -> None:
        self._metrics.request_success.labels(reason).inc()
        if reason != "abort":
            self._metrics.e2e_request_latency.observe(time.perf_counter() - self._arrived)


class _EngineCollector(Collector):
    """The engine's counters and gauges as Prometheus families."""

    def __init__(self, stats: dict[str, Any], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._gauge("num_requests_running", "Requests in the running batch.", model_name=stats["running"])
        yield self._gauge("num_requests_waiting", "Requests in the queue.", model_name=stats["waiting"])
        yield self._gauge(
            "kv_cache_usage_perc", "KV pages that running requests hold, 0 to 1.", tier=stats["kv_cache_usage"]
        )
        pages = GaugeMetricFamily(PREFIX + "kv_cache_pages", "KV pages by owner.", labels=["owner"])
        for owner, number in stats["pages"].items():
            pages.add_metric([owner], number)
        yield pages
        for name, documentation, label in (
            ("prompt_tokens", "Prompt tokens of accepted requests.", "model_name"),
            ("prompt_tokens_computed", "Prompt tokens computed, rather than found in the cache.", "model_name"),
            ("generation_tokens", "Tokens generated.", "model_name"),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "tier"),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", "tier"),
            ("num_preemptions", "Requests that lost their pages to others.", "how"),
            ("evicted_pages", "Cached pages given up for new ones.", "tier"),
        ):
            family = CounterMetricFamily(PREFIX + name, documentation, labels=[label])
            family.add_metric([self._label(label)], stats[name + "_total"])
            yield family
        yield self._totals("step_seconds", "Duration of a step.", stats["step_seconds"])
        yield self._totals("step_tokens", "Tokens computed in a step.", stats["step_tokens"])

    def _label(self, label: str) -> str:
        return {"model_name": self._model_name, "tier": DEVICE, "how": "recompute"}[label]

    def _gauge(self, name: str, documentation: str, **value: float) -> GaugeMetricFamily:
        ((label, number),) = value.items()
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=[label])
        family.add_metric([self._label(label)], number)
        return family

    @staticmethod
    def _totals(name: str, documentation: str, totals: dict[str, float]) -> HistogramMetricFamily:
        """A histogram of which only sum and count are known."""
        family = HistogramMetricFamily(PREFIX + name, documentation)
        family.add_metric([], buckets=[("+Inf", totals["count"])], sum_value=totals["sum"])
        return family
