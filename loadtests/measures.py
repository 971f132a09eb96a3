"""What is measured beside Locust's own times, kept as rows of Locust's own statistics. Knows no user and no server.

    record(stats, "rag", answer)            # after every answer
    record_valid(stats, "json", True)       # after every answer that had to follow a schema
    totals(stats, "rag").cached_ratio       # prompt tokens that came from the cache, of all, 0 to 1

A row of Locust's counts numbers, called response times. Some of ours are milliseconds, others are tokens or percent: the row's type says so.
As rows they are in Locust's table, CSV, report and web page, are reset with them, and are summed over its workers. They are written
past `events.request`, so that the row "Aggregated" remains what it is: requests alone.
"""

from typing import NamedTuple

from locust.stats import RequestStats, StatsEntry

from loadtests.answer import Answer

TTFT = "TTFT ms"  # time to first token
TPOT = "TPOT ms"  # time per output token after the first
CACHED = "cached %"  # of a prompt's tokens; every request counts alike
VALID = "valid %"  # 100 or 0: whether it followed its schema
PROMPT_TOKENS = "prompt"  # tokens; Locust's table has eight characters for this name
CACHED_TOKENS = "cached"
OUTPUT_TOKENS = "output"


def record(stats: RequestStats, kind: str, answer: Answer) -> None:
    values = {
        TTFT: None if answer.ttft is None else 1000 * answer.ttft,
        TPOT: None if answer.tpot is None else 1000 * answer.tpot,
        CACHED: 100 * answer.cached_tokens / max(1, answer.prompt_tokens),
        PROMPT_TOKENS: answer.prompt_tokens,
        CACHED_TOKENS: answer.cached_tokens,
        OUTPUT_TOKENS: answer.output_tokens,
    }
    for row, value in values.items():
        if value is not None:
            stats.get(kind, row).log(value, 0)


def record_valid(stats: RequestStats, kind: str, valid: bool) -> None:
    stats.get(kind, VALID).log(100 if valid else 0, 0)


class Totals(NamedTuple):
    """Sums over all answers of one kind. Rows that are not there count nothing."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    checked: int
    valid: int

    @property
    def cached_ratio(self) -> float:
        """Of tokens, not the mean over requests: a long prompt counts for more."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def valid_ratio(self) -> float | None:
        """None if nothing had a schema."""
        return self.valid / self.checked if self.checked else None


def totals(stats: RequestStats, kind: str) -> Totals:
    def row(name: str) -> StatsEntry:
        return stats.entries[(kind, name)] if (kind, name) in stats.entries else StatsEntry(stats, kind, name)

    prompt, cached, output, valid = (row(name) for name in (PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS, VALID))
    return Totals(
        prompt_tokens=int(prompt.total_response_time),
        cached_tokens=int(cached.total_response_time),
        output_tokens=int(output.total_response_time),
        checked=valid.num_requests,
        valid=int(valid.total_response_time) // 100,
    )


def kinds(stats: RequestStats) -> list[str]:
    """The kinds of user that have answers, in alphabetical order."""
    return sorted({name for name, row in stats.entries if row == PROMPT_TOKENS})
