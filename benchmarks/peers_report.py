"""What a run of benchmarks/peers.py found: medians, ratios, goals, and whether it was fair. Knows no server and no network.

cells = medians(records)                     # {("W1", "vllm"): Cell(…), …}
section(run, records)                        # Markdown, for README.md
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trunkline.bench.tables import NONE, align

OURS = "trunkline"
LLAMAS = ("llama-q8_0", "llama-q4_1")
VLLM = "vllm"
TRANSFORMERS = "transformers"
TITLES = {
    OURS: "trunkline",
    LLAMAS[0]: "llama.cpp Q8_0",
    LLAMAS[1]: "llama.cpp Q4_1",
    VLLM: "vLLM float32",
    TRANSFORMERS: "transformers float32",
}
BEGIN = "<!-- peers: from here to the end mark, benchmarks/peers.sh writes -->"
END = "<!-- peers: end -->"
HISTORY_TOLERANCE = 0.03  # of a chat's prompt tokens: its history holds the server's own answers

Record = Mapping[str, Any]


class Goal(NamedTuple):
    """Output tokens per second of ours over those of llama.cpp in the better of its two formats, and of vLLM: at least."""

    llama: float
    vllm: float


GOALS = {
    "W1": Goal(1.8, 6),
    "W2": Goal(5, 3),
    "W3": Goal(2, 3),
    "W4": Goal(2.2, 3),
    "W5": Goal(2, 1.8),
}


class Cell(NamedTuple):
    """One workload on one server, over all rounds.

    rates      output tokens per second of each round, in order
    rate       their median
    ttft       median over the rounds of the mean time to first token, ms; None where it is not measured
    cached     median of cached prompt tokens; None where it is not measured
    prompt     median of prompt tokens
    requests   in all rounds together, as are the counts of those that failed, and of answers that parse and that are valid
    """

    title: str
    rates: tuple[float, ...]
    rate: float
    ttft: float | None
    cached: int | None
    prompt: int | None
    requests: int
    failures: int
    parse: int | None
    valid: int | None


class Target(NamedTuple):
    """A goal beside what was measured. `goal` and `found` are ratios; a time to first token has to be below 1 times theirs."""

    workload: str
    what: str
    against: str
    ours: float
    theirs: float
    found: float
    goal: float
    reached: bool


def medians(records: Iterable[Record]) -> dict[tuple[str, str], Cell]:
    """By (workload, peer), in the order measured. A workload that was measured twice in a round counts once, the last time."""
    latest: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for record in records:
        summary = record["summary"]
        latest.setdefault((summary["workload"], record["peer"]), {})[record["round"]] = summary
    return {key: _cell([rounds[number] for number in sorted(rounds)]) for key, rounds in latest.items()}


def _cell(summaries: Sequence[Mapping[str, Any]]) -> Cell:
    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def total(name: str) -> int | None:
        known = [summary[name] for summary in summaries if summary.get(name) is not None]
        return sum(known) if known else None

    rates = tuple(summary["output_tokens_per_second"] for summary in summaries)
    cached = middle(summary.get("cached_tokens") for summary in summaries)
    prompt = middle(summary.get("prompt_tokens") for summary in summaries)
    return Cell(
        title=summaries[0]["title"],
        rates=rates,
        rate=statistics.median(rates),
        ttft=middle(summary.get("ttft_ms", {}).get("mean") for summary in summaries),
        cached=None if cached is None else round(cached),
        prompt=None if prompt is None else round(prompt),
        requests=sum(summary["requests"] for summary in summaries),
        failures=sum(summary["failures"] for summary in summaries),
        parse=total("valid_json"),
        valid=total("valid_schema"),
    )


# ---------------------------------------------------------------- goals


def targets(cells: Mapping[tuple[str, str], Cell]) -> list[Target]:
    """Every goal of a workload that ours and the peer in question ran."""
    found: list[Target] = []
    for workload, goal in GOALS.items():
        ours = cells.get((workload, OURS))
        if ours is None:
            continue
        llamas = {name: cell for name in LLAMAS if (cell := cells.get((workload, name))) is not None}
        if llamas:
            best = max(llamas, key=lambda name: llamas[name].rate)
            found += _rate_target(workload, best, ours, llamas[best], goal.llama)
            firsts = {name: cell.ttft for name, cell in llamas.items() if cell.ttft is not None}
            if firsts and ours.ttft is not None:
                soonest = min(firsts, key=firsts.__getitem__)
                theirs = firsts[soonest]
                found.append(
                    Target(
                        workload,
                        "mean TTFT",
                        TITLES[soonest],
                        ours.ttft,
                        theirs,
                        ours.ttft / theirs,
                        1.0,
                        ours.ttft < theirs,
                    )
                )
        if (vllm := cells.get((workload, VLLM))) is not None:
            found += _rate_target(workload, VLLM, ours, vllm, goal.vllm)
    return found


def _rate_target(workload: str, peer: str, ours: Cell, theirs: Cell, goal: float) -> list[Target]:
    if not theirs.rate:  # it answered nothing: there is nothing to compare with
        return []
    ratio = ours.rate / theirs.rate
    return [Target(workload, "output tokens/s", TITLES[peer], ours.rate, theirs.rate, ratio, goal, ratio >= goal)]


# ---------------------------------------------------------------- fairness


def problems(records: Sequence[Record]) -> list[str]:
    """What makes numbers incomparable: requests that failed, answers of other lengths than asked, prompts that other servers
    counted otherwise."""
    found = []
    measured = [record for record in records if record["peer"] != TRANSFORMERS]
    for record in measured:
        summary = record["summary"]
        where = f"{summary['workload']}, {TITLES[record['peer']]}, round {record['round'] + 1}"
        if summary["failures"]:
            first = summary["first_error"]
            found.append(f"{where}: {summary['failures']} of {summary['requests']} failed, the first with: {first}")
        elif record["asked_tokens"] is not None and summary["output_tokens"] != record["asked_tokens"]:
            found.append(
                f"{where}: {summary['output_tokens']:,} tokens written, {record['asked_tokens']:,} were asked for"
                " (ignore_eos)"
            )
    for number, workload in dict.fromkeys((record["round"], record["summary"]["workload"]) for record in measured):
        counts = {
            record["peer"]: record["summary"]["prompt_tokens"]
            for record in measured
            if (record["round"], record["summary"]["workload"]) == (number, workload)
            and not record["summary"]["failures"]
        }
        tolerance = HISTORY_TOLERANCE if workload == "W3" else 0
        if counts and max(counts.values()) - min(counts.values()) > tolerance * min(counts.values()):
            told = ", ".join(f"{TITLES[peer]} {count:,}" for peer, count in counts.items())
            found.append(f"{workload}, round {number + 1}: the servers count other prompt tokens: {told}")
    return found


# ---------------------------------------------------------------- Markdown


def results_table(cells: Mapping[tuple[str, str], Cell], peers: Sequence[str]) -> str:
    """Every workload on every server."""
    rows: list[Sequence[str]] = [
        (
            "workload",
            "server",
            "out tok/s",
            "of each round",
            "mean TTFT ms",
            "cached of prompt tokens",
            "failed",
            "answers",
        )
    ]
    for workload in dict.fromkeys(workload for workload, _ in cells):
        present = [peer for peer in peers if (workload, peer) in cells]
        for place, peer in enumerate(present):
            cell = cells[workload, peer]
            rows.append(
                (
                    f"{workload}: {cells[workload, present[0]].title}" if place == 0 else "",
                    TITLES[peer],
                    f"{cell.rate:.1f}",
                    " ".join(f"{rate:.1f}" for rate in cell.rates),
                    NONE if cell.ttft is None else f"{cell.ttft:,.0f}",
                    NONE if cell.cached is None else f"{cell.cached:,} of {cell.prompt:,}",
                    f"{cell.failures} of {cell.requests}",
                    _answers(cell),
                )
            )
    return align(rows)


def _answers(cell: Cell) -> str:
    if cell.parse is None:
        return ""
    valid = "" if cell.valid is None else f", {cell.valid} valid"
    return f"{cell.parse} of {cell.requests} parse{valid}"


def targets_table(found: Sequence[Target]) -> str:
    """Every goal, one a row."""
    rows: list[Sequence[str]] = [("workload", "", "trunkline", "against", "theirs", "ratio", "goal", "reached")]
    rows += [
        (
            target.workload,
            target.what,
            _value(target, target.ours),
            target.against,
            _value(target, target.theirs),
            f"{target.found:.2f}×",
            _goal(target),
            "yes" if target.reached else "**no**",
        )
        for target in found
    ]
    return align(rows)


def _value(target: Target, value: float) -> str:
    return f"{value:,.0f} ms" if "TTFT" in target.what else f"{value:,.1f}"


def _goal(target: Target) -> str:
    return f"< {target.goal:g}×" if "TTFT" in target.what else f"≥ {target.goal:g}×"


def section(run: Record, records: Sequence[Record]) -> str:
    """All of it as Markdown: machine, versions, both tables, what was missed and what was not fair."""
    cells = medians(records)
    peers = run["peers"]
    goals = targets(cells)
    missed = [target for target in goals if not target.reached]
    rounds = max((len(cell.rates) for cell in cells.values()), default=0)
    measured = "One round, with" if rounds == 1 else f"Medians of {rounds} rounds; each has"
    facts = run["facts"]
    parts = [
        f"Measured on {run['run'][:10]}: {facts['machine']}; python {facts['python']}.",
        "\n".join(f"- {TITLES[peer]}: {told}" for peer, told in versions(records, peers).items()),
        f"{measured} fresh servers, and texts of a seed of its own that is the same for all.",
        results_table(cells, peers),
    ]
    if goals:
        parts += ["The goals:", targets_table(goals)]
        names = ", ".join(f"{target.workload} {_short(target)}" for target in missed)
        parts.append(f"Missed: {names}." if missed else "None is missed.")
    if compared := _against_transformers(cells):
        parts.append(compared)
    if unfair := problems(records):
        parts.append("To be kept in mind when comparing:")
        parts.append("\n".join(f"- {line}" for line in unfair))
    parts.append(f"`{run['command']}`")
    return "\n\n".join(parts)


def _short(target: Target) -> str:
    return f"{target.what} against {target.against} ({target.found:.2f}×, {_goal(target)})"


def _against_transformers(cells: Mapping[tuple[str, str], Cell]) -> str:
    pairs = [
        f"{workload} {cells[workload, OURS].rate / cell.rate:.1f}×"
        for (workload, peer), cell in cells.items()
        if peer == TRANSFORMERS and (workload, OURS) in cells
    ]
    told = "transformers ran the first requests only, once, one after another; trunkline's output tokens/s over its"
    return f"{told}: {', '.join(pairs)}." if pairs else ""


def versions(records: Sequence[Record], peers: Sequence[str]) -> dict[str, str]:
    """What each server said of itself when it was last started."""
    told = {record["peer"]: record["version"] for record in records}
    return {peer: told[peer] for peer in peers if peer in told}


def replace_section(page: str, text: str) -> str:
    """The page with `text` between the marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no place for the results; put these two lines where they belong: {BEGIN} {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
