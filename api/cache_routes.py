"""What is cached and what waits: routes to ask, to keep and to drop. They generate nothing.

POST   /v1/cache/explain    a chat or completion request: how much of it is cached, and why not more
POST   /v1/cache/plan       the same: what would be computed, and when its first token would come
POST   /v1/cache/warm       the same: computed now, and kept for `ttl` seconds
GET    /v1/cache/tree       the prefix tree
GET    /v1/cache/pins       what is kept, and until when
DELETE /v1/cache/pins/{id}  no longer
POST   /v1/cache/flush      drop what is cached
DELETE /v1/cache            drop one's own
GET    /v1/queue            who waits, and why
GET    /v1/tenants          whose keys are whose tenants

Everybody asks about the own tenant; an admin, about all or any. The engine answers between two steps.
"""

import time
import uuid
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trunkline.api.body import read_json
from trunkline.api.cache_answers import (
    DIGITS,
    Flushed,
    PinDeleted,
    Pins,
    Plan,
    Queue,
    Tenant,
    Tenants,
    Tree,
    Warmed,
    pins_of,
    rounded,
    tree_of,
)
from trunkline.api.cache_protocol import (
    FlushRequest,
    WarmChatRequest,
    WarmCompletionRequest,
    query_number,
    query_tenant,
    refuse_query,
)
from trunkline.api.cache_report import Explanation, explain
from trunkline.api.completions import read_prompts
from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.fields import is_chat
from trunkline.api.openapi import Route
from trunkline.api.prompt import read_chat
from trunkline.api.prompt_map import ReadPrompt
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.service import Service
from trunkline.api.sse import finish_or_disconnect
from trunkline.api.tenants import Caller
from trunkline.errors import EngineDead, InvalidParameter, Overloaded, RequestError
from trunkline.inputs import NOTHING
from trunkline.messages import CacheReport

Body = ChatRequest | CompletionRequest
Chat = TypeVar("Chat", bound=ChatRequest)
Completion = TypeVar("Completion", bound=CompletionRequest)


class PinNotFound(RequestError):
    """No pin of that number, or another tenant's: which of them is not told."""

    status = 404
    code = "pin_not_found"


async def explain_request(request: Request) -> Response:
    """How much of a prompt is cached, and why not more."""
    service = open_engine(request)
    body = await _read_body(request, service, ChatRequest, CompletionRequest)
    sampling = body.sampling(service.sampling_defaults, service.grammar_defaults)
    prompt = await _read_prompt(request, service, body, is_sent=False)
    if sampling.prompt_logprobs is not None:
        report = CacheReport(prompt_tokens=len(prompt.token_ids), cached_tokens=0, reason="prompt_logprobs")
    else:
        report = msgspec.convert(await _ask(request, service, "explain", body, prompt), CacheReport)
    return json_response(explain(report, prompt, page_size=service.page_size))


async def plan_request(request: Request) -> Response:
    """What of a prompt would be computed, and when its first token would come."""
    service = open_engine(request)
    body = await _read_body(request, service, ChatRequest, CompletionRequest)
    sampling = body.sampling(service.sampling_defaults, service.grammar_defaults)
    prompt = await _read_prompt(request, service, body, is_sent=False)
    reads_all = sampling.prompt_logprobs is not None
    reply = await _ask(request, service, "plan", body, prompt, **({"reads_all": True} if reads_all else {}))
    return json_response(msgspec.convert({**reply, "prompt_tokens": len(prompt.token_ids)}, Plan))


