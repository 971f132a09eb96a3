"""One line of the log for each request that generates, or is refused, when it has ended; never a word of a prompt, an answer or a key.

text   request id=chatcmpl-… status=200 tenant=5f2c41d0 prompt=120 cached=48 tiers=device:48 reason=differs completion=64
       finish=stop ttft=0.031 seconds=1.204 request_id=req_…
       request status=400 tenant=5f2c41d0 error=context_length_exceeded param=messages seconds=0.002 request_id=req_…
json   {…,"message":"request","request_id":"req_…","id":"chatcmpl-…","route":"/v1/chat/completions","status":200,
       "tenant":"5f2c41d0","prompt_tokens":120,"cached_tokens":48,"cached_by_tier":{"device":48},
       "cache_reasons":{"differs":1},"completion_tokens":64,"finish_reasons":{"stop":1},"error":null,"param":null,
       "ttft_seconds":0.031,"seconds":1.204}

    record = Record("req_…")                 # the HTTP request arrives (edge.py)
    record.generated = LoggedRequest(…)      # it is on its way to the engine (service.py), which tells what happens to it
    record.status, record.error = 200, None  # how it was answered
    log(record)
"""

import logging
import re
import time
from collections.abc import Iterable
from typing import Any

from trunkline.api.errors import as_request_error
from trunkline.api.generation import Generation, OutputProcessor
from trunkline.api.metrics import Metrics, RequestObserver
from trunkline.api.tenants import TENANT_SHOWN
from trunkline.errors import RequestError, TrunklineError
from trunkline.logs import facts
from trunkline.sampling import SamplingParams

logger = logging.getLogger("trunkline.api")

# What a parameter's path begins with, as far as it is made of names like ours: keys that callers chose may be anything.
_NAME = r"[a-z][a-z0-9_]{0,39}(?=[.\[]|$)"
_PARAM = re.compile(rf"{_NAME}(?:\[\d{{1,9}}\]|(?<!^metadata)\.{_NAME})*")
LONGEST_PARAM = 100  # characters

READ = "done"  # the end of a request that only reads its prompt: embeddings, warming


class LoggedRequest(RequestObserver):
    """Times one request that generates, and keeps what is to be told of it. All times are those of time.perf_counter.

    answer_id        that of the answer; ids in the engine begin with it
    sampling         what is wanted, once it has ended
    opened_at        when it was on its way to the engine,
    queue_seconds    and from there, of the choice that was first: until it was admitted,
    prefill_seconds  and until its first token
    grammar_seconds  that its grammar took to compile; None: there is none, or it was known
    closed_at        when it had ended
    line             what is told of it then
    """

    def __init__(self, metrics: Metrics, request_id: str, answer_id: str, tenant: str) -> None:
        super().__init__(metrics)
        self.answer_id = answer_id
        self.sampling: SamplingParams | None = None
        self.opened_at: float | None = None
        self.queue_seconds: float | None = None
        self.prefill_seconds: float | None = None
        self.grammar_seconds: float | None = None
        self.closed_at: float | None = None
        self.line: dict[str, Any] | None = None
        self._labels = {"id": answer_id, "request_id": request_id, "tenant": tenant[:TENANT_SHOWN]}
        self._first_token_at: float | None = None

    def opened(self, generation: Generation) -> None:
        self.opened_at = time.perf_counter()

    def tokens(self, index: int, num: int) -> None:
        if self._first_token_at is None:
            self._first_token_at = time.perf_counter()
        super().tokens(index, num)

    def compiled(self, seconds: float) -> None:
        if self.grammar_seconds is None:
            self.grammar_seconds = seconds

    def first_token(self, queue_seconds: float, prefill_seconds: float) -> None:
        if self.queue_seconds is None:
            self.queue_seconds, self.prefill_seconds = queue_seconds, prefill_seconds
        super().first_token(queue_seconds, prefill_seconds)

    def closed(self, generation: Generation, error: TrunklineError | None) -> None:
        self.sampling = generation.sampling
        self.closed_at = time.perf_counter()
        first = self._first_token_at
        self.line = {
            **self._labels,
            **_of(generation),
            "error": _code(as_request_error(error)) if error is not None else None,
            "ttft_seconds": None if first is None else round(first - self.arrived, 6),
            "seconds": round(self.closed_at - self.arrived, 6),
        }


