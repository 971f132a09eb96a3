"""Fields of a body that are wrong, unknown or not supported: the errors that name them, and one line of the log.

read_fields         of a request whose other fields are ignored, unless they look like typos of constraints or --strict-params
refuse_unsupported  they would change the answer, but we cannot honour them: never silent
validated           a body of the right types, or what pydantic found, in a sentence
treat_unknown       they are ignored, and that is said once; or refused

Knows no endpoint.
"""

import difflib
import functools
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trunkline.api.body import LONGEST_PATH
from trunkline.api.response_format import ALIKE, LONGEST_ALIKE, MOST_COMPARED, UNKNOWN_NAME, refuse_misspelt
from trunkline.errors import LONGEST_SHOWN, InvalidParameter, shown
from trunkline.sampling import INT32_MAX

Model = TypeVar("Model", bound=BaseModel)

logger = logging.getLogger("trunkline.api")

MAX_WARNED_KEYS = 1000  # unknown keys remembered, so that each is warned of once; after that, none is
MAX_SHOWN_KEYS = 10  # of them in one line of the log, or one refusal
_warned_keys: set[str] = set()

# Takes the names of fields that are ignored, for whoever answers the request at hand; None: nobody wants them.
ignored_fields: ContextVar[list[str] | None] = ContextVar("ignored_fields", default=None)

_NOT_YET = "this server does not support more yet"
_WHY_NOT = {
    "best_of": "it is a parameter of /v1/completions",
    "echo": "it is a parameter of /v1/completions",
}
_REPLACED_BY = {"functions": "tools", "function_call": "tool_choice"}


def read_fields(
    model: type[Model], body: dict[str, Any], *, others: Collection[str] = (), strict: bool = False
) -> Model:
    """`validated`; what `model` doesn't know, nor `others` hold, is ignored and named in the log, or if `strict` refused.

    Raises InvalidParameter, also for an unknown field that looks like a constraint.
    """
    parsed = validated(model, body)
    unknown = body.keys() - model.model_fields.keys()
    if unknown and (unknown := unknown.difference(others)):
        refuse_misspelt(body, unknown)
        treat_unknown(unknown, model.model_fields.keys() | set(others), strict=strict)
    return parsed


def validated(model: type[Model], body: dict[str, Any]) -> Model:
    """The body as a `model`. Raises InvalidParameter, naming the first wrong parameter."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid(error, body, model.model_fields) from None


def refuse_unsupported(body: dict[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises InvalidParameter for a field whose value asks for what we cannot do."""
    if unsupported.keys().isdisjoint(body):
        return
    for param, harmless in unsupported.items():
        if param in body and not any(body[param] == value and type(body[param]) is type(value) for value in harmless):
            raise _unsupported(param, body[param], harmless)


def _unsupported(param: str, seen: Any, harmless: tuple[Any, ...]) -> InvalidParameter:
    if (successor := _REPLACED_BY.get(param)) is not None:
        error = InvalidParameter(f"'{param}' is no longer supported; send '{successor}' instead.", param=param)
    else:
        allowed = "nothing" + "".join(f", or {shown(value)}" for value in harmless if value is not None)
        error = InvalidParameter.of(param, seen, f"{allowed}: {_WHY_NOT.get(param, _NOT_YET)}")
    error.code = "unsupported_value"
    return error


def token_id(key: str) -> int:
    """A key of `logit_bias`. Raises InvalidParameter."""
    if not (key.isascii() and key.isdecimal() and len(key) <= len(str(INT32_MAX))):
        raise InvalidParameter.of("logit_bias", key, "an object whose keys are token ids")
    return int(key)


def is_chat(body: dict[str, Any]) -> bool:
    """Of a route that takes both: True for a body with `messages`, False for one with `prompt`.

    Raises InvalidParameter for one with both, or neither.
    """
    given = [name for name in ("messages", "prompt") if name in body]
    if len(given) != 1:
        if given:
            raise InvalidParameter("'messages' and 'prompt' are both given; send one of them.", param="messages")
        hint = _sent_instead("messages", body) or _sent_instead("prompt", body)
        raise InvalidParameter(
            f"'messages' and 'prompt' are both missing; one of them is required.{hint}", param="messages"
        )
    return "messages" in body


