"""What it saves to read a shared prefix once for all its readers: decode attention on a CPU, grouped against flat.

    python -m benchmarks.shared_prefix               # a minute
    python -m benchmarks.shared_prefix --pairs 5 --layers 4

Sixteen requests decode, each behind the same 2,048 tokens and a short tail of its own. The same queries go through attention twice,
once with the shared run in the plan and once without; the figure is the median over pairs of steps of the ratio of process CPU time.
A step is all that it does for its attention: the batch, and as many layers as SmolLM2 has, so that keys and values come from memory as
they do in an engine. The two steps of a pair take turns layer by layer, half the layers apart. Results must be the same, to the bit,
or it fails. Heads are written query/kv/size.

Estimated while the kernel was written, from flat's 42 of the 100 GFLOP/s that the core reaches: 1.6 × for SmolLM2's heads in float16, more
in float32, which is twice the bytes; 1.00 × where nothing is shared; of the scheduler, half a microsecond per request and step when nothing
changed. The first two were wrong, README.md says why.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trunkline.bench.report import platform_facts
from trunkline.bench.tables import align
from trunkline.kernels.cpu import CpuKernels
from trunkline.kernels.interface import Batch, make_batch
from trunkline.radix.events import NOBODY
from trunkline.radix.lease import Lease
from trunkline.radix.node import Root
from trunkline.scheduler.grouping import Grouping
from trunkline.step import SPLIT, Int32, SharedRun

PAGE_SIZE = 16
TAIL = 64  # tokens of a request alone, at most
LAYERS = 30


class Case(NamedTuple):
    """What decodes: `readers` of `shared` tokens, in groups of `together` that share nothing with one another."""

    name: str
    readers: int = 16
    together: int = 16
    shared: int = 2048
    query_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    threads: int = 1


CASES = (
    Case("16 × 2,048, 9/3/64"),
    Case("the same, two threads", threads=2),
    Case("the same, float32", dtype=torch.float32),
    Case("16 × 2,048, 9/9/64", kv_heads=9),
    Case("16 × 2,048, 32/8/128", query_heads=32, kv_heads=8, head_dim=128),
    Case("four groups of 4 × 2,048", together=4),
    Case("eight groups of 2 × 2,048", together=2),
    Case("eight groups of 2 × 512", together=2, shared=512),
    Case("nothing shared", together=1),
    Case("nothing shared, two threads", together=1, threads=2),
)


class Measured(NamedTuple):
    """Microseconds of CPU time of one layer, medians, and the ratio of each pair."""

    flat: float
    grouped: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def page_table(case: Case, rng: np.random.Generator) -> Int32:
    """int32 [readers, pages], scattered; the groups' first pages are the same."""
    pages, tail = case.shared // PAGE_SIZE, TAIL // PAGE_SIZE
    groups = case.readers // case.together
    ids = rng.permutation(groups * pages + case.readers * tail).astype(np.int32)
    shared, own = ids[: groups * pages].reshape(groups, pages), ids[groups * pages :].reshape(case.readers, tail)
    return np.concatenate([shared.repeat(case.together, axis=0), own], axis=1)


