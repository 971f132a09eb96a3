"""The numbers of a run, as a table for people and as JSON for programs. Knows no network."""

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trunkline import __version__
from trunkline.bench.client import Outcome
from trunkline.bench.runner import Run
from trunkline.bench.tables import NONE, align
from trunkline.bench.workloads import Turn


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile, linear between the two nearest values; NaN if there is none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def spread(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 99th percentile in milliseconds; None if nothing was measured."""
    if not seconds:
        return {"mean": None, "p50": None, "p99": None}
    found = {"mean": sum(seconds) / len(seconds), "p50": percentile(seconds, 50), "p99": percentile(seconds, 99)}
    return {name: round(1000 * value, 3) for name, value in found.items()}


def summarize(run: Run) -> dict[str, Any]:
    """Everything that is reported of one workload.

    Tokens per second are those of the requests that succeeded, over the wall time of the whole workload; prompt tokens
    include the cached ones.
    """
    good = [outcome for _, outcome in run.outcomes if outcome.error is None]
    errors = [outcome.error for _, outcome in run.outcomes if outcome.error is not None]
    planned = sum(len(session) for session in run.workload.sessions)
    output_tokens = sum(outcome.completion_tokens for outcome in good)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    firsts = [outcome.time_to_first_token for outcome in good]
    paces = [outcome.time_per_output_token for outcome in good]
    summary: dict[str, Any] = {
        "workload": run.workload.name,
        "title": run.workload.title,
        "concurrency": run.workload.concurrency,
        "requests": planned,
        "succeeded": len(good),
        "failures": planned - len(good),  # a chat that broke off counts the turns that were not sent
        "first_error": errors[0] if errors else None,
        "wall_seconds": round(run.wall_seconds, 3),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(outcome.cached_tokens for outcome in good),
        "output_tokens_per_second": round(output_tokens / run.wall_seconds, 2),
        "prompt_tokens_per_second": round(prompt_tokens / run.wall_seconds, 2),
        "ttft_ms": spread([value for value in firsts if value is not None]),
        "tpot_ms": spread([value for value in paces if value is not None]),
    }
    if any(turn.schema for turn, _ in run.outcomes):
        checked = [
            (turn.schema, outcome.text) for turn, outcome in run.outcomes if turn.schema and outcome.error is None
        ]
        summary["valid_json"] = sum(_parses(text) for _, text in checked)
        summary["valid_schema"] = _count_valid(checked)
    summary["requests_detail"] = [_detail(turn, outcome) for turn, outcome in run.outcomes]
    return summary


def _detail(turn: Turn, outcome: Outcome) -> dict[str, Any]:
    first, pace = outcome.time_to_first_token, outcome.time_per_output_token
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.completion_tokens,
        "finish_reason": outcome.finish_reason,
        "ttft_ms": None if first is None else round(1000 * first, 3),
        "tpot_ms": None if pace is None else round(1000 * pace, 3),
        "seconds": round(outcome.finished - outcome.started, 4),
        "error": outcome.error,
    }


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _count_valid(checked: list[tuple[dict[str, Any], str]]) -> int | None:
    """How many texts meet their schema; None if the `jsonschema` package is not installed."""
    try:
        import jsonschema
    except ImportError:
        return None
    parsed = [(schema, json.loads(text)) for schema, text in checked if _parses(text)]
    return sum(bool(jsonschema.Draft202012Validator(schema).is_valid(value)) for schema, value in parsed)


_COLUMNS = (
    "",
    "ok",
    "failed",
    "wall s",
    "out tok/s",
    "in tok/s",
    "TTFT ms mean/p50/p99",
    "TPOT ms mean/p50/p99",
    "cached",
    "valid",
)


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, aligned so that it reads well in a terminal too."""
    rows = [_COLUMNS]
    for one in summaries:
        valid = ""
        if "valid_json" in one:
            valid = f"json {one['valid_json']}/{one['requests']}"
            if one["valid_schema"] is not None:
                valid += f", schema {one['valid_schema']}/{one['requests']}"
        row = (
            one["workload"],
            f"{one['succeeded']}/{one['requests']}",
            f"{one['failures']}",
            f"{one['wall_seconds']:.1f}",
            f"{one['output_tokens_per_second']:.1f}",
            f"{one['prompt_tokens_per_second']:.1f}",
            _three(one["ttft_ms"], 0),
            _three(one["tpot_ms"], 1),
            f"{one['cached_tokens']:,} of {one['prompt_tokens']:,}",
            valid,
        )
        rows.append(row)
    return align(rows)


def _three(milliseconds: dict[str, float | None], digits: int) -> str:
    return "/".join(NONE if value is None else f"{value:.{digits}f}" for value in milliseconds.values())


def platform_facts() -> dict[str, Any]:
    """What a number needs beside it to mean something later: versions and the machine, without its name."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }
    facts["trunkline"] = __version__
    for package in ("torch", "transformers", "aiohttp"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    facts["command"] = command(sys.argv)
    return facts


def command(argv: Sequence[str]) -> str:
    """The command line as it can be typed again, with the API key left out."""
    kept = []
    hide_next = False
    for argument in argv:
        if hide_next:
            argument = "…"
        elif argument.startswith("--api-key="):
            argument = "--api-key=…"
        hide_next = argument == "--api-key"
        kept.append(argument)
    program = "trunkline" if kept[0].endswith(("trunkline", "__main__.py")) else kept[0]
    return shlex.join([program, *kept[1:]])
