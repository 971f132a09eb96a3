"""The engine on a virtual clock: the real loop, scheduler and tree, a formula in place of the device. Token ids only.

    report = simulate(arrivals, cost=profile("h100-llama8b"), cache_tokens=2**20)
    print(report)                   # or report.ttft.mean, report.total.refused, …

or step by step, as many replicas as one likes, each with its own clock:

    replica = Simulator(cost=…, cache_tokens=2**20)
    replica.submit(arrival)         # at replica.now
    replica.step()                  # one step of the engine; the clock moves by what it costs
    replica.report().ttft.mean

What is simulated is the device alone. Everything that decides is what serves.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trunkline.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from trunkline.errors import ConfigError, InvalidParameter
from trunkline.messages import Failed, Finished, FromEngine, Generate, Tokens
from trunkline.sampling import SamplingParams
from trunkline.scheduler.cost_model import CostModel
from trunkline.scheduler.engine import Engine
from trunkline.step import Plan, StepResult, UInt8
from trunkline.traces import FIRST_OUTPUT_TOKEN

# Steps that may do nothing while requests wait for time to pass. The scheduler's own bounds are far below.
MOST_IDLE_STEPS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request to come.

    seconds     when, on the virtual clock
    prompt      token ids from 0 up to FIRST_OUTPUT_TOKEN, at least one, or the bytes of them as int32 little-endian;
                equal ids are equal text
    num_output  tokens that it will generate, at least 1: no two requests generate the same
    tenant      whose it is: tenants share no KV, and the engine is fair between them
    priority    lower is more urgent
    """

    seconds: float
    prompt: bytes | Sequence[int]
    num_output: int
    tenant: str = ""
    priority: int = 0


@dataclass(kw_only=True, slots=True)
class Life:
    """What became of one request. Times are seconds on the virtual clock; None: not yet, or never."""

    tenant: str
    arrived: float
    num_prompt: int
    cached_tokens: int = 0
    num_output: int = 0
    first_token: float | None = None
    last_token: float | None = None
    longest_gap: float = 0.0  # between two of its tokens
    finished: bool = False
    refused: str | None = None  # why

    def add_tokens(self, num_tokens: int, now: float) -> None:
        """Tokens of it have come out at `now`."""
        if not num_tokens:
            return
        if self.last_token is None:
            self.first_token = now
        else:
            self.longest_gap = max(self.longest_gap, now - self.last_token)
        self.last_token = now
        self.num_output += num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Seconds, over all requests that were started; without any NaN, which nobody takes for a good time."""

    mean: float = math.nan
    p50: float = math.nan
    p90: float = math.nan
    p99: float = math.nan
    max: float = math.nan

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        if not seconds:
            return cls()
        p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
        return cls(mean=sum(seconds) / len(seconds), p50=p50, p90=p90, p99=p99, max=max(seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """How a group of requests fared.

    finished, refused  requests; all other figures leave the refused ones out
    why_refused        the engine's sentence to the first that was refused; None if none was
    prompt_tokens      of those that were started
    hit_rate           share of these that was found in the cache, 0 to 1; NaN without any
    output_tokens      generated
    ttft               time to first token, from arrival
    token_seconds      mean time between two tokens of a request
    longest_gap        the longest time between two tokens of any request
    """

    finished: int
    refused: int
    why_refused: str | None
    prompt_tokens: int
    hit_rate: float
    output_tokens: int
    ttft: Spread
    token_seconds: float
    longest_gap: float

    @classmethod
    def of(cls, lives: Iterable[Life]) -> "Summary":
        lives = list(lives)
        started = [life for life in lives if life.first_token is not None]
        prompt_tokens = sum(life.num_prompt for life in started)
        followed = sum(life.num_output - 1 for life in started)
        spans = sum((life.last_token or 0.0) - (life.first_token or 0.0) for life in started)
        return cls(
            finished=sum(life.finished for life in lives),
            refused=sum(life.refused is not None for life in lives),
            why_refused=next((life.refused for life in lives if life.refused is not None), None),
            prompt_tokens=prompt_tokens,
            hit_rate=sum(life.cached_tokens for life in started) / prompt_tokens if prompt_tokens else math.nan,
            output_tokens=sum(life.num_output for life in lives),
            ttft=Spread.of([life.first_token - life.arrived for life in started if life.first_token is not None]),
            token_seconds=spans / followed if followed else 0.0,
            longest_gap=max((life.longest_gap for life in started), default=0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a simulation shows. As text it is a few lines, and requests that were refused come first.

    total        all requests
    tenants      the same by tenant, where there is more than one
    steps        that computed anything
    preemptions  running requests that had to give their pages back
    makespan     seconds from the first arrival to the last token
    utilization  share of the makespan in which a step was running, 0 to 1
    """

    total: Summary
    tenants: dict[str, Summary] = field(default_factory=dict)
    steps: int
    preemptions: int
    makespan: float
    utilization: float

    def __str__(self) -> str:
        total, ttft = self.total, self.ttft
        served = f"{total.finished:,} requests served in {self.makespan:.1f} s"
        if total.refused:
            served = (
                f"{total.refused:,} OF {total.refused + total.finished:,} REQUESTS WERE REFUSED, and are in no other"
                f" figure. The first: {total.why_refused}\n{served}"
            )
        if not total.finished:
            return served
        return (
            f"{served}, {100 * total.hit_rate:.1f} % of their {total.prompt_tokens:,} prompt tokens cached\n"
            f"time to first token: mean {ttft.mean:.2f} s, median {ttft.p50:.2f} s, 99th percentile {ttft.p99:.2f} s,"
            f" longest {ttft.max:.2f} s"
        )

    @property
    def ttft(self) -> Spread:
        return self.total.ttft

    @property
    def hit_rate(self) -> float:
        return self.total.hit_rate


