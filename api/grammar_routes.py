"""POST /v1/grammar/check: can this be followed, by whom, and what does it cost? Nothing is generated, and no place is taken.

    {"response_format": {…}} ──► who takes it: each backend's answer (no engine)
                             └─► the engine compiles it, fills some masks, and looks for a short text that it allows

A grammar that would be refused is an answer like any other, with `ok` false: this is a lint. Only a body that says nothing
to be checked, or that cannot be read, is an error.
"""

import asyncio
from typing import Any, Self

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.errors import json_response
from trunkline.api.fields import validated
from trunkline.api.openapi import Route
from trunkline.api.response_format import ConstraintFields, ToolFields, refuse_misspelt
from trunkline.api.service import Service, open_json
from trunkline.constraint import Constraint
from trunkline.errors import InvalidParameter
from trunkline.grammar.interface import GrammarRefused
from trunkline.grammar.prepare import BACKENDS, Prepared, prepare

NO_PROMPT = ""  # what would come before the answer: nothing opens a thought


class GrammarCheckRequest(ConstraintFields, ToolFields):
    """The fields of a request that say what its answer must follow; those of a chat's tools among them."""

    model: str | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Other fields of requests are ignored, as far as they are no typos. Raises InvalidParameter."""
        parsed = validated(cls, body)
        refuse_misspelt(body, body.keys() - cls.model_fields.keys())
        return parsed


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that cannot be enforced, or is wrong.

    pointer  JSON pointer into the schema as it was sent; "" is the root, or it is no schema
    reason   half a sentence
    """

    pointer: str
    keyword: str
    reason: str


class GrammarCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a request with these fields.

    ok               it would be taken
    backend          by whom; null if it would not
    error            what it would be refused with
    backends         of those that could be named: null if it is sure to be true to it, else what stands in the way
    findings         what stands in the way; or, under grammar_unsupported "validate", what is left out and checked afterwards
    compile_ms       wall time; of the last time, if it is compiled already
    mask_us          of the mask of one token, median along random texts; mask_us_max: the slowest
    num_bytes        of the compiled grammar
    shortest_tokens  of a short text that it allows, as far as a bounded search finds one: with fewer max_tokens it cannot be closed
    """

    ok: bool
    backend: str | None
    error: str | None
    backends: dict[str, Problem | None]
    findings: list[Problem]
    compile_ms: float | None = None
    mask_us: float | None = None
    mask_us_max: float | None = None
    num_bytes: int | None = None
    shortest_tokens: int | None = None


async def check_grammar(request: Request) -> Response:
    """Lint what an answer is to follow, and measure it."""
    service, given = await open_json(request)
    body = GrammarCheckRequest.parse(given)
    service.served_model(body.model)
    try:
        constraint = _constraint(service, body)
    except GrammarRefused as refused:
        return json_response(_refused(refused, {}))
    async with service.checking:
        backends = await asyncio.to_thread(ask_each, constraint)
    try:
        prepared = await service.llm.prepare(constraint)
    except GrammarRefused as refused:
        return json_response(_refused(refused, backends))
    return json_response(await _measured(service, prepared, backends))


def _constraint(service: Service, body: GrammarCheckRequest) -> Constraint:
    """Raises InvalidParameter if there is nothing to check, and GrammarRefused."""
    plan = service.dialect.plan(
        body.tool_use(),
        response=body.constraint(service.grammar_defaults),
        prompt=NO_PROMPT,
        options=body.constraint_options(service.grammar_defaults),
    )
    if plan.constraint is None:
        raise InvalidParameter(
            "Nothing in this body says what an answer must follow; send response_format, structured_outputs, tools, or any other"
            " such field of a request.",
            param="response_format",
        )
    return plan.constraint


def ask_each(constraint: Constraint) -> dict[str, Problem | None]:
    """Why each backend does not take it exactly; None if it does."""
    told: dict[str, Problem | None] = {}
    for name in BACKENDS:
        exactly = msgspec.structs.replace(constraint, backend=name, unsupported="error")
        try:
            prepare(exactly)
            told[name] = None
        except GrammarRefused as refused:
            told[name] = _problems(refused)[0]
    return told


async def _measured(service: Service, prepared: Prepared, backends: dict[str, Problem | None]) -> GrammarCheck:
    reply = await service.llm.call("grammar_check", grammar=msgspec.to_builtins(prepared.grammar))
    return GrammarCheck(
        ok=reply["error"] is None,
        backends=backends,
        findings=[Problem(**finding._asdict()) for finding in prepared.findings],
        **reply,
    )


def _refused(refused: GrammarRefused, backends: dict[str, Problem | None]) -> GrammarCheck:
    return GrammarCheck(ok=False, backend=None, error=refused.message, backends=backends, findings=_problems(refused))


def _problems(refused: GrammarRefused) -> list[Problem]:
    """At least one."""
    found = [Problem(**finding._asdict()) for finding in refused.findings]
    return found or [Problem(pointer="", keyword="", reason=refused.message)]


ROUTES = (Route("POST", "/v1/grammar/check", check_grammar, GrammarCheck, (GrammarCheckRequest,)),)
