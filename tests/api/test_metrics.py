"""/metrics: the names that dashboards know, and counters that count."""

import re

import httpx

from tests.api.serving import MODEL, Server, metrics, wait_idle

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "kv_cache_pages": "gauge",
    "prompt_tokens_total": "counter",
    "prompt_tokens_computed_total": "counter",
    "generation_tokens_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prefix_cache_hits_total": "counter",
    "num_preemptions_total": "counter",
    "evicted_pages_total": "counter",
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
    assert 0 < grown('inter_token_latency_seconds_count{model_name="tiny"}') <= 8
    assert grown('request_success_total{finished_reason="length"}') == 1
