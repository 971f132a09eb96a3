"""One part of a visit, in its own process: `python -m benchmarks.gpu_visit.part NAME --rows FILE`; started by __main__.py.

A kernel that writes where it must not leaves its process without a usable GPU: the other parts have theirs.
"""

import argparse
import contextlib
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.gpu_visit.report import Row
from trunkline.kernels.triton import interpreter

ROUNDS = 7  # of which the median is taken


class Visit:
    """What a part is given.

    device      where tensors go
    rehearsal   on a CPU, in Triton's interpreter: shapes are tiny, and times mean nothing
    ceilings    what was measured before: "copy" in bytes/s, "matmul" in FLOP/s
    seed        of all that is random
    """

    def __init__(self, part: str, file: TextIO, *, rehearsal: bool, ceilings: dict[str, float], seed: int) -> None:
        self.part = part
        self.rehearsal = rehearsal
        self.ceilings = ceilings
        self.seed = seed
        self.device = torch.device("cpu" if rehearsal else "cuda")
        self._file = file

    def emit(self, what: str, value: float | None = None, unit: str = "", **fields: Any) -> None:
        """Write a row down at once: what follows may never come to an end."""
        row = Row(part=self.part, what=what, value=value, unit=unit, **fields)
        self._file.write(json.dumps(asdict(row)) + "\n")
        self._file.flush()
        print(f"{row.part}: {row.what}: {row.value} {row.unit} {row.note}", flush=True)

    @contextlib.contextmanager
    def row(self, what: str) -> Iterator[None]:
        """Whatever goes wrong inside is a row."""
        try:
            yield
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):  # the GPU is lost to this process
                raise
            self.emit(what, failed=True, note=f"{type(error).__name__}: {str(error).strip()[:300]}")
            if not self.rehearsal:
                torch.cuda.empty_cache()

    def sizes(self, real: Any, rehearsed: Any) -> Any:
        return rehearsed if self.rehearsal else real

    def seconds(self, work: Callable[[int], None], *, calls: int = 10, graph: bool = True) -> float:
        """Of one call: the median over rounds of `calls` calls, work(0), work(1), …, on the device's own clock.

        graph  replay them as a CUDA graph, as the engine does: then the host's time for launching doesn't count
        """
        if self.rehearsal:
            started = time.perf_counter()
            work(0)
            return time.perf_counter() - started

        def round_() -> None:
            for index in range(calls):
                work(index)

        round_()  # compiles
        torch.cuda.synchronize()
        replay = self._captured(round_) if graph else round_
        replay()
        times = []
        for _ in range(ROUNDS):
            first, last = (_event() for _ in range(2))
            first.record()
            replay()
            last.record()
            last.synchronize()
            times.append(float(first.elapsed_time(last)) / 1000)
        return statistics.median(times) / calls

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        return captured.replay


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def discard(_: object) -> None:
    """For a result of which only its time is wanted."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_visit.part", description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--ceilings", type=json.loads, default={})
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if args.rehearse:
        assert os.environ.get("TRITON_INTERPRET") == "1", "a rehearsal runs in the interpreter"
        interpreter.mend()
    module = importlib.import_module(f"benchmarks.gpu_visit.{args.part}")
    with args.rows.open("a", encoding="utf-8") as file:
        visit = Visit(args.part, file, rehearsal=args.rehearse, ceilings=args.ceilings, seed=args.seed)
        module.run(visit)


if __name__ == "__main__":
    main()
