"""/metrics: the names that dashboards know, and counters that count."""

import os
import time
from typing import Any

import httpx
import msgspec
import pytest

from tests.api.metric_names import PREFIX, TABLE, read_page
from tests.api.serving import MODEL, Server, metrics, wait_idle
from trunkline.api.metrics import Metrics, RequestObserver
from trunkline.messages import Totals

ONLY_WITH_TIERS = {"trunkline:tier_errors_total"}  # of memory and disk; this server has neither
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def page(http: httpx.Client, server: Server) -> str:
    """After a bit of everything: a plain text, one that follows a schema, a refused schema, a request that is none."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "metrics want some traffic first, and so on", "max_tokens": 4}
    structured = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    refused = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nothing"}}}
    statuses = [
        http.post("/v1/completions", json=each).status_code
        for each in (
            body,
            {**body, "max_tokens": 32, "response_format": structured},
            {**body, "response_format": refused},
            {**body, "max_tokens": "many"},
        )
    ]
    assert statuses == [200, 200, 400, 400]
    wait_idle(server.url)
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.text


def test_the_whole_table(page: str) -> None:
    """Every name of the contract is there with its kind and its labels, and nothing else is."""
    found = read_page(page)
    assert {name: kind for name, (kind, _) in found.items()} == {name: row.kind for name, row in TABLE.items()}
    for name, (_, series) in found.items():
        assert series or name in ONLY_WITH_TIERS, f"{name} has no sample"
        for labels in series:
            assert labels.keys() == TABLE[name].labels.keys(), name
            for label, value in labels.items():
                values = TABLE[name].labels[label]
                assert values is None or value in values, f'{name}{{{label}="{value}"}}'
                assert label != "model_name" or value == MODEL


def test_histograms_have_buckets(page: str) -> None:
    """Else no quantile can be had: the engine's, too."""
    for name in (name for name, row in TABLE.items() if row.kind == "histogram"):
        assert len([line for line in page.splitlines() if line.startswith(f"{name}_bucket")]) > 5, name


def test_both_processes_are_told(server: Server, page: str) -> None:
    now = metrics(server.url)
    assert now["trunkline:engine_process_resident_memory_bytes"] > now["process_resident_memory_bytes"] > 2**24
    assert now["process_open_fds"] == pytest.approx(len(os.listdir(f"/proc/{server.process.pid}/fd")), abs=8)
    fds = len(os.listdir(f"/proc/{server.engine_pid()}/fd"))
    assert now["trunkline:engine_process_open_fds"] == pytest.approx(fds, abs=8)


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
    "step_seconds": {"sum": 0.1, "count": 2, "bounds": (0.05, 0.5), "counts": [1, 1]},
    "step_tokens": {"sum": 10, "count": 2, "bounds": (), "counts": []},
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


def test_buckets_add_up() -> None:
    """From what the engine measures to what Prometheus reads: a bound includes its value, and buckets are cumulative."""
    measured = Totals.within(1, 10)
    for value in (0.5, 1, 2, 11):
        measured.add(value)
    measured.add(6, count=3)  # three of 2 each
    found = rendered(step_tokens=msgspec.to_builtins(measured))
    assert {name: value for name, value in found.items() if name.startswith("step_tokens")} == {
        'step_tokens_bucket{le="1.0"}': 2,
        'step_tokens_bucket{le="10.0"}': 6,
        'step_tokens_bucket{le="+Inf"}': 7,
        "step_tokens_count": 7,
        "step_tokens_sum": 20.5,
    }


def test_while_there_is_no_engine() -> None:
    """What the process itself knows is told, and that it takes no requests."""
    page = Metrics("m").render(None, is_ready=False).decode()
    assert f'{PREFIX}engine_ready{{model_name="m"}} 0.0' in page
    assert f'{PREFIX}request_failures_total{{code="engine_dead"}} 0.0' in page
    assert f"{PREFIX}num_requests_running" not in page
    assert f"{PREFIX}engine_process" not in page


def test_an_engine_process_that_is_gone_is_left_out() -> None:
    gone = next(number for number in range(2**22 - 1, 0, -1) if not os.path.exists(f"/proc/{number}"))
    assert f"{PREFIX}engine_process" not in Metrics("m").render(None, engine_pid=gone).decode()