async def warm(request: Request) -> Response:
    """Compute a prompt, and keep it."""
    service, caller = open_engine(request), caller_of(request)
    body = await _read_body(request, service, WarmChatRequest, WarmCompletionRequest)
    prompt = await _read_prompt(request, service, body, is_sent=True)
    answer_id = f"warm-{uuid.uuid4().hex}"
    generation = service.llm.submit(
        [prompt.token_ids],
        NOTHING,
        request_id=answer_id,
        priority=body.priority or 0,
        tenant=caller.tenant,
        salt=body.cache_salt or "",
        pin_seconds=body.seconds,
        what=_what(body),
        observer=service.observe(request, answer_id),
    )
    if not await finish_or_disconnect(generation, request):
        raise ClientDisconnect
    (choice,) = generation.choices
    warmed = Warmed(
        id=choice.pin_id,
        cache_salt=body.cache_salt or "",
        pinned_tokens=choice.pinned_tokens,
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=choice.cached_tokens,
        expires_in_seconds=float(body.seconds),
        expires_at=round(time.time() + body.seconds, DIGITS),
    )
    return json_response(warmed)


async def tree(request: Request) -> Response:
    """The prefix tree, its most useful prefixes, and what more memory would bring."""
    service = open_engine(request)
    wanted = {
        "tenant": reach_of(request),
        "depth": query_number(request, "depth", default=8, least=1, most=64),
        "limit": query_number(request, "limit", default=100, least=1, most=1000),
        "top": query_number(request, "top", default=10, least=0, most=100),
    }
    async with service.looking:
        reply = await call_engine(service, "tree", **wanted)
        return json_response(tree_of(reply, service.llm.tokenizer))


async def pins(request: Request) -> Response:
    """What is kept, and until when."""
    service = open_engine(request)
    reply = await call_engine(service, "pins", tenant=reach_of(request))
    return json_response(pins_of(reply, service.llm.tokenizer, time.time()))


async def delete_pin(request: Request) -> Response:
    """Keep it no longer."""
    service, pin_id = open_engine(request), request.path_params["pin_id"]
    tenant = None if caller_of(request).is_admin else caller_of(request).tenant
    is_number = pin_id.isascii() and pin_id.isdecimal() and len(pin_id) < 19
    if not is_number or not await call_engine(service, "unpin", tenant=tenant, pin_id=int(pin_id)):
        raise PinNotFound(f"There is no pin {pin_id[:40]!r}. GET /v1/cache/pins lists those there are.", param="id")
    return json_response(PinDeleted(id=int(pin_id)))


async def flush(request: Request) -> Response:
    """Drop what is cached: of one tenant or, for an admin who names none, of all; of one salt or of any."""
    service = open_engine(request)
    refuse_query(request, "tenant")
    wanted = FlushRequest.parse(await read_json(request, service.config.max_body_bytes, may_be_empty=True))
    return await _flush(service, tenant=reach_of(request, wanted.tenant), salt=wanted.cache_salt)


async def flush_own(request: Request) -> Response:
    """Drop what the caller's own tenant has cached."""
    service = open_engine(request)
    refuse_query(request)
    return await _flush(service, tenant=caller_of(request).tenant, salt=None)


async def _flush(service: Service, *, tenant: str | None, salt: str | None) -> Response:
    reply = await call_engine(service, "flush", tenant=tenant, salt=salt)
    flushed = Flushed(
        flushed_pages=reply["pages"],
        flushed_tokens=reply["pages"] * service.page_size,
        flushed_tier_pages=reply["tier_pages"],
    )
    return json_response(flushed)


async def queue(request: Request) -> Response:
    """Who waits and why, and who runs."""
    return json_response(
        msgspec.convert(await call_engine(open_engine(request), "queue", tenant=reach_of(request)), Queue)
    )


async def tenants(request: Request) -> Response:
    """Whose keys are whose tenants: for an admin all, else the own one."""
    service = open_engine(request)
    return json_response(Tenants(data=tenants_of(service, caller_of(request), await call_engine(service, "tenants"))))


def tenants_of(service: Service, caller: Caller, numbers: dict[str, dict[str, int]]) -> list[Tenant]:
    """Those that `caller` may see, with the engine's numbers of them."""
    of_nobody = {"cached_tokens": 0, "requests": 0}
    return [
        Tenant(tenant=tenant, keys=keys, is_own=tenant == caller.tenant, **numbers.get(tenant, of_nobody))
        for tenant, keys in service.keys.tenants.items()
        if caller.is_admin or tenant == caller.tenant
    ]


