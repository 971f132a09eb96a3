"""One line of the log for each generating request, when it has ended: JSON, and never a word of a prompt or an answer.

{"event":"request","id":"chatcmpl-…","request_id":"req_…","tenant":"5f2c41d0","prompt_tokens":120,"cached_tokens":48,
 "cache_reasons":{"differs":1},"completion_tokens":64,"finish_reasons":{"stop":1},"error":null,"ttft_seconds":0.031,
 "seconds":1.204}
"""

import logging
import time
from collections import Counter
from typing import Any

import msgspec

from trunkline.api.errors import as_request_error
from trunkline.api.generation import Generation
from trunkline.api.metrics import Metrics, RequestObserver
from trunkline.errors import TrunklineError

logger = logging.getLogger("trunkline.api")

TENANT_SHOWN = 8  # characters: enough to tell tenants apart


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

    def tokens(self, index: int) -> None:
        if self._first_token_seconds is None:
            self._first_token_seconds = round(time.perf_counter() - self._started, 6)
        super().tokens(index)

    def closed(self, generation: Generation, error: TrunklineError | None) -> None:
        line = {"event": "request", **self._labels, **_of(generation)}
        line["error"] = _code(error) if error is not None else None
        line["ttft_seconds"] = self._first_token_seconds
        line["seconds"] = round(time.perf_counter() - self._started, 6)
        logger.info("%s", msgspec.json.encode(line).decode())


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


def _code(error: TrunklineError) -> str:
    told = as_request_error(error)
    return told.code or str(told.status)
