"""GET /metrics, in Prometheus' text format: what this process saw of its requests, and what the engine counts.

Names and units are those of DESIGN.md §8, under the prefix `trunkline:`.
"""

import collections
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trunkline.api.generation import Generation
from trunkline.errors import TrunklineError

PREFIX = "trunkline:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEVICE = "device"  # the first tier of the cache

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
            "inter_token_latency_seconds",
            "Between two tokens of a choice; of those that came together, an equal part each.",
            TOKEN_BUCKETS,
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
        # Requests refused before the engine saw them, by the backend they ask for; told together with the engine's own.
        self.grammar_refused: collections.Counter[str] = collections.Counter()
        self.grammar_postcheck_failures = Counter(
            PREFIX + "grammar_postcheck_failures",
            "Finished texts that do not follow the schema, by the backend that followed them.",
            ["backend"],
            registry=self.registry,
        )

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, documentation, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self.model_name)

    def render(self, engine: dict[str, Any] | None) -> bytes:
        """The page. `engine` is its reply to the call "stats"; None while it cannot answer."""
        registry = CollectorRegistry()
        registry.register(_RefusalCollector(self.grammar_refused, engine or {}))
        if engine is not None:
            registry.register(_EngineCollector(engine, self.model_name))
        return generate_latest(self.registry) + generate_latest(registry)


class RequestObserver:
    """Times one request, from its making on (api.generation.Observer)."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._newest: dict[int, float] = {}  # choice -> when its newest token came

    def opened(self, generation: Generation) -> None:
        """Its time began when it was made."""

    def tokens(self, index: int, num: int) -> None:
        now = time.perf_counter()
        if not self._newest:
            self._metrics.time_to_first_token.observe(now - self._arrived)
        if index in self._newest:
            for _ in range(num):
                self._metrics.inter_token_latency.observe((now - self._newest[index]) / num)
        self._newest[index] = now

    def first_token(self, queue_seconds: float, prefill_seconds: float) -> None:
        self._metrics.request_queue_time.observe(queue_seconds)
        self._metrics.request_prefill_time.observe(prefill_seconds)

    def finished(self, reason: str) -> None:
        self._metrics.request_success.labels(reason).inc()
        if reason != "abort":
            self._metrics.e2e_request_latency.observe(time.perf_counter() - self._arrived)

    def closed(self, generation: Generation, error: TrunklineError | None) -> None:
        """Failures are counted where they are answered."""


class _Family(NamedTuple):
    """One of the engine's statistics as Prometheus has it: a number, or a number for each value of a label.

    key    of `Engine.stats()`; its name here too
    label  whose values are the keys of the numbers
    plain  the value that is meant where the engine tells one number only
    """

    key: str
    documentation: str
    label: str
    plain: str = ""


_COUNTERS = (
    _Family("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", "tier", DEVICE),
    _Family("prefix_cache_hits_total", "Tokens found in the prefix cache.", "tier", DEVICE),
    _Family("prefix_cache_misses_total", "Requests, by why no more of the prompt was cached.", "reason"),
    _Family("num_preemptions_total", "Requests that lost their pages to others.", "how", "recompute"),
    _Family("evicted_pages_total", "Cached pages given up for new ones.", "tier", DEVICE),
    _Family("tier_errors_total", "What went wrong in the tiers behind the device; a miss each.", "kind"),
    _Family("spec_decode_num_draft_tokens_total", "Draft tokens that were verified.", "source"),
    _Family("spec_decode_num_accepted_tokens_total", "Draft tokens that were right.", "source"),
)
MAX_VALUES = 16  # of one label; what comes after them counts as OTHER, so that no page grows without end
OTHER = "other"


class _RefusalCollector(Collector):
    """What was refused for its grammar: by this process, which reads schemas, and by the engine, which compiles them."""

    def __init__(self, here: Mapping[str, int], stats: dict[str, Any]) -> None:
        there: dict[str, int] = stats.get("grammar_refused_total", {})
        self._numbers: dict[str, float] = {name: here.get(name, 0) + there.get(name, 0) for name in {**here, **there}}

    def collect(self) -> Iterator[Metric]:
        yield _counter("grammar_refused_total", "Grammars refused, by backend.", "backend", self._numbers)


class _EngineCollector(Collector):
    """The engine's counters and gauges as Prometheus families. What the engine does not tell is left out."""

    def __init__(self, stats: dict[str, Any], model_name: str) -> None:
        self._stats = stats
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats, name = self._stats, self._model_name
        yield _gauge("num_requests_running", "Requests in the running batch.", "model_name", {name: stats["running"]})
        yield _gauge("num_requests_waiting", "Requests in the queue.", "model_name", {name: stats["waiting"]})
        # Of the device it is what running requests hold, as before there were tiers: cached pages are free to be used.
        usage = {**stats.get("tier_usage", {}), DEVICE: stats["kv_cache_usage"]}
        yield _gauge("kv_cache_usage_perc", "KV pages that are in use, 0 to 1.", "tier", usage)
        yield _gauge("kv_cache_pages", "KV pages by owner.", "owner", stats["pages"])
        if "pinned_pages" in stats:
            yield _gauge(
                "kv_cache_pinned_pages",
                "Cached pages that stay until a time.",
                "model_name",
                {name: stats["pinned_pages"]},
            )
        for key, documentation in (
            (
                "prompt_tokens_total",
                "Prompt tokens of accepted requests; a prompt that several choices share counts once.",
            ),
            ("prompt_tokens_computed_total", "Prompt tokens computed, rather than found in the cache."),
            ("generation_tokens_total", "Tokens generated."),
        ):
            yield _counter(key, documentation, "model_name", {name: stats[key]})
        for family in _COUNTERS:
            if family.key in stats:
                told = stats[family.key]
                numbers = told if isinstance(told, dict) else {family.plain: told}
                yield _counter(family.key, family.documentation, family.label, numbers)
        for key, documentation in (
            ("grammar_compile_seconds", "Compiling a grammar."),
            ("grammar_mask_seconds", "Filling the mask of one token."),
        ):
            if key in stats:
                yield _totals_by("backend", key, documentation, stats[key])
        yield _totals("step_seconds", "Duration of a step.", stats["step_seconds"])
        yield _totals("step_tokens", "Tokens computed in a step.", stats["step_tokens"])


def _gauge(name: str, documentation: str, label: str, numbers: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, number in _bounded(numbers).items():
        family.add_metric([value], number)
    return family


def _counter(name: str, documentation: str, label: str, numbers: dict[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, number in _bounded(numbers).items():
        family.add_metric([value], number)
    return family


def _bounded(numbers: dict[str, float]) -> dict[str, float]:
    values = list(numbers.items())
    kept, rest = dict(values[:MAX_VALUES]), values[MAX_VALUES:]
    return {**kept, OTHER: sum(number for _, number in rest)} if rest else kept


def _totals(name: str, documentation: str, totals: dict[str, float]) -> HistogramMetricFamily:
    """A histogram of which only sum and count are known."""
    family = HistogramMetricFamily(PREFIX + name, documentation)
    family.add_metric([], buckets=[("+Inf", totals["count"])], sum_value=totals["sum"])
    return family


def _totals_by(label: str, name: str, documentation: str, totals: dict[str, dict[str, float]]) -> HistogramMetricFamily:
    """The same for each value of a label."""
    family = HistogramMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, one in totals.items():
        family.add_metric([value], buckets=[("+Inf", one["count"])], sum_value=one["sum"])
    return family