def open_engine(request: Request) -> Service:
    """The service whose engine takes calls. Raises Overloaded while there is no engine to ask, and once there is none any more."""
    service: Service = request.app.state.service
    try:
        service.check_ready()
    except EngineDead as error:
        raise Overloaded(str(error), code="engine_dead") from None
    return service


async def call_engine(service: Service, method: str, **args: Any) -> Any:
    """What the engine answers, with floats as they are told. Raises Overloaded once there is no engine any more."""
    try:
        return rounded(await service.llm.call(method, **args))
    except EngineDead as error:
        raise Overloaded(str(error), code="engine_dead") from None


async def _ask(request: Request, service: Service, method: str, body: Body, prompt: ReadPrompt, **args: Any) -> Any:
    whose = {"tenant": caller_of(request).tenant, "salt": body.cache_salt or ""}
    return await call_engine(service, method, **whose, prompt=prompt.to_bytes(), **args)


def reach_of(request: Request, named: str | None = None) -> str | None:
    """Whose things a request is about that names a tenant in its address or, `named`, in its body; None: all."""
    service: Service = request.app.state.service
    return caller_of(request).reach(query_tenant(request) if named is None else named, service.keys.tenants)


async def _read_body(
    request: Request, service: Service, chat: type[Chat], completion: type[Completion]
) -> Chat | Completion:
    """A chat if it has messages, else a completion."""
    body = await read_json(request, service.config.max_body_bytes)
    kind = chat if is_chat(body) else completion
    parsed = kind.parse(body, strict=service.config.strict_params)
    service.served_model(parsed.model)
    return parsed


async def _read_prompt(request: Request, service: Service, body: Body, *, is_sent: bool) -> ReadPrompt:
    if isinstance(body, ChatRequest):
        prompt = await read_chat(service.llm, body, tenant=caller_of(request).tenant, is_sent=is_sent)
    else:
        if len(body.prompts()) > 1:
            raise InvalidParameter.of("prompt", f"{len(body.prompts())} prompts", "one at a time here")
        (prompt,) = await read_prompts(service.llm, body)
    service.llm.check_prompt(prompt.token_ids, NOTHING, what=_what(body))
    return prompt


def _what(body: Body) -> str:
    return "messages" if isinstance(body, ChatRequest) else "prompt"


ONE_TENANT = ("tenant", "for an admin: of this tenant only, named by 8 of its characters or more; default: of all")
_REQUESTS = (ChatRequest, CompletionRequest)

ROUTES = (
    Route("POST", "/v1/cache/explain", explain_request, Explanation, _REQUESTS),
    Route("POST", "/v1/cache/plan", plan_request, Plan, _REQUESTS),
    Route("POST", "/v1/cache/warm", warm, Warmed, (WarmChatRequest, WarmCompletionRequest), generates=True),
    Route(
        "GET",
        "/v1/cache/tree",
        tree,
        Tree,
        query=(
            ("depth", "nodes below each other that are shown, 1 to 64; default: 8"),
            ("limit", "nodes shown in all, 1 to 1000; default: 100"),
            ("top", "prefixes listed that saved most, 0 to 100; default: 10"),
            ONE_TENANT,
        ),
    ),
    Route("GET", "/v1/cache/pins", pins, Pins, query=(ONE_TENANT,)),
    Route("DELETE", "/v1/cache/pins/{pin_id}", delete_pin, PinDeleted),
    Route("POST", "/v1/cache/flush", flush, Flushed, (FlushRequest,)),
    Route("DELETE", "/v1/cache", flush_own, Flushed, statuses=(400,)),  # for a query
    Route("GET", "/v1/queue", queue, Queue, query=(ONE_TENANT,)),
    Route("GET", "/v1/tenants", tenants, Tenants),
)
