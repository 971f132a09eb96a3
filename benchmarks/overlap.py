"""What planning costs, and whether it hides behind the device: the engine around a device that takes a fixed time per step.

    python -m benchmarks.overlap                                 # 256 requests, 10 ms a step: half a minute
    python -m benchmarks.overlap --requests 64 --step-ms 5

The device is the stub worker with depth 1: a step begins when it is submitted, or when the one before it ends, and is over
`--step-ms` later. While one runs, the engine plans the next. Reported are the engine's steps per second over the device's own
rate, and the CPU time of the engine's thread per running request and step: all there is between two steps, messages for the
callers included. Best of `--runs` for both: other work on the machine only adds.
"""

import argparse
import gc
import json
import sys
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from tests.stub import StubWorker
from trunkline.bench.tables import align
from trunkline.config import EngineConfig, ModelSource, SchedulerConfig
from trunkline.messages import Generate
from trunkline.sampling import SamplingParams
from trunkline.scheduler.engine import Engine
from trunkline.step import Plan, StepResult

PROMPT_TOKENS = 64
WARM_UP_STEPS = 20


class FixedRateDevice(StubWorker):
    """Takes the same time for every step, side by side with whoever plans the next; chooses token 1."""

    def __init__(self, *, step_seconds: float, **options: Any) -> None:
        super().__init__(depth=1, **options)
        self._seconds = step_seconds
        self._ends: deque[float] = deque()  # when each step in flight will be over
        self._ends_at = 0.0  # the newest

    def submit(self, plan: Plan) -> int:
        self._ends_at = max(self._ends_at, time.perf_counter()) + self._seconds
        self.in_flight.append(plan)
        self._ends.append(self._ends_at)
        return plan.step

    def wait(self, handle: int) -> StepResult:
        plan, ends_at = self.in_flight.popleft(), self._ends.popleft()
        time.sleep(max(0.0, ends_at - time.perf_counter()))
        rows = len(plan.rows)
        return StepResult(step=plan.step, token_ids=np.ones(rows, np.int32), logprobs=(None,) * rows)


class Run(NamedTuple):
    """steps_per_second of the engine; cpu_us: microseconds of its thread's CPU per running request and step."""

    steps_per_second: float
    cpu_us: float


def run(requests: int, step_seconds: float, steps: int) -> Run:
    """`requests` that generate, for `steps` steps."""
    max_tokens = WARM_UP_STEPS + steps + requests * PROMPT_TOKENS // 512 + 64
    pages = requests * -(-(PROMPT_TOKENS + max_tokens) // 16) + 64
    worker = FixedRateDevice(step_seconds=step_seconds, num_pages=pages, page_size=16)
    config = EngineConfig(model=ModelSource(path="stub"), scheduler=SchedulerConfig(max_num_seqs=requests))
    engine = Engine(config, worker, eos_token_ids=(0,), max_model_len=2**20, vocab_size=worker.vocab_size)
    rng = np.random.default_rng(0)
    for index in range(requests):
        prompt = rng.integers(2, worker.vocab_size, PROMPT_TOKENS).astype("<i4").tobytes()
        engine.handle(
            Generate(
                request_id=str(index),
                prompt=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
        )
    while any(request.num_output < WARM_UP_STEPS for request in engine.scheduler.requests.values()):
        engine.step()
    gc.collect()
    gc.freeze()  # as the engine process does once all is loaded
    began, cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        engine.step()
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
    gc.unfreeze()
    assert len(engine.scheduler.running) == requests, "some have ended: the figures are of fewer"
    engine.close()
    return Run(steps / seconds, 1e6 * cpu / steps / requests)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    args = parser.parse_args(arguments)
    runs = [run(args.requests, args.step_ms / 1e3, args.steps) for _ in range(args.runs)]
    device_rate = 1e3 / args.step_ms
    figures = {
        "requests": args.requests,
        "step_ms": args.step_ms,
        "share_of_device_rate": max(each.steps_per_second for each in runs) / device_rate,
        "cpu_us_per_request_and_step": min(each.cpu_us for each in runs),
        "runs": [each._asdict() for each in runs],
    }
    print(
        align(
            [
                ("requests", "step", "steps/s of the device's", "CPU per request and step"),
                (
                    str(args.requests),
                    f"{args.step_ms:g} ms",
                    f"{figures['share_of_device_rate']:.3f}",
                    f"{figures['cpu_us_per_request_and_step']:.1f} µs",
                ),
            ]
        )
    )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