class VirtualClock:
    """Seconds, moved by the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedWorker:
    """A worker whose steps take as long as a cost model says, and whose requests generate only their own seed."""

    depth = 0
    page_bytes = 1
    fingerprint = ""

    def __init__(self, cost: CostModel, clock: VirtualClock, *, num_pages: int, page_size: int) -> None:
        self.cost = cost
        self.clock = clock
        self.num_pages = num_pages
        self.page_size = page_size
        self.host_pages: UInt8 = np.empty((0, self.page_bytes), np.uint8)
        self.num_steps = 0
        self.busy_seconds = 0.0

    def submit(self, plan: Plan) -> Plan:
        return plan

    def wait(self, handle: Plan) -> StepResult:
        seconds = self.cost.seconds(handle)
        self.clock.now += seconds
        self.busy_seconds += seconds
        self.num_steps += 1
        chosen = [-1 if row.sampling is None else FIRST_OUTPUT_TOKEN + row.seed for row in handle.rows]
        return StepResult(step=handle.step, token_ids=np.array(chosen, np.int32), logprobs=(None,) * len(chosen))

    def close(self) -> None:
        """Nothing is held."""


class Simulator:
    """One engine on a clock of its own.

    cost          of its steps
    cache_tokens  tokens of KV that its memory holds, rounded down to whole pages
    lives         what became of each request, in the order of `submit`
    now           seconds
    """

    def __init__(
        self,
        *,
        cost: CostModel,
        cache_tokens: int,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
    ) -> None:
        """Raises ConfigError if the cache holds not even a page."""
        cache = CacheConfig() if cache is None else cache
        if cache_tokens < cache.block_size:
            raise ConfigError(
                f"A cache of {cache_tokens} tokens is less than a page of {cache.block_size}; give it at least as many."
            )
        self.clock = VirtualClock()
        self.worker = SimulatedWorker(
            cost, self.clock, num_pages=cache_tokens // cache.block_size, page_size=cache.block_size
        )
        self.engine = Engine(
            EngineConfig(model=ModelSource(path="simulated"), cache=cache, scheduler=simulated(scheduler)),
            self.worker,
            eos_token_ids=(),
            max_model_len=cache_tokens,
            vocab_size=FIRST_OUTPUT_TOKEN,
            clock=self.clock,
        )
        self.lives: list[Life] = []
        self._first_arrival: float | None = None
        self._idle_steps = 0

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def busy(self) -> bool:
        """True if a step would do something, or somebody waits."""
        return self.engine.has_work

    def wait_until(self, seconds: float) -> None:
        """Let time pass without a step."""
        self.clock.now = max(self.clock.now, seconds)

    def submit(self, arrival: Arrival) -> None:
        """Hand over a request, now. Its times count from its arrival, which may have been during the last step.

        Raises InvalidParameter for a prompt that is no token ids, or an output of no token.
        """
        prompt = _token_bytes(arrival.prompt)
        if arrival.num_output < 1:
            raise InvalidParameter.of("num_output", arrival.num_output, "an integer of at least 1")
        if self._first_arrival is None:
            self._first_arrival = arrival.seconds
        number = len(self.lives)
        self.lives.append(Life(tenant=arrival.tenant, arrived=arrival.seconds, num_prompt=len(prompt) // 4))
        sampling = SamplingParams(max_tokens=arrival.num_output, temperature=0, seed=number, ignore_eos=True)
        message = Generate(
            request_id=str(number),
            prompt=prompt,
            sampling=sampling,
            priority=arrival.priority,
            tenant=arrival.tenant,
        )
        self._note(self.engine.handle(message))

    def step(self) -> bool:
        """One step of the engine. False if nothing could be computed: only time, or another request, brings it on.

        Raises RuntimeError if requests wait and nothing happens for too long: the scheduler is at fault then.
        """
        before = self.worker.num_steps
        self._note(self.engine.step())
        if self.worker.num_steps > before:
            self._idle_steps = 0
            return True
        self._idle_steps += 1
        if self._idle_steps > MOST_IDLE_STEPS:
            raise RuntimeError(f"{len(self.engine.scheduler.waiting)} requests wait, and none of them is ever started")
        return False

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Let the requests come, in ascending order of their seconds, and serve them all.

        Raises InvalidParameter for requests in another order, and as `submit` does.
        """
        coming = _in_order(arrivals)
        upcoming = next(coming, None)
        while True:
            while upcoming is not None and upcoming.seconds <= self.now:
                self.submit(upcoming)
                upcoming = next(coming, None)
            if self.busy:
                if not self.step():
                    self.wait_until(self.now + self.worker.cost.step)
            elif upcoming is not None:
                self.wait_until(upcoming.seconds)
            else:
                return self.report()

    def report(self) -> Report:
        """How all requests submitted so far have fared."""
        by_tenant: dict[str, list[Life]] = {}
        for life in self.lives:
            by_tenant.setdefault(life.tenant, []).append(life)
        last = max((life.last_token for life in self.lives if life.last_token is not None), default=0.0)
        makespan = max(0.0, last - (self._first_arrival or 0.0))
        return Report(
            total=Summary.of(self.lives),
            tenants={tenant: Summary.of(lives) for tenant, lives in by_tenant.items()} if len(by_tenant) > 1 else {},
            steps=self.worker.num_steps,
            preemptions=self.engine.scheduler.counters.preemptions,
            makespan=makespan,
            utilization=self.worker.busy_seconds / makespan if makespan else 0.0,
        )

    def _note(self, messages: list[FromEngine]) -> None:
        for message in messages:
            match message:
                case Tokens():
                    life = self.lives[int(message.request_id)]
                    life.cached_tokens = message.cached_tokens
                    life.add_tokens(len(message.token_ids), self.now)
                case Finished():
                    self.lives[int(message.request_id)].finished = True
                case Failed():
                    self.lives[int(message.request_id)].refused = message.message


