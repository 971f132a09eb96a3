"""POST /v1/requests/{id}/cancel: end a request that runs or waits, by any of its names.

    x-request-id of the HTTP request, which the caller may choose    job-17
    id of the answer                                                 chatcmpl-5f2c…
    id of one of its continuations, as in GET /v1/queue              chatcmpl-5f2c…-3

Its client gets the error `request_cancelled`; the engine forgets it within a step, as if that client had gone away.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.generation import Generation
from trunkline.api.metrics import Metrics
from trunkline.api.openapi import Route
from trunkline.api.request_log import LoggedRequest
from trunkline.api.tenants import Caller
from trunkline.errors import RequestError, TrunklineError, shown


class RequestCancelled(RequestError):
    """What the client of a cancelled request gets. Not one of the statuses after which clients try again by themselves."""

    status = 499
    type = "request_cancelled"
    code = "request_cancelled"

    def __init__(self) -> None:
        super().__init__("The request was cancelled: somebody sent its id to POST /v1/requests/{id}/cancel.")


class RequestNotFound(RequestError):
    """Nothing of that name runs or waits, or it is another's: which of them is not told."""

    status = 404
    code = "request_not_found"


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


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """What was cancelled: several, if a caller uses one x-request-id several times at once."""

    cancelled: list[CancelledRequest]


class RunningRequests:
    """The requests under way, by their names.

    observer = running.observe(metrics, "job-17", "chatcmpl-5f2c…", caller)     # of a Generation: from now on it is known
    running.cancel("job-17", caller)                                            # [CancelledRequest(…)]
    """

    def __init__(self) -> None:
        self._requests: dict[Generation, RunningRequest] = {}

    def observe(self, metrics: Metrics, request_id: str, answer_id: str, caller: Caller) -> "RunningRequest":
        """The observer of one request."""
        return RunningRequest(self._requests, metrics, request_id, answer_id, caller)

    def cancel(self, name: str, caller: Caller) -> list[CancelledRequest]:
        """End the requests of that name that `caller` has sent; for an admin, anybody's. [] if there are none."""
        found = [
            (generation, request)
            for generation, request in self._requests.items()
            if request.is_called(name, generation) and (caller.is_admin or request.caller.owner == caller.owner)
        ]
        return [request.told(generation) for generation, request in found if generation.cancel(RequestCancelled())]


class RunningRequest(LoggedRequest):
    """A request that is in `requests` from its generation's beginning to its end."""

    def __init__(
        self,
        requests: "dict[Generation, RunningRequest]",
        metrics: Metrics,
        request_id: str,
        answer_id: str,
        caller: Caller,
    ) -> None:
        super().__init__(metrics, request_id, answer_id, caller.tenant)
        self.caller = caller
        self._requests = requests
        self._request_id = request_id
        self._answer_id = answer_id

    def is_called(self, name: str, generation: Generation) -> bool:
        """Whether this is one of its names."""
        return name in (self._request_id, self._answer_id) or name in generation.request_ids

    def told(self, generation: Generation) -> CancelledRequest:
        """What is said of it once it is cancelled."""
        usage = generation.usage
        return CancelledRequest(
            id=self._answer_id,
            request_id=self._request_id,
            tenant=self.caller.tenant,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )

    def opened(self, generation: Generation) -> None:
        self._requests[generation] = self

    def closed(self, generation: Generation, error: TrunklineError | None) -> None:
        del self._requests[generation]
        super().closed(generation, error)


async def cancel(request: Request) -> Response:
    """End a request of one's own, or for an admin anybody's, that runs or waits."""
    running: RunningRequests = request.app.state.service.running
    name = request.path_params["request_id"]
    cancelled = running.cancel(name, caller_of(request))
    if not cancelled:
        raise RequestNotFound(
            f"No request {shown(name)} of yours runs or waits. It may have ended; GET /v1/queue lists those there are.",
            param="request_id",
        )
    return json_response(Cancelled(cancelled=cancelled))


# Ids that callers choose may hold slashes.
ROUTES = (Route("POST", "/v1/requests/{request_id:path}/cancel", cancel, Cancelled),)
