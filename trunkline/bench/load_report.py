"""The numbers of a load, under the names of vLLM's `bench serve` where they mean the same. Knows no network.

TTFT  time to first token    TPOT  time per output token after the first, of a request    ITL  between two chunks of text
E2EL  from sending to the last byte
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.bench.client import Outcome
from trunkline.bench.report import percentile
from trunkline.bench.tables import NONE, align

METRICS = ("ttft", "tpot", "itl", "e2el")


def load_numbers(
    outcomes: Sequence[Outcome], wall_seconds: float, *, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Everything that is reported. Times are in milliseconds; None where nothing was measured.

    percentiles  ranks, 0 to 100
    goodput      metric -> milliseconds: requests that keep to all of them are counted as good
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    prompt, output = sum(one.prompt_tokens for one in good), sum(one.completion_tokens for one in good)
    cached = sum(one.cached_tokens for one in good)
    numbers: dict[str, Any] = {
        "completed": len(good),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "duration": round(wall_seconds, 3),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": cached,
        "cached_token_ratio": round(cached / prompt, 4) if prompt else None,
        "request_throughput": _rate(len(good), wall_seconds),
        "output_throughput": _rate(output, wall_seconds),
        "total_token_throughput": _rate(prompt + output, wall_seconds),
    }
    if goodput:
        numbers["request_goodput"] = _rate(sum(_keeps(one, goodput) for one in good), wall_seconds)
    for metric in METRICS:
        values = [value for one in good for value in milliseconds(one, metric)]
        numbers |= {
            f"mean_{metric}_ms": _rounded(statistics.fmean(values) if values else math.nan),
            f"median_{metric}_ms": _rounded(percentile(values, 50)),
            f"std_{metric}_ms": _rounded(statistics.pstdev(values) if values else math.nan),
            **{f"p{rank:g}_{metric}_ms": _rounded(percentile(values, rank)) for rank in percentiles},
        }
    return numbers


def milliseconds(outcome: Outcome, metric: str) -> list[float]:
    """What one request has of a metric: one value, or none, or of ITL a value for each gap."""
    if metric == "itl":
        return [1000 * gap for gap in outcome.gaps]
    value = {
        "ttft": outcome.time_to_first_token,
        "tpot": outcome.time_per_output_token,
        "e2el": outcome.finished - outcome.started,
    }[metric]
    return [] if value is None else [1000 * value]


def load_table(numbers: Mapping[str, Any], *, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The numbers for people."""
    ratio = numbers["cached_token_ratio"]
    share = NONE if ratio is None else f"{100 * ratio:.1f} %"
    goodput = f", {numbers['request_goodput']:.2f} good ones" if "request_goodput" in numbers else ""
    columns = ("mean", "median", "std", *(f"p{rank:g}" for rank in percentiles))
    rows = [("ms", *columns)]
    rows += [(metric.upper(), *(_cell(numbers[f"{column}_{metric}_ms"]) for column in columns)) for metric in metrics]
    requests = (
        f"Requests: {numbers['completed']:,} completed, {numbers['failed']:,} failed, in {numbers['duration']:.1f} s"
    )
    requests += f" ({numbers['request_throughput']:.2f} a second{goodput})"
    tokens = (
        f"Tokens: {numbers['total_input_tokens']:,} in ({numbers['total_cached_tokens']:,} of them cached, {share}),"
    )
    tokens += f" {numbers['total_output_tokens']:,} out ({numbers['output_throughput']:.1f} a second)"
    return f"{requests}\n{tokens}\n\n{align(rows)}"


def _keeps(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    return all(value <= limit for metric, limit in goodput.items() for value in milliseconds(outcome, metric))


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds else 0.0


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _cell(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"
