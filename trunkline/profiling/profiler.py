"""Takes steps of the engine, as the engine process does, and notes when each of their parts began and ended (profile.py).

with Profiler(engine, worker, machine, max_model_len=worker.max_model_len) as profiler:
    profiler.decode(batch=8, context=512, steps=20)      # a StepProfile; None: it does not fit into the KV cache
    profiler.prefill(tokens=512, steps=20)
"""

import gc
import itertools
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import zmq

from trunkline.bench.steps import FIRST_TOKEN, WARM_UPS
from trunkline.constraint import Grammar
from trunkline.errors import ConfigError
from trunkline.kernels.limits import Machine, measure_limits
from trunkline.messages import Abort, Call, Generate, decode_from_engine, encode
from trunkline.profiling.profile import StepProfile, TimedStep, Work, mean_parts, middle_half, packed_matrices
from trunkline.sampling import SamplingParams
from trunkline.scheduler.engine import Engine
from trunkline.scheduler.process import STDIN, Mailbox
from trunkline.step import Plan, StepResult, Worker

MOST_TRIES = 3  # times the steps wanted: grammars are compiled meanwhile, prompts are read, texts are forced


class _Watched:
    """The engine's worker, and when it was given a plan and gave back a result."""

    def __init__(self, worker: Any, clock: Callable[[], float]) -> None:
        self._worker = worker
        self._kernels = worker.runner.kernels
        self._clock = clock
        self._notes_times = False
        self.forget()

    def forget(self) -> None:
        self.plan: Plan | None = None
        self.result: StepResult | None = None
        self.submitted = self.handed = self.waiting = self.received = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def submit(self, plan: Plan) -> Any:
        self.operations()  # of a step before that nobody asked for
        if hasattr(self._kernels, "start_profile"):
            self._kernels.start_profile()
            self._notes_times = True
        self.plan = plan
        self.submitted = self._clock()
        handle = self._worker.submit(plan)
        self.handed = self._clock()
        return handle

    def wait(self, handle: Any) -> StepResult:
        self.waiting = self._clock()
        self.result = result = cast(StepResult, self._worker.wait(handle))
        self.received = self._clock()
        return result

    def operations(self) -> Mapping[str, tuple[int, float]]:
        """What those of the step took; none if the kernels don't tell, or have told."""
        notes_times, self._notes_times = self._notes_times, False
        return self._kernels.stop_profile() if notes_times else {}


