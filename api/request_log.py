"""One line of the log for each generating request, when it has ended; never a word of a prompt or an answer.

text   request id=chatcmpl-… tenant=5f2c41d0 prompt=120 cached=48 tiers=device:48 reason=differs completion=64
       finish=stop ttft=0.031 seconds=1.204
json   {…,"message":"request","id":"chatcmpl-…","request_id":"req_…","tenant":"5f2c41d0","prompt_tokens":120,"cached_tokens":48,
       "cached_by_tier":{"device":48},"cache_reasons":{"differs":1},"completion_tokens":64,"finish_reasons":{"stop":1},
       "error":null,"ttft_seconds":0.031,"seconds":1.204}
"""

import logging
import time
from collections import Counter
from typing import Any

from trunkline.api.errors import as_request_error
from trunkline.api.generation import Generation
from trunkline.api.metrics import Metrics, RequestObserver
from trunkline.api.tenants import TENANT_SHOWN
from trunkline.errors import TrunklineError
from trunkline.logs import facts

logger = logging.getLogger("trunkline.api")


class LoggedRequest(RequestObserver):
    """Times one request, from its making on, and writes its line when nothing more happens.

    request_id  that of the HTTP request
    answer_id   that of the answer; ids in the engine begin with it
    tenant      whose request
    """

    def __init__(self, metrics: Metrics, request_id: str, answer_id: str, tenant: str) -> None:
        super().__init__(metrics)
        self._labels = {"id": answer_id, "request_id": request_id, "tenant": tenant[:TENANT_SHOWN]}
        self._started = time.perf_counter()
        self._first_token_seconds: float | None = None

    def tokens(self, index: int, num: int) -> None:
        if self._first_token_seconds is None:
            self._first_token_seconds = round(time.perf_counter() - self._started, 6)
        super().tokens(index, num)

    def closed(self, generation: Generation, error: TrunklineError | None) -> None:
        line = {**self._labels, **_of(generation)}
        line["error"] = _code(error) if error is not None else None
        line["ttft_seconds"] = self._first_token_seconds
        line["seconds"] = round(time.perf_counter() - self._started, 6)
        logger.info("request", extra=facts(line, short=_short(line)))


def _of(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    reports = [report for report in generation.cache_reports if report is not None]
    tiers: Counter[str] = Counter()
    for report in reports:
        tiers.update(report.cached_by_tier)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "cached_by_tier": dict(tiers),
        "cache_reasons": dict(Counter(report.reason for report in reports)),
        "completion_tokens": usage.completion_tokens,
        "finish_reasons": dict(Counter(choice.finish_reason or "abort" for choice in generation.choices)),
    }


def _short(line: dict[str, Any]) -> dict[str, Any]:
    """What people look for, without what is not there; several of a kind as "stop:2,length:1"."""
    told = {
        "id": line["id"],
        "tenant": line["tenant"],
        "prompt": line["prompt_tokens"],
        "cached": line["cached_tokens"],
        "tiers": ",".join(f"{tier}:{num}" for tier, num in line["cached_by_tier"].items()),
        "reason": _counted(line["cache_reasons"]),
        "completion": line["completion_tokens"],
        "finish": _counted(line["finish_reasons"]),
        "error": line["error"],
        "ttft": None if line["ttft_seconds"] is None else round(line["ttft_seconds"], 3),
        "seconds": round(line["seconds"], 3),
    }
    return {name: value for name, value in told.items() if value not in (None, "")}


def _counted(numbers: dict[str, int]) -> str:
    if list(numbers.values()) == [1]:
        return next(iter(numbers))
    return ",".join(f"{name}:{num}" for name, num in numbers.items())


def _code(error: TrunklineError) -> str:
    told = as_request_error(error)
    return told.code or str(told.status)