@contextmanager
def cpu_time(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Adds what it took."""
    start = time.process_time()
    yield
    seconds[name] += time.process_time() - start


def measure(case: Case, pairs: int, layers: int) -> Measured:
    """Raises AssertionError if grouping changes a bit."""
    rng = np.random.default_rng(0)
    kernels, table = CpuKernels(case.threads), page_table(case, rng)
    context_len = (case.shared + rng.integers(1, TAIL, case.readers)).astype(np.int32)
    kv = kernels.allocate_kv(
        num_layers=layers,
        num_pages=table.max() + 1,
        page_size=PAGE_SIZE,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
    )
    for layer in range(layers):
        kv.keys[layer].normal_()
        kv.values[layer].normal_()
    runs = [
        SharedRun(np.arange(first, first + case.together, dtype=np.int32), 0, case.shared)
        for first in range(0, case.readers, case.together)
        if case.together > 1
    ]
    qkv = torch.randn(case.readers, (case.query_heads + 2 * case.kv_heads) * case.head_dim)
    width = case.query_heads * case.head_dim
    outs = {name: torch.empty(layers, case.readers, width) for name in ("flat", "grouped")}

    def prepare(name: str) -> Batch:
        batch = make_batch(
            positions=context_len - 1,
            query_start=np.arange(case.readers + 1, dtype=np.int32),
            context_len=context_len,
            page_table=table,
            shared=runs if name == "grouped" else (),
            page_size=PAGE_SIZE,
            num_pages=kv.num_pages,
        )
        return kernels.prepare(batch, kv)

    def steps() -> dict[str, float]:
        """CPU seconds of one step of each."""
        seconds, batches = dict.fromkeys(outs, 0.0), {}
        for name in outs:
            with cpu_time(seconds, name):
                batches[name] = prepare(name)
        for turn in range(2 * layers):
            name = ("flat", "grouped")[(turn + turn // 2) % 2]
            layer = (turn // 2 + (layers // 2 if name == "flat" else 0)) % layers
            with cpu_time(seconds, name):
                kernels.attention(qkv, batches[name], kv, layer, case.head_dim**-0.5, out=outs[name][layer])
        return seconds

    found = [steps() for _ in range(pairs + 1)][1:]  # the first warms up
    assert torch.equal(outs["flat"], outs["grouped"]), f"{case.name}: grouping has changed a result"
    flat, grouped = ([seconds[name] for seconds in found] for name in outs)
    ratios = [one / other for one, other in zip(flat, grouped, strict=True)]
    return Measured(statistics.median(flat) / layers * 1e6, statistics.median(grouped) / layers * 1e6, ratios)


def grouping_times(requests: int, splits: int) -> tuple[float, float]:
    """Microseconds of CPU time a request to find the runs of a plan: when nothing has changed, and anew."""
    pages = SPLIT // PAGE_SIZE * splits
    shared = np.arange(pages, dtype=np.int32)
    leases = [
        Lease(NOBODY, 0, Root(NOBODY), shared, np.arange(4, dtype=np.int32) + pages + 4 * request)
        for request in range(requests)
    ]
    table, starts = np.stack([lease.pages for lease in leases]), [splits * SPLIT + 9] * requests
    grouping = Grouping(PAGE_SIZE)

    def each(operation: Callable[[], Any]) -> float:
        calls, seconds = 10, []
        for _ in range(50):
            start = time.process_time()
            for _ in range(calls):
                operation()
            seconds.append(time.process_time() - start)
        return statistics.median(seconds) / calls / requests * 1e6

    grouping.runs(leases, starts, table)
    unchanged = each(lambda: grouping.runs(list(leases), starts, table))
    anew = each(lambda: Grouping(PAGE_SIZE).runs(leases, starts, table))
    return unchanged, anew


def tables(results: list[tuple[Case, Measured]], grouping: list[tuple[int, int, float, float]]) -> str:
    """Markdown, for README.md."""
    rows = [("decode attention", "flat, µs a layer", "grouped", "flat / grouped", "of each pair")]
    for case, found in results:
        pairs = " ".join(f"{ratio:.2f}" for ratio in found.ratios)
        rows.append((case.name, f"{found.flat:,.0f}", f"{found.grouped:,.0f}", f"{found.ratio:.2f}", pairs))
    costs = [("requests", "shared splits", "µs a request, unchanged", "anew")]
    costs += [(str(n), str(splits), f"{unchanged:.2f}", f"{anew:.2f}") for n, splits, unchanged, anew in grouping]
    return f"{align(rows)}\n\n{align(costs)}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.shared_prefix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, metavar="N", default=9, help="of runs (%(default)s)")
    parser.add_argument("--layers", type=int, metavar="N", default=LAYERS, help="that a run goes through (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every number to this JSON file as well")
    args = parser.parse_args(argv)
    if args.pairs < 1 or args.layers < 1:
        parser.error(f"--pairs is {args.pairs}, --layers {args.layers}; allowed is 1 or more")
    results = [(case, measure(case, args.pairs, args.layers)) for case in CASES]
    grouping = [(n, splits, *grouping_times(n, splits)) for n, splits in ((16, 4), (256, 4), (256, 64))]
    print(tables(results, grouping))
    facts = platform_facts()
    print(
        f"\n{facts['cpus']} cores; trunkline {facts['trunkline']}; {args.layers} layers; `python -m benchmarks.shared_prefix`"
    )
    if args.output is not None:
        numbers = [{"case": case.name, **found._asdict()} for case, found in results]
        args.output.write_text(
            json.dumps({"facts": facts, "attention": numbers, "grouping": grouping}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
