"""The requests under way: by which names they are known, how they are cancelled, and what the history keeps of them once they end.

    x-request-id of the HTTP request, which the caller may choose    job-17
    id of the answer                                                 chatcmpl-5f2c…
    id of one of its continuations, as in GET /v1/queue              chatcmpl-5f2c…-3

Knows no route.
"""

import msgspec

from trunkline.api.generation import Generation
from trunkline.api.metrics import Metrics
from trunkline.api.request_history import RequestHistory
from trunkline.api.request_log import LoggedRequest
from trunkline.api.tenants import Caller
from trunkline.errors import RequestError, TrunklineError

# Facts of the log's line that the history keeps, too.
_IN_HISTORY = (
    "seconds",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cache_reasons",
    "finish_reasons",
    "error",
)


class RequestCancelled(RequestError):
    """What the client of a cancelled request gets. Not one of the statuses after which clients try again by themselves."""

    status = 499
    type = "request_cancelled"
    code = "request_cancelled"

    def __init__(self) -> None:
        super().__init__("The request was cancelled: somebody sent its id to POST /v1/requests/{id}/cancel.")


class CancelledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One that was cancelled.

    id                 of its answer
    request_id         its x-request-id
    tenant             whose it was
    completion_tokens  generated so far
    """

    id: str
    request_id: str
    tenant: str
    prompt_tokens: int
    completion_tokens: int


class RunningRequests:
    """The requests under way, by their names; those that end go into `history`.

    observer = running.observe(metrics, "job-17", "chatcmpl-5f2c…", caller)     # of a Generation: from now on it is known
    running.cancel("job-17", caller)                                            # [CancelledRequest(…)]
    running.prefill_seconds()                                                   # {"chatcmpl-5f2c…": 0.031}
    """

    def __init__(self, history: RequestHistory | None = None) -> None:
        self.history = RequestHistory() if history is None else history
        self._requests: dict[Generation, RunningRequest] = {}

    def observe(self, metrics: Metrics, request_id: str, answer_id: str, caller: Caller) -> "RunningRequest":
        """The observer of one request."""
        return RunningRequest(self._requests, self.history, metrics, request_id, answer_id, caller)

    def prefill_seconds(self) -> dict[str, float]:
        """From admission to the first token, by the engine's ids, of those that have one."""
        return {
            engine_id: request.prefill_seconds
            for generation, request in self._requests.items()
            if request.prefill_seconds is not None
            for engine_id in generation.request_ids
        }

    def cancel(self, name: str, caller: Caller) -> list[CancelledRequest]:
        """End the requests of that name that `caller` has sent; for an admin, anybody's. [] if there are none."""
        found = self._find(name, caller)
        return [request.told(generation) for generation, request in found if generation.cancel(RequestCancelled())]

    def holds(self, name: str, caller: Caller) -> bool:
        """Whether `cancel` would find one."""
        return bool(self._find(name, caller))

    def _find(self, name: str, caller: Caller) -> "list[tuple[Generation, RunningRequest]]":
        return [
            (generation, request)
            for generation, request in self._requests.items()
            if request.is_called(name, generation) and (caller.is_admin or request.caller.owner == caller.owner)
        ]


class RunningRequest(LoggedRequest):
    """A request that is in `requests` from its generation's beginning to its end."""

    def __init__(
        self,
        requests: "dict[Generation, RunningRequest]",
        history: RequestHistory,
        metrics: Metrics,
        request_id: str,
        answer_id: str,
        caller: Caller,
    ) -> None:
        super().__init__(metrics, request_id, answer_id, caller.tenant)
        self.caller = caller
        self._requests = requests
        self._history = history
        self._request_id = request_id

    def is_called(self, name: str, generation: Generation) -> bool:
        """Whether this is one of its names."""
        return name in (self._request_id, self.answer_id) or name in generation.request_ids

    def told(self, generation: Generation) -> CancelledRequest:
        """What is said of it once it is cancelled."""
        usage = generation.usage
        return CancelledRequest(
            id=self.answer_id,
            request_id=self._request_id,
            tenant=self.caller.tenant,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def opened(self, generation: Generation) -> None:
        super().opened(generation)
        self._requests[generation] = self

    def closed(self, generation: Generation, error: TrunklineError | None) -> None:
        del self._requests[generation]
        super().closed(generation, error)
        assert self.line is not None
        self._history.add(
            self.caller.tenant,
            id=self.answer_id,
            queue_seconds=self.queue_seconds,
            prefill_seconds=self.prefill_seconds,
            first_token_seconds=self.line["ttft_seconds"],
            **{name: self.line[name] for name in _IN_HISTORY},
        )
