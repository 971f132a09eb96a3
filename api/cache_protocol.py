"""The bodies and the query parameters of the cache's routes. Knows no engine."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from trunkline.api.cache_control import Ttl, ttl_seconds
from trunkline.api.fields import validated
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.errors import InvalidParameter


class WarmChatRequest(ChatRequest):
    """A conversation whose prompt is to be cached for `ttl` seconds, "5m" or "1h".

    Unless `add_generation_prompt` says so, the prompt ends with the last message: what opens the answer would only be
    in the way of the conversations that go on from here.
    """

    ttl: Ttl = "5m"

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        return super().parse({"add_generation_prompt": False, **body}, strict=strict)

    @property
    def seconds(self) -> int:
        return ttl_seconds(self.ttl)


class WarmCompletionRequest(CompletionRequest):
    """A prompt that is to be cached for `ttl` seconds, "5m" or "1h"."""

    ttl: Ttl = "5m"

    @property
    def seconds(self) -> int:
        return ttl_seconds(self.ttl)


class FlushRequest(BaseModel):
    """What to drop; nothing given: all that the caller may.

    tenant      for an admin: of this tenant only
    cache_salt  what was cached under this salt only; "" is none
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    tenant: str | None = None
    cache_salt: str | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Raises InvalidParameter. A field that is misspelt must not flush more than was meant."""
        for name in body:
            if name not in cls.model_fields:
                raise InvalidParameter(
                    f"'{name[:40]}' is no field of this route; there are {', '.join(cls.model_fields)}.",
                    param=name[:40],
                )
        return validated(cls, body)


def query_number(request: Request, name: str, *, default: int, least: int, most: int) -> int:
    """A number in the address. Raises InvalidParameter for what is none, or out of range."""
    given = request.query_params.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdecimal() and len(given) <= len(str(most))
    if not is_number or not least <= int(given) <= most:
        raise InvalidParameter.of(name, given, f"an integer from {least} to {most}")
    return int(given)


def refuse_query(request: Request, *known: str) -> None:
    """Raises InvalidParameter for parameters in the address that nobody would read, and so drop more than was meant."""
    for name in request.query_params:
        if name not in known:
            allowed = f"only {', '.join(known)} may" if known else "none may"
            raise InvalidParameter(
                f"'{name[:40]}' stands in the address, where {allowed}. POST /v1/cache/flush takes the others in its body.",
                param=name[:40],
            )


def query_tenant(request: Request) -> str | None:
    """Whom a request names in its address, if anybody."""
    return request.query_params.get("tenant")
