"""Every error Trunkline raises on purpose.

    TrunklineError
    ├── StartupError                 the server cannot start: one sentence, exit code 1, no traceback
    │   ├── ModelError               the checkpoint is missing, truncated, unsupported or unsafe
    │   └── ConfigError              a flag's value makes no sense
    ├── RequestError                 one request is refused; every other request goes on
    │   ├── InvalidParameter         400  a value of the wrong type or out of range
    │   ├── ContextLengthExceeded    400  the prompt is longer than the model or than the whole cache
    │   ├── PinRefused               400  more would be pinned than a tenant may, or less than a page
    │   ├── ModelNotFound            404  no model of that name is served
    │   ├── QueueFull                429  too much is waiting already
    │   ├── Overloaded               503  the engine is still loading, or shutting down
    │   └── GenerationFailed         500  the engine could not go on with this request
    └── EngineDead                   the engine process ended; requests in flight are lost

A message is a sentence that says the value seen, the value allowed, and what to do.
"""

import contextlib
import json
import re
from typing import Any

LONGEST_SHOWN = 80  # characters of a value in a message


def shown(seen: Any) -> str:
    """A value as a message shows it, cut if it is long: as JSON has it, but for a text's quotes, which are single ones."""
    text = repr(seen)
    if seen is None or isinstance(seen, bool | dict | list):
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # no JSON: what a caller from Python may give
            text = json.dumps(seen, ensure_ascii=False)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def without_passwords(text: str) -> str:
    """The same, with what stands before the host of each URL masked: `http://…@host`."""
    return re.sub(r"//[^/?#\s]+@", "//…@", text)


class TrunklineError(Exception):
    """Root of all errors raised on purpose."""


class StartupError(TrunklineError):
    """The server cannot start. The message is printed alone, and the process exits with code 1."""


class ModelError(StartupError):
    """The checkpoint cannot be served."""


class ConfigError(StartupError):
    """A flag, an environment variable or a combination of them is wrong."""


class RequestError(TrunklineError):
    """One request is refused.

    status       HTTP status, e.g. 400
    type         OpenAI's error type, e.g. "invalid_request_error"
    code         OpenAI's error code, or None
    param        the name of the offending parameter, or None
    retry_after  seconds after which the caller may try again, or None
    """

    status: int = 400
    type: str = "invalid_request_error"
    code: str | None = None
    retry_after: float | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def reword(self, message: str, param: str | None) -> None:
        """Say the same in the words of another surface."""
        self.message, self.param, self.args = message, param, (message,)


class InvalidParameter(RequestError, ValueError):
    """A parameter has the wrong type or is out of range."""

    @classmethod
    def of(cls, param: str, seen: Any, allowed: str) -> "InvalidParameter":
        """`InvalidParameter.of("top_p", 2, "a number from 0 to 1")`."""
        return cls(f"'{param}' is {shown(seen)}; allowed is {allowed}.", param=param)


class ContextLengthExceeded(RequestError):
    """The prompt does not fit. The wording is OpenAI's: client libraries match on it."""

    code = "context_length_exceeded"

    def __init__(self, *, limit: int, seen: int, what: str = "messages", cause: str = "") -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your {what} resulted in {seen} tokens."
            f" Please reduce the length of the {what}.{cause}",
            param=what,
        )
        self.limit = limit
        self.seen = seen


class PinRefused(RequestError):
    """A prefix can't be pinned: not with 429, for trying again by itself does not help."""

    code = "pin_refused"


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class QueueFull(RequestError):
    """Too much is waiting already. Type and code are those of OpenAI's rate limits: client libraries try again by
    themselves."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, what: str, where: str, seen: int, limit: int, *, retry_after: float) -> None:
        """`what` is "requests" or "tokens"; `where` is what is full, e.g. "the queue"."""
        super().__init__(
            f"With this request {seen} {what} would wait in {where}; at most {limit} may."
            f" Please try again in {retry_after:g} seconds."
        )
        self.type = what
        self.retry_after = retry_after


class Overloaded(RequestError):
    """The engine cannot take the request now; the caller may try again."""

    status = 503
    type = "server_error"
    code = "model_loading"


class GenerationFailed(RequestError):
    """The engine had to give up on one request."""

    status = 500
    type = "server_error"
    code = "internal_error"


class EngineDead(TrunklineError):
    """The engine process ended."""