class Record:
    """What becomes of one HTTP request.

    arrived    on time.perf_counter,
    arrived_ns and on the clock of the wall: nanoseconds of Unix time
    status     of the answer; None: there was none, yet
    error      its code, if the answer or the end of a stream was an error
    param      that the error blames, as the log shows it; None: none, or one of a name that is nobody's
    ignored    names of fields that nobody knows
    tenant     who sent it, as the log shows it
    generated  what it generates; None: nothing
    """

    __slots__ = ("arrived", "arrived_ns", "error", "generated", "ignored", "param", "request_id", "status", "tenant")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.arrived = time.perf_counter()
        self.arrived_ns = time.time_ns()
        self.status: int | None = None
        self.error: str | None = None
        self.param: str | None = None
        self.ignored: list[str] = []
        self.tenant = ""
        self.generated: LoggedRequest | None = None

    def fail(self, error: RequestError) -> None:
        """It is answered with an error, or its stream ends with one."""
        self.error = _code(error)
        found = _PARAM.match(error.param or "")
        self.param = found[0][:LONGEST_PARAM] if found else None

    def generates(self, observer: LoggedRequest) -> None:
        """It is on its way to the engine; its time counts from its arrival here."""
        observer.arrived = self.arrived
        self.generated = observer

    @property
    def failure(self) -> str | None:
        """The code of the error, wherever it came from; None: there was none."""
        generated = self.generated.line if self.generated is not None else None
        found = self.error or (generated["error"] if generated is not None else None)
        return found or (str(self.status) if self.status is not None and self.status >= 400 else None)


def log(record: Record, route: str) -> None:
    """Write the line of a request that was answered, if it generated or failed.

    route  the path it came to, as the table of routes has it
    """
    told = record.generated.line if record.generated is not None else None
    if told is None:
        if record.failure is None:
            return
        told = {
            "request_id": record.request_id,
            "tenant": record.tenant,
            "seconds": round(time.perf_counter() - record.arrived, 6),
        }
    line = {**told, "status": record.status, "route": route, "error": record.failure, "param": record.param}
    logger.info("request", extra=facts(line, short=_short(line)))


def _of(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    reports = [report for report in generation.cache_reports if report is not None]
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "cached_by_tier": _sums(pair for report in reports for pair in report.cached_by_tier.items()),
        "cache_reasons": _sums((report.reason, 1) for report in reports),
        "completion_tokens": usage.completion_tokens,
        "finish_reasons": _sums((_end(choice, generation.sampling), 1) for choice in generation.choices),
    }


def _end(choice: OutputProcessor, sampling: SamplingParams | None) -> str:
    """How it ended. Where nothing was to be generated, a length that is reached is no cut."""
    if choice.finish_reason == "length" and sampling is not None and sampling.max_tokens == 0:
        return READ
    return choice.finish_reason or "abort"


def _sums(numbers: Iterable[tuple[str, int]]) -> dict[str, int]:
    """By name. There is mostly one, for which a Counter takes ten times as long."""
    sums: dict[str, int] = {}
    for name, number in numbers:
        sums[name] = sums.get(name, 0) + number
    return sums


def _short(line: dict[str, Any]) -> dict[str, Any]:
    """What people look for, without what is not there; several of a kind as "stop:2,length:1"."""
    ttft = line.get("ttft_seconds")
    told = {
        "id": line.get("id"),
        "status": line["status"],
        "tenant": line["tenant"],
        "prompt": line.get("prompt_tokens"),
        "cached": line.get("cached_tokens"),
        "tiers": ",".join(f"{tier}:{num}" for tier, num in line.get("cached_by_tier", {}).items()),
        "reason": _counted(line.get("cache_reasons", {})),
        "completion": line.get("completion_tokens"),
        "finish": _counted(line.get("finish_reasons", {})),
        "error": line["error"],
        "param": line["param"],
        "ttft": None if ttft is None else round(ttft, 3),
        "seconds": round(line["seconds"], 3),
    }
    return {name: value for name, value in told.items() if value not in (None, "")}


def _counted(numbers: dict[str, int]) -> str:
    if list(numbers.values()) == [1]:
        return next(iter(numbers))
    return ",".join(f"{name}:{num}" for name, num in numbers.items())


def _code(error: RequestError) -> str:
    return error.code or str(error.status)