def _token_bytes(prompt: bytes | Sequence[int]) -> bytes:
    """Token ids as the engine takes them: int32, little-endian. Raises InvalidParameter for anything else."""
    allowed = f"a sequence of token ids from 0 to {FIRST_OUTPUT_TOKEN - 1}, or the bytes of them as int32"
    try:
        ids = np.frombuffer(prompt, "<i4") if isinstance(prompt, bytes) else np.array(list(map(operator.index, prompt)))
    except (TypeError, ValueError):
        raise InvalidParameter.of("prompt", prompt, allowed) from None
    if not len(ids) or ids.min() < 0 or ids.max() >= FIRST_OUTPUT_TOKEN:
        raise InvalidParameter.of("prompt", prompt, allowed)
    return ids.astype("<i4").tobytes()


def _in_order(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    """The same, checked one by one as they come."""
    before = -math.inf
    for arrival in arrivals:
        if not arrival.seconds >= before:
            raise InvalidParameter.of("seconds", arrival.seconds, f"{before:g} and more, that of the request before")
        before = arrival.seconds
        yield arrival


def simulated(scheduler: SchedulerConfig | None = None) -> SchedulerConfig:
    """The settings as they can be simulated: no queue is too long, and nothing is drafted, for there is no text."""
    return msgspec.structs.replace(
        scheduler or SchedulerConfig(),
        max_waiting_requests=2**62,
        max_waiting_tokens=2**62,
        num_speculative_tokens=0,
    )


def simulate(
    arrivals: Iterable[Arrival],
    *,
    cost: CostModel,
    cache_tokens: int,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
) -> Report:
    """Serve the requests, in ascending order of their seconds, and say how they fared. Arguments and errors as of
    Simulator."""
    return Simulator(cost=cost, cache_tokens=cache_tokens, cache=cache, scheduler=scheduler).run(arrivals)
