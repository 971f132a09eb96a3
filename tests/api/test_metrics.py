"""/metrics: the names that dashboards know, and counters that count."""

import re
import time
from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, Server, metrics, wait_idle
from trunkline.api.metrics import Metrics, RequestObserver

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "kv_cache_pages": "gauge",
    "kv_cache_pinned_pages": "gauge",
    "prompt_tokens_total": "counter",
    "prompt_tokens_computed_total": "counter",
    "generation_tokens_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "prefix_cache_misses_total": "counter",
    "num_preemptions_total": "counter",
    "evicted_pages_total": "counter",
    "tier_errors_total": "counter",
    "spec_decode_num_draft_tokens_total": "counter",
    "spec_decode_num_accepted_tokens_total": "counter",
    "grammar_refused_total": "counter",
    "grammar_postcheck_failures_total": "counter",
    "grammar_compile_seconds": "histogram",
    "grammar_mask_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "step_seconds": "histogram",
    "step_tokens": "histogram",
    "request_success_total": "counter",
    "request_failures_total": "counter",
}


def test_names_and_types(http: httpx.Client) -> None:
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = dict(re.findall(r"^# TYPE trunkline:(\S+) (\S+)$", page.text, re.MULTILINE))
    assert found == NAMES


def test_a_request_is_counted(http: httpx.Client, server: Server) -> None:
    body = {
        "model": MODEL,
        "prompt": "count these tokens: one, two, three, four, five, six",
        "max_tokens": 9,
        "ignore_eos": True,
    }
    http.post("/v1/completions", json=body)
    before = wait_idle(server.url)
    usage = http.post("/v1/completions", json=body).json()["usage"]
    after = metrics(server.url)

    def grown(name: str) -> float:
        return after["trunkline:" + name] - before["trunkline:" + name]

    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert grown('prompt_tokens_total{model_name="tiny"}') == usage["prompt_tokens"]
    assert grown('prompt_tokens_computed_total{model_name="tiny"}') == usage["prompt_tokens"] - cached
    assert grown('generation_tokens_total{model_name="tiny"}') == 9
    assert grown('prefix_cache_hits_total{tier="device"}') == cached
    assert grown('time_to_first_token_seconds_count{model_name="tiny"}') == 1
    assert grown('e2e_request_latency_seconds_count{model_name="tiny"}') == 1
    assert grown('request_queue_time_seconds_count{model_name="tiny"}') == 1
    assert grown('request_prefill_time_seconds_count{model_name="tiny"}') == 1
    assert (
        0
        < grown('request_prefill_time_seconds_sum{model_name="tiny"}')
        < grown('time_to_first_token_seconds_sum{model_name="tiny"}')
    )
    assert grown('inter_token_latency_seconds_count{model_name="tiny"}') == 8, "of drafts that came together, too"
    assert grown('request_success_total{finished_reason="length"}') == 1


STATS = {
    "running": 1,
    "waiting": 2,
    "kv_cache_usage": 0.5,
    "pages": {"free": 3},
    "prompt_tokens_total": 4,
    "prompt_tokens_computed_total": 5,
    "generation_tokens_total": 6,
    "step_seconds": {"sum": 0.1, "count": 2},
    "step_tokens": {"sum": 10, "count": 2},
}


def rendered(**stats: Any) -> dict[str, float]:
    page = Metrics("m").render({**STATS, **stats}).decode()
    samples = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("trunkline:")]
    return {name.removeprefix("trunkline:"): float(value) for name, value in samples}


def test_numbers_with_and_without_labels() -> None:
    plain = rendered(prefix_cache_hits_total=7, num_preemptions_total=8)
    assert plain['prefix_cache_hits_total{tier="device"}'] == 7
    assert plain['num_preemptions_total{how="recompute"}'] == 8
    found = rendered(
        prefix_cache_hits_total={"device": 1, "disk": 2},
        num_preemptions_total={"swap": 3},
        prefix_cache_misses_total={"differs": 4},
        spec_decode_num_accepted_tokens_total={"tree": 5},
        tier_usage={"device": 0.9, "host": 0.25},
        tier_errors_total={"no_space": 6},
        pinned_pages=7,
    )
    for sample, value in (
        ('prefix_cache_hits_total{tier="disk"}', 2),
        ('num_preemptions_total{how="swap"}', 3),
        ('prefix_cache_misses_total{reason="differs"}', 4),
        ('spec_decode_num_accepted_tokens_total{source="tree"}', 5),
        ('kv_cache_usage_perc{tier="device"}', 0.5),
        ('kv_cache_usage_perc{tier="host"}', 0.25),
        ('tier_errors_total{kind="no_space"}', 6),
        ('kv_cache_pinned_pages{model_name="m"}', 7),
    ):
        assert found[sample] == value


def test_what_the_engine_does_not_tell_is_left_out() -> None:
    assert not [name for name in rendered() if name.startswith(("prefix_cache", "kv_cache_pinned"))]


def test_tokens_that_come_together_share_the_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((0.0, 1.0, 1.4))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    made = Metrics("m")
    observer = RequestObserver(made)
    observer.tokens(0, 1)
    observer.tokens(0, 4)
    page = made.render(None).decode()
    assert 'inter_token_latency_seconds_bucket{le="0.05",model_name="m"} 0.0' in page
    assert 'inter_token_latency_seconds_bucket{le="0.1",model_name="m"} 4.0' in page
    assert 'time_to_first_token_seconds_sum{model_name="m"} 1.0' in page


def test_labels_are_bounded() -> None:
    many = {f"reason {number}": 1 for number in range(1000)}
    found = {name: value for name, value in rendered(prefix_cache_misses_total=many).items() if "misses" in name}
    assert len(found) == 17
    assert found['prefix_cache_misses_total{reason="other"}'] == 984
