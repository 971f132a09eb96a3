"""Says how it went: a table at the end, and a section with charts in Locust's HTML report. Knows the rows of `measures`, no user.

Locust's report has a row for each of ours, but its charts are of all requests together, and it has no place for others. So the section
is put into the finished page, before the end of its body: a table, and charts as inline SVG.
"""

import time
from html import escape

from locust.stats import RequestStats

from loadtests.chart import Series, line_chart
from loadtests.measures import PROMPT_TOKENS, TPOT, TTFT, kinds, totals

HEADINGS = ("users", "requests", "failed", "TTFT p50", "TTFT p95", "TPOT p50", "tokens out", "cached", "valid")


class History:
    """The curves of the charts: each kind's points, (seconds since the start, value)."""

    def __init__(self) -> None:
        self.ttft: Series = {}
        self.cached: Series = {}
        self._before: dict[str, tuple[int, int]] = {}
        self._started = time.monotonic()

    def sample(self, stats: RequestStats) -> None:
        """Take a point of each kind that has had an answer since the last."""
        now = time.monotonic() - self._started
        for kind in kinds(stats):
            counted = totals(stats, kind)
            prompt, cached = self._before.get(kind, (0, 0))
            self._before[kind] = (counted.prompt_tokens, counted.cached_tokens)
            if (came := counted.prompt_tokens - prompt) > 0:
                self.cached.setdefault(kind, []).append((now, 100 * (counted.cached_tokens - cached) / came))
                if (ttft := stats.get(kind, TTFT).get_current_response_time_percentile(0.5)) is not None:
                    self.ttft.setdefault(kind, []).append((now, float(ttft)))


def rows(stats: RequestStats) -> list[tuple[str, ...]]:
    """One row of text per kind, under HEADINGS. Times are milliseconds."""
    found = []
    for kind in kinds(stats):
        requests, ttft, tpot = (stats.get(kind, row) for row in ("POST", TTFT, TPOT))
        counted = totals(stats, kind)
        times = (
            ttft.get_response_time_percentile(0.5),
            ttft.get_response_time_percentile(0.95),
            tpot.median_response_time,
        )
        valid = "" if counted.valid_ratio is None else f"{100 * counted.valid_ratio:.1f} %"
        numbers = (requests.num_requests, requests.num_failures, *(round(one) for one in times), counted.output_tokens)
        found.append((kind, *(f"{number:,}" for number in numbers), f"{100 * counted.cached_ratio:.1f} %", valid))
    return found


def summary(stats: RequestStats) -> str:
    """The table, and a line about all kinds together."""
    table = [HEADINGS, *rows(stats)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    every = [totals(stats, kind) for kind in kinds(stats)]
    prompt, cached, output = (
        sum(column) for column in zip((0, 0, 0), *((one[0], one[1], one[2]) for one in every), strict=True)
    )
    share = 100 * cached / max(1, prompt)
    lines.append(f"{prompt:,} prompt tokens, {cached:,} of them cached ({share:.1f} %); {output:,} output tokens")
    return "\n".join(lines)


def add_section(page: str, stats: RequestStats, history: History) -> str:
    """Locust's page, with the section."""
    before, end, after = page.rpartition("</body>")
    return before + section(stats, history) + end + after


def section(stats: RequestStats, history: History) -> str:
    """The section of the HTML report."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(stats))
    return (
        '<section id="trunkline" style="margin: 2em; font: 14px sans-serif; color: #333; background: #fff">'
        "<style>#trunkline td, #trunkline th { text-align: right; padding: 4px 12px }</style>"
        f"<h2>By kind of user</h2><table><tr>{head}</tr>{body}</table><p>Times are milliseconds.</p>"
        + line_chart("Prompt tokens found in the cache (%)", history.cached, top=100)
        + line_chart("Time to first token, median of the last 10 s (ms)", history.ttft)
        + "</section>"
    )


def answers(stats: RequestStats) -> int:
    """Answers of all kinds together."""
    return sum(stats.get(kind, PROMPT_TOKENS).num_requests for kind in kinds(stats))


def too_little_cached(stats: RequestStats, wanted: float) -> str | None:
    """Why the RAG users' share of cached tokens fails the run, or None."""
    counted = totals(stats, "rag")
    if not wanted or counted.cached_ratio >= wanted:
        return None
    return (
        f"{counted.cached_ratio:.3f} of the RAG users' prompt tokens were cached: less than --min-cached-ratio {wanted}"
    )