def treat_unknown(unknown: Iterable[str], known: Iterable[str], *, strict: bool = False) -> None:
    """Log the names of fields that are ignored, each once. Whatever a body holds, the log and what is remembered stay small.

    strict  raise InvalidParameter, which names them, instead
    """
    names = sorted({key[:LONGEST_PATH] for key in unknown})
    if strict and names:
        raise _not_known(names, known)
    if (ignored := ignored_fields.get()) is not None:
        ignored += names[:MAX_SHOWN_KEYS]
    new = [name for name in names if name not in _warned_keys]
    if new and len(_warned_keys) < MAX_WARNED_KEYS:
        _warned_keys.update(new[: MAX_WARNED_KEYS - len(_warned_keys)])
        logger.warning("Ignored unknown request fields: %s", _listed(new, known))


def _not_known(names: Sequence[str], known: Iterable[str]) -> InvalidParameter:
    leave_out = "--strict-params is on."
    if len(names) > 1:
        message = f"{_listed(names, known)} are not known; leave them out: {leave_out}"
    else:
        meant = _nearest(names[0], known)
        advice = f"did you mean '{meant}'?" if meant else f"leave it out: {leave_out}"
        message = f"{shown(names[0])} is not known; {advice}"
    return InvalidParameter(message, param=names[0][:LONGEST_SHOWN])


def _listed(names: Sequence[str], known: Iterable[str]) -> str:
    """The first of them, each with the field that was perhaps meant."""
    more = f" and {len(names) - MAX_SHOWN_KEYS} more" if len(names) > MAX_SHOWN_KEYS else ""
    return ", ".join(_with_advice(name, known) for name in names[:MAX_SHOWN_KEYS]) + more


def _with_advice(name: str, known: Iterable[str]) -> str:
    meant = _nearest(name, known)
    return f"{shown(name)} (did you mean {meant!r}?)" if meant else shown(name)


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """The field that was meant, if it is spelt much alike."""
    if len(name) > LONGEST_ALIKE:
        return None
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=ALIKE)), None)


def _sent_instead(missing: str, sent: Iterable[str]) -> str:
    """A sentence about the field that seems to be a missing one, misspelt; "" if none does."""
    short = itertools.islice((name for name in sent if len(name) <= LONGEST_ALIKE), MOST_COMPARED)
    misspelt = _nearest(missing, short)
    return f" {shown(misspelt)} was sent; did you mean '{missing}'?" if misspelt else ""


def _invalid(error: ValidationError, body: dict[str, Any], known: Collection[str]) -> InvalidParameter:
    """Pydantic's findings about the first wrong parameter, as one sentence. known: fields of the body."""
    found = [(_path(detail["loc"], detail["type"], body), detail) for detail in error.errors(include_url=False)]
    first = found[0][0]
    # Of a union, the alternative that got furthest into the value knows best.
    param = max(path for path, _ in found if path[: len(first)] == first)
    details = [detail for path, detail in found if path == param]
    name = _name(param)
    if details[0]["type"] == UNKNOWN_NAME:
        name = _name((*param, str(details[0]["ctx"]["name"])))
        return InvalidParameter(f"'{name}' is not known; {details[0]['msg']}.", param=name)
    if details[0]["type"] == "missing":
        *outer, missing = param
        sent = functools.reduce(lambda value, step: value[step], outer, body)  # type: ignore[index]
        others = [other for other in sent if outer or other not in known]
        hint = _sent_instead(str(missing), others)
        return InvalidParameter(f"'{name}' is missing; it is required.{hint}", param=name)
    allowed = dict.fromkeys(_allowed(detail["msg"]) for detail in details)
    return InvalidParameter.of(name, details[0]["input"], " or ".join(allowed))


def _name(path: tuple[int | str, ...]) -> str:
    """As OpenAI writes it: `messages[0].content`."""
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return name.removeprefix(".")[:LONGEST_PATH]


def _allowed(message: str) -> str:
    """In the words of JSON: "Input should be a valid dictionary or instance of ChatMessage" -> "an object"."""
    allowed = message.removeprefix("Input should be ").split(" or instance of ")[0]
    return _JSON_WORDS.get(allowed, allowed)


_JSON_WORDS = {
    "a valid dictionary": "an object",
    "a valid list": "an array",
    "a valid string": "a string",
    "a valid boolean": "true or false",
    "a valid integer": "an integer",
    "a valid number": "a number",
}


def _path(location: tuple[int | str, ...], kind: str, body: dict[str, Any]) -> tuple[int | str, ...]:
    """The parameter's place in the body. Pydantic also puts names of union members in, which are no part of it."""
    path: list[int | str] = []
    value: Any = body
    for step in location:
        if (isinstance(value, dict) and step in value) or (isinstance(value, list) and isinstance(step, int)):
            value = value[step]  # type: ignore[index]
            path.append(step)
    if kind == "missing":
        path.append(location[-1])
    return tuple(path)
