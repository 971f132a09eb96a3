"""A profile (profile.py) as a table for people and as JSON for programs."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trunkline.bench.tables import align
from trunkline.kernels.limits import Limits
from trunkline.profiling.profile import Part, StepProfile, multiplying_seconds

_COLUMNS = ("part", "ms", "share", "MB read", "GB/s", "of limit", "Gop", "Gop/s", "of limit")


def report(profile: StepProfile) -> str:
    """A title, the table, and what the step could take at least."""
    kind = f"{profile.requests:,} request{'s' * (profile.requests > 1)}"
    if profile.tokens > profile.requests:
        title = f"Prefill: a prompt of {profile.tokens:,} tokens"
    else:
        title = f"Decode: {kind} at context {profile.context:,}"
        title += ", each under a JSON schema" if profile.constrained else ""
    title += f". {_ms(profile.seconds)} ms a step, {profile.tokens / profile.seconds:,.0f} tokens/s"
    beside = ", ".join(f"{name} in {_ms(seconds)} ms" for name, seconds in profile.beside.items())
    return "\n".join([title, "", _table(profile), "", f"Meanwhile: {beside}.", *_bound(profile)])


def _table(profile: StepProfile) -> str:
    rows: list[Sequence[str]] = [_COLUMNS]
    for group, members in groupby(profile.parts, key=lambda part: part.group):
        parts = list(members)
        rows.append(_row(group, parts, profile))
        if len(parts) > 1:
            rows += [_row(f"· {part.name}", [part], profile) for part in parts]
    rows.append(_row("a step", profile.parts, profile))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return align(
        [[row[0], *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))] for row in rows]
    )


def _row(name: str, parts: Sequence[Part], profile: StepProfile) -> tuple[str, ...]:
    """Of these parts together."""
    limits = profile.limits
    seconds = sum(part.seconds for part in parts)
    num_bytes, operations = sum(part.num_bytes for part in parts), sum(part.operations for part in parts)
    cells = [name, _ms(seconds), _percent(seconds / profile.seconds)]
    cells += [f"{num_bytes / 1e6:,.1f}", f"{num_bytes / seconds / 1e9:,.1f}"] if num_bytes else ["", ""]
    cells.append(_percent(num_bytes / limits.read_rate / seconds) if num_bytes and limits else "")
    cells += [f"{operations / 1e9:,.2f}", f"{operations / seconds / 1e9:,.0f}"] if operations else ["", ""]
    cells.append(_percent(multiplying_seconds(parts, limits) / seconds) if operations and limits else "")
    return tuple(cells)


def _bound(profile: StepProfile) -> list[str]:
    if profile.limits is None:
        return ["The machine's limits were not measured: that takes the compiled kernels."]
    limits, size = (
        profile.limits,
        f"{profile.weight_bytes / 1e6:,.1f} MB of weights and {profile.kv_bytes / 1e6:,.1f} MB",
    )
    reading, multiplying, bound = profile.reading_seconds, profile.multiplying_seconds, profile.bound_seconds
    what = "reading" if reading >= multiplying else "multiplying"
    lines = [
        f"Reading {size} of keys and values takes {_ms(reading)} ms ({limits.read_rate / 1e9:.1f} GB/s).",
        f"Multiplying takes {_ms(multiplying)} ms ({_rates(limits)}).",
        f"The bound is {what}, {_ms(bound)} ms: {_reached(bound, profile)}.",
    ]
    if bound == reading and profile.memory_rate:
        seconds = profile.memory_seconds
        lines.append(
            f"Read from memory alone ({profile.memory_rate / 1e9:.1f} GB/s) it would be {_ms(seconds)} ms: {_reached(seconds, profile)}."
        )
    return lines


def _reached(bound: float, profile: StepProfile) -> str:
    fastest = f"the fastest, of {_ms(profile.fastest)} ms, {_percent(bound / profile.fastest)}"
    return f"the step reaches {_percent(bound / profile.seconds)} of it, {fastest}"


def _rates(limits: Limits) -> str:
    return ", ".join(f"{rate / 1e9:.0f} Gop/s ({name})" for name, rate in limits.multiply_rates.items())


def numbers(profile: StepProfile) -> dict[str, Any]:
    """For JSON: seconds, bytes, operations, and rates a second."""
    told = profile._asdict() | {"seconds": profile.seconds, "parts": [part._asdict() for part in profile.parts]}
    if profile.limits is not None:
        told["limits"] = profile.limits._asdict()
        told["bound"] = {"reading": profile.reading_seconds, "multiplying": profile.multiplying_seconds}
        if profile.memory_rate:
            told["bound"]["reading_from_memory"] = profile.memory_seconds
        told["reached"] = profile.bound_seconds / profile.seconds
    return told


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"