class Reader:
    """Whoever the engine's messages are for: the other end of its socket."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="trunkline-")
        self.mailbox = Mailbox(f"ipc://{Path(folder) / 'engine.sock'}")  # which removes the folder
        self.mailbox.poller.unregister(STDIN)  # that is the user's, not a parent process's
        self._socket = self.mailbox.context.socket(zmq.DEALER)
        self._socket.connect(self.mailbox.address)
        self._socket.send(encode([Call(call_id=0, method="hello")]))
        ((self._name, _),) = self.mailbox.receive(block=True)

    def await_answers(self, request_id: str) -> None:
        self.mailbox.owner[request_id] = self._name

    def read(self) -> None:
        decode_from_engine(self._socket.recv())

    def close(self) -> None:
        self._socket.close(linger=0)
        self.mailbox.close()


def _lengths(context: int, steps: int) -> tuple[int, int]:
    """Tokens of a prompt from which on `steps` steps have about `context` tokens in the cache, and of its request at most."""
    wanted = WARM_UPS + steps
    prompt = max(1, context - wanted // 2)
    return prompt, prompt + MOST_TRIES * wanted


class Profiler:
    """Takes steps of an engine and of its worker, a workers.worker.LocalWorker.

    machine  whose limits are measured beside each kind of step; None: they are not
    clock    time.perf_counter, which is the worker's
    """

    def __init__(
        self,
        engine: Engine,
        worker: Any,
        machine: Machine | None,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._machine = machine
        self._max_model_len = max_model_len
        self._clock = clock
        self._seed = seed
        self._num_requests = 0
        self._reader = Reader()
        self._watched = _Watched(worker, clock)
        runner = worker.runner
        self._work = Work(runner.config, packed_matrices(runner.model), worker.page_bytes / worker.page_size)
        engine.worker = cast(Worker, self._watched)

    def close(self) -> None:
        """Leave the engine as it was, but for its cache."""
        self._engine.worker = self._worker
        self._watched.operations()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def check(self, *, batches: Iterable[int], contexts: Iterable[int], chunks: Iterable[int], steps: int) -> None:
        """Raises ConfigError if `decode`, for a batch and a context, or `prefill`, for a chunk, would."""
        for batch, context in itertools.product(batches, contexts):
            self._check_decode(batch, context, steps)
        for chunk in chunks:
            self._check_prefill(chunk)

    def _check_decode(self, batch: int, context: int, steps: int) -> None:
        _, longest = _lengths(context, steps)
        if longest > self._max_model_len:
            raise ConfigError(
                f"A context of {context:,} tokens, and {longest - context:,} more, is over the model's {self._max_model_len:,}."
            )
        if batch > (most := self._engine.scheduler.config.max_num_seqs):
            raise ConfigError(f"A batch of {batch:,} is more than --max-num-seqs, {most:,}; raise that.")

    def _check_prefill(self, tokens: int) -> None:
        if tokens >= self._max_model_len:
            raise ConfigError(f"A chunk of {tokens:,} tokens and one more is over the model's {self._max_model_len:,}.")
        if tokens > (most := self._engine.scheduler.config.max_num_batched_tokens):
            raise ConfigError(
                f"A chunk of {tokens:,} tokens is more than --max-num-batched-tokens, {most:,}; raise that."
            )

    def decode(self, *, batch: int, context: int, steps: int, grammar: Grammar | None = None) -> StepProfile | None:
        """Steps in which each of `batch` requests generates a token, with about `context` tokens in its cache. Returns None if that
        does not fit into the KV cache.

        Raises ConfigError if the engine can't take such steps.
        """
        wanted = WARM_UPS + steps
        self._check_decode(batch, context, steps)
        prompt, longest = _lengths(context, steps)
        if batch * -(-longest // self._worker.page_size) > self._worker.num_pages:
            return None
        sampling = SamplingParams(temperature=0, max_tokens=MOST_TRIES * wanted, ignore_eos=grammar is None)
        # The same prompts as for other batches: what is cached of them need not be read again before it is timed.
        names = [self._add(self._tokens(prompt, f"request {index}"), sampling, grammar) for index in range(batch)]
        found: list[TimedStep] = []
        gc.collect()
        while len(found) < wanted and self._engine.has_work:
            step = self._step()
            if step is not None and step.plan.num_requests == step.plan.num_tokens == batch:
                found.append(step)
        self._end(names)
        return self._profile(found, batch=batch, context=context, constrained=grammar is not None)

    def prefill(self, *, tokens: int, steps: int) -> StepProfile | None:
        """Steps that read a prompt of `tokens`, nothing of which is cached. Returns None if that does not fit into the KV cache.

        Raises ConfigError if the engine can't take such steps.
        """
        self._check_prefill(tokens)
        if -(-(tokens + 1) // self._worker.page_size) > self._worker.num_pages:
            return None
        found: list[TimedStep] = []
        gc.collect()
        for _ in range(WARM_UPS + steps):
            prompt = self._tokens(tokens, f"chunk {self._num_requests}")
            name = self._add(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), None)
            while self._engine.has_work:
                step = self._step()
                if step is not None and step.plan.num_tokens == tokens:
                    found.append(step)
            self._end([name])
        return self._profile(found, batch=1, context=tokens, constrained=False)

    def _profile(self, found: list[TimedStep], *, batch: int, context: int, constrained: bool) -> StepProfile:
        if len(found) <= WARM_UPS:
            raise ConfigError(
                f"Only {len(found)} steps were of the kind that is to be profiled; the engine's flags cut them otherwise."
            )
        middle = middle_half(found[WARM_UPS:])
        parts, beside = mean_parts(middle, self._work)
        weight_bytes = self._work.weight_bytes()
        kv_bytes = statistics.fmean(self._work.kv_bytes(step.plan) for step in middle)
        limits = None
        if self._machine is not None:
            limits = measure_limits(self._machine, working_set=int(weight_bytes + kv_bytes))
        return StepProfile(
            requests=batch,
            tokens=middle[0].plan.num_tokens,
            context=context,
            constrained=constrained,
            fastest=min(step.seconds for step in found[WARM_UPS:]),
            parts=parts,
            beside=beside,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            limits=limits,
        )

    def _tokens(self, length: int, name: str) -> bytes:
        """Random ones, other for every name."""
        rng = random.Random(f"{self._seed} {length} {name}")
        return array("i", (rng.randrange(FIRST_TOKEN, self._engine.vocab_size) for _ in range(length))).tobytes()

    def _add(self, prompt: bytes, sampling: SamplingParams, grammar: Grammar | None) -> str:
        name = f"profile-{self._num_requests}"
        self._num_requests += 1
        (sampling,) = sampling.continuations()
        self._reader.await_answers(name)
        message = Generate(request_id=name, prompt=prompt, sampling=sampling, grammar=grammar)
        refused = self._engine.handle(message)
        assert not refused, refused
        return name

    def _step(self) -> TimedStep | None:
        """None: nothing was computed."""
        watched, clock = self._watched, self._clock
        watched.forget()
        started = clock()
        messages = self._engine.step()
        applied = clock()
        self._reader.mailbox.deliver(messages)
        delivered = clock()
        if messages:
            self._reader.read()
        read = clock()
        if watched.plan is None or watched.result is None:
            return None
        if watched.result.marks is None:
            return None
        return TimedStep(
            plan=watched.plan,
            marks=watched.result.marks,
            started=started,
            submitted=watched.submitted,
            handed=watched.handed,
            waiting=watched.waiting,
            received=watched.received,
            applied=applied,
            delivered=delivered,
            read=read,
            operations=watched.operations(),
        )

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            self._engine.handle(Abort(request_id=name))
            self._reader.mailbox.owner.pop(name, None)
        while self._engine.has_work:
            self._engine.step()
