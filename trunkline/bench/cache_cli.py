"""`trunkline bench cache`: its flags, and what it prints. cache.py and replay.py measure, imported when needed."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trunkline.bench.tables import align
from trunkline.errors import ConfigError

if TYPE_CHECKING:
    from trunkline.bench.cache import Measured
    from trunkline.bench.replay import Replay

REPLAYED_ROWS = 2000
REPLAY_SIZES = (2**20, 2**22)  # tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `trunkline bench cache`, on a parser of the caller's."""
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="replay this trace, too: JSON lines in Mooncake's format (docs/simulator.md); prompts only, 8 at a time",
    )
    parser.add_argument(
        "--rows", type=int, metavar="N", default=REPLAYED_ROWS, help="of the trace, from the first on (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON instead of the tables")


def run(args: argparse.Namespace) -> int:
    """Measure, and print it. Raises StartupError, a sentence for the user, if the trace cannot be replayed."""
    if args.rows < 1:
        raise ConfigError(f"--rows is {args.rows}; allowed is 1 and more.")
    replays = _replay(args.trace, args.rows) if args.trace is not None else {}  # first: it may find the file at fault
    from trunkline.bench.cache import measure

    measured = measure()
    print(json.dumps(numbers(measured, replays), indent=1) if args.json else tables(measured, replays))
    return 0


def tables(measured: "Measured", replays: "dict[int, Replay]") -> str:
    """Every number, for people."""
    parts = [
        "Finding a warm prompt again, µs (in brackets: times bytes.startswith on the same tokens)",
        _match_table(measured),
        "Eviction, µs",
        _evict_table(measured),
        "A new prompt into a full cache, µs: "
        + ", ".join(f"{tokens:,} tokens {time:.1f}" for tokens, time in measured.insert.items()),
        "Memory beside the pool, bytes a page: "
        + ", ".join(f"{size:.0f} at {pages} pages a node" for pages, size in measured.metadata.items()),
    ]
    if replays:
        parts += ["Replay", _replay_table(replays)]
    return "\n\n".join(parts)


def numbers(measured: "Measured", replays: "dict[int, Replay]") -> dict[str, Any]:
    """Every number, for programs: times in microseconds."""
    from trunkline.bench.report import platform_facts

    return {
        "match": [times._asdict() for times in measured.match],
        "insert": measured.insert,
        "evict": [time._asdict() for time in measured.evict],
        "metadata_bytes_per_page": measured.metadata,
        "replay": [
            {
                "cache_tokens": size,
                "requests": replay.requests,
                "prompt_tokens": replay.prompt_tokens,
                "hit_rate": round(replay.hit_rate, 6),
                "requests_per_cpu_second": round(replay.requests_per_cpu_second, 1),
            }
            for size, replay in replays.items()
        ],
        "machine": platform_facts(),
    }


def _replay(trace: str, rows: int) -> "dict[int, Replay]":
    from trunkline.bench.cache import PAGE_SIZE
    from trunkline.bench.replay import replay
    from trunkline.radix.cache import PrefixCache
    from trunkline.traces import read_trace

    prompts = read_trace(trace, limit=rows)
    return {
        size: replay(PrefixCache(num_pages=size // PAGE_SIZE, page_size=PAGE_SIZE), prompts) for size in REPLAY_SIZES
    }


def _match_table(measured: "Measured") -> str:
    done = ("match", "page row", "lock + unlock")
    head = ("tokens", "startswith", *(f"{what}, {where}" for what in done for where in ("one node", "chain")))
    rows: list[Sequence[str]] = [head]
    for one in measured.match:
        timed = (one.one_node, one.chain)
        rows.append(
            (
                f"{one.tokens:,}",
                f"{one.startswith:.1f}",
                *(f"{time:.1f} ({time / one.startswith:.1f}×)" for time in timed),
                *(f"{time:.1f}" for time in (one.row_one_node, one.row_chain, one.lock_one_node, one.lock_chain)),
            )
        )
    return align(rows)


def _evict_table(measured: "Measured") -> str:
    leaves = sorted({time.leaves for time in measured.evict})
    rows: list[Sequence[str]] = [("pages evicted", *(f"out of {count:,} leaves" for count in leaves))]
    for pages in sorted({time.pages for time in measured.evict}):
        found = {time.leaves: time.microseconds for time in measured.evict if time.pages == pages}
        rows.append((f"{pages}", *(f"{found[count]:.1f}" for count in leaves)))
    return align(rows)


def _replay_table(replays: "dict[int, Replay]") -> str:
    rows: list[Sequence[str]] = [("cache tokens", "requests", "prompt tokens", "hit rate", "requests per CPU-second")]
    for size, one in replays.items():
        speed = f"{one.requests_per_cpu_second:,.0f}"
        rows.append((f"{size:,}", f"{one.requests:,}", f"{one.prompt_tokens:,}", f"{one.hit_rate:.4f}", speed))
    return align(rows)
