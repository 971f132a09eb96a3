"""POST /v1/requests/{id}/cancel: end a request that runs or waits, by any of its names (running_requests.py).

Its client gets the error `request_cancelled`; the engine forgets it within a step, as if that client had gone away.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.openapi import Route
from trunkline.api.running_requests import CancelledRequest, RunningRequests
from trunkline.errors import RequestError, shown


class RequestNotFound(RequestError):
    """Nothing of that name runs or waits, or it is another's: which of them is not told."""

    status = 404
    code = "request_not_found"


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """What was cancelled: several, if a caller uses one x-request-id several times at once."""

    cancelled: list[CancelledRequest]


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
