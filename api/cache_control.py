"""`cache_control`: the marks by which a request asks to keep what it reads, in Anthropic's spelling.

    {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "messages": […]}             the whole prompt, for an hour
    {"role": "system", "content": "…", "cache_control": {"type": "ephemeral"}}         up to its end, for 5 minutes
    {"content": [{"type": "text", "text": "…", "cache_control": {…}}]}                 the same

One prefix is pinned: the longest that is marked, for the longest time of any mark. Nothing is read or kept that would
not be anyway; a pin only ends the competition for the place. Templates never see the marks.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from trunkline.errors import InvalidParameter

NAME = "cache_control"
MAX_TTL = 24 * 3600  # seconds; what is needed for longer can be asked for again
TTL_NAMES = {"5m": 300, "1h": 3600}


TTLS = f"'5m', '1h' or seconds from 1 to {MAX_TTL}"


def _in_one_sentence(ttl: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Pydantic would tell of each alternative by itself."""
    try:
        return read(ttl)
    except ValidationError:
        raise PydanticCustomError("ttl", "Input should be {allowed}", {"allowed": TTLS}) from None


Ttl = Annotated[Literal["5m", "1h"] | Annotated[int, Field(ge=1, le=MAX_TTL)], WrapValidator(_in_one_sentence)]


def ttl_seconds(ttl: str | int) -> int:
    """Of a Ttl."""
    return TTL_NAMES[ttl] if isinstance(ttl, str) else ttl


class CacheControl(BaseModel):
    """Keep this: for five minutes, an hour, or so many seconds."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["ephemeral"]
    ttl: Ttl = "5m"

    @property
    def seconds(self) -> int:
        return ttl_seconds(self.ttl)


class PinWish(NamedTuple):
    """What a request wants to be kept."""

    seconds: int
    message: int | None  # up to the end of this message; None: the whole prompt


class Mark(NamedTuple):
    """One mark, and the message that it closes."""

    control: CacheControl
    message: int


def marks_in(items: Iterable[Mapping[str, Any]], where: str, message: int) -> list[Mark]:
    """Marks on the parts of a message, or on tools. Raises InvalidParameter for a bad one, and names the part."""
    marks = []
    for index, item in enumerate(items):
        if item.get(NAME) is None:
            continue
        try:
            marks.append(Mark(CacheControl.model_validate(item[NAME]), message))
        except ValidationError:
            allowed = f"{{'type': 'ephemeral', 'ttl': …}}, where ttl is {TTLS}"
            raise InvalidParameter.of(f"{where}[{index}].{NAME}", item[NAME], allowed) from None
    return marks


def pin_wish(whole: CacheControl | None, marks: Iterable[Mark]) -> PinWish | None:
    """What the marks of one request come to; `whole` is that of the request itself."""
    found = list(marks)
    seconds = [mark.control.seconds for mark in found] + ([whole.seconds] if whole else [])
    if not seconds:
        return None
    return PinWish(max(seconds), None if whole else max(mark.message for mark in found))
