import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.bench.client import Outcome
from trunkline.bench.report import command, percentile, spread, summarize, table
from trunkline.bench.runner import Run
from trunkline.bench.workloads import SCHEMA, Turn, Workload


def make_run(*outcomes: Outcome, wall_seconds: float = 2.0, schema=None) -> Run:
    turns = [Turn(prompt="x", prompt_tokens=1, max_tokens=4, schema=schema) for _ in outcomes]
    workload = Workload(name="W9", title="a test", concurrency=2, sessions=tuple((turn,) for turn in turns))
    return Run(workload=workload, outcomes=tuple(zip(turns, outcomes, strict=True)), wall_seconds=wall_seconds)


def answered(text: str = "", **overrides) -> Outcome:
    facts = {"started": 0.0, "first": 0.5, "last": 1.1, "finished": 1.2, "prompt_tokens": 32, "completion_tokens": 4}
    return Outcome(text=text, **{**facts, **overrides})


@given(values=st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_percentile_agrees_with_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1])


def test_percentile_of_one_and_of_none() -> None:
    assert percentile([3.0], 99) == 3.0
    assert math.isnan(percentile([], 50))
    assert spread([]) == {"mean": None, "p50": None, "p99": None}


def test_summary() -> None:
    run = make_run(answered(cached_tokens=16), answered(first=0.7, last=1.0), answered(error="HTTP 400: no"))
    summary = summarize(run)
    assert (summary["requests"], summary["succeeded"], summary["failures"]) == (3, 2, 1)
    assert summary["first_error"] == "HTTP 400: no"
    assert summary["output_tokens_per_second"] == 4.0  # 2 · 4 tokens in 2 s
    assert summary["prompt_tokens_per_second"] == 32.0
    assert summary["cached_tokens"] == 16
    assert summary["ttft_ms"]["mean"] == pytest.approx(600)
    assert summary["tpot_ms"]["mean"] == pytest.approx(150)  # (200 + 100) / 2
    assert "valid_json" not in summary


def test_answers_to_a_schema_are_checked() -> None:
    ticket = (
        '{"title": "Cold", "kind": "fault", "urgency": 4, "open": true,'
        ' "place": {"town": "Bath", "floor": 3}, "tags": ["heat"]}'
    )
    summary = summarize(make_run(answered(ticket), answered('{"title": 3}'), answered('{"cut o'), schema=SCHEMA))
    assert summary["valid_json"] == 2
    pytest.importorskip("jsonschema")
    assert summary["valid_schema"] == 1


def test_table_is_markdown_and_survives_no_success() -> None:
    lines = table(
        [summarize(make_run(answered())), summarize(make_run(answered(error="refused", first=None)))]
    ).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1
    assert "–/–/–" in lines[3]


def test_the_api_key_is_not_written_down() -> None:
    assert "secret" not in command(["/somewhere/bin/trunkline", "bench", "--api-key", "secret", "--seed", "3"])
    assert command(["/x/trunkline/__main__.py", "bench", "--api-key=secret", "--seed", "3"]).endswith("--seed 3")
