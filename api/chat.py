"""POST /v1/chat/completions.

    body ──► ChatRequest ──► template ──► token ids ──► engine ──► deltas ──► one answer, or chunks
                        └──► tools, response_format ──► Plan ──► grammar        (chat_answer.py)

Start reading here to follow a request through Trunkline: next come api/client.py and trunkline/messages.py.
"""

import secrets
from typing import NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trunkline.api.answer_shapes import ChatChunk, ChatCompletion
from trunkline.api.cache_report import CacheReports
from trunkline.api.chat_answer import ChatAnswer
from trunkline.api.constrained import Constrained
from trunkline.api.dialect import Plan
from trunkline.api.edge import caller_of
from trunkline.api.errors import json_response
from trunkline.api.generation import Generation
from trunkline.api.openapi import Route
from trunkline.api.prompt import read_chat
from trunkline.api.prompt_map import ReadPrompt
from trunkline.api.protocol import ChatRequest
from trunkline.api.reasoning import asked_to_think
from trunkline.api.service import Service, open_json
from trunkline.api.sse import EventStream, finish_or_disconnect


class StartedChat(NamedTuple):
    """A conversation that the engine works on.

    model        the name its answer carries
    prompt       what the model reads
    plan         who reads what it writes
    constrained  what that must follow
    reports      explains what was cached; None: nobody asked
    generation   what it writes
    """

    model: str
    prompt: ReadPrompt
    plan: Plan
    constrained: Constrained
    reports: CacheReports | None
    generation: Generation


async def start_chat(request: Request, chat: ChatRequest, answer_id: str) -> StartedChat:
    """Send a conversation to the engine: for this endpoint, and for those that are translated into it.

    answer_id  of the answer: ids in the engine begin with it

    Raises what a request can be refused for, in the words of ChatRequest.
    """
    service: Service = request.app.state.service
    model = service.served_model(chat.model)
    sampling = chat.sampling(service.sampling_defaults, service.grammar_defaults)
    pin, caller = chat.pin(), caller_of(request)
    prompt = await read_chat(service.llm, chat, tenant=caller.tenant)
    use = chat.tool_use()
    plan = service.dialect.plan(
        use,
        response=sampling.constraint,
        prompt=prompt.text,
        options=chat.constraint_options(service.grammar_defaults) if use is not None else {},
        asked_to_think=asked_to_think(chat.chat_template_kwargs),
        shows_thoughts=chat.include_reasoning is not False,
    )
    if plan.constraint is not sampling.constraint:
        sampling = msgspec.structs.replace(sampling, constraint=plan.constraint)
    constrained = await Constrained.of(service, plan.constraint)
    reports = CacheReports([prompt], service.page_size) if chat.cache_report else None
    generation = service.llm.submit(
        [prompt.token_ids],
        sampling,
        grammar=constrained.grammar,
        shown_ids=plan.shown_ids,
        request_id=answer_id,
        priority=chat.priority or 0,
        tenant=caller.tenant,
        salt=chat.cache_salt or "",
        pin_seconds=pin.seconds if pin else 0.0,
        pin_tokens=prompt.num_tokens_until(pin.message) if pin and pin.message is not None else None,
        what="messages",
        observer=service.observe(request, answer_id),
    )
    return StartedChat(model, prompt, plan, constrained, reports, generation)


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service, body = await open_json(request)
    chat = ChatRequest.parse(body, strict=service.config.strict_params)
    answer_id = f"chatcmpl-{secrets.token_hex(16)}"
    model, prompt, plan, constrained, reports, generation = await start_chat(request, chat, answer_id)
    answer = ChatAnswer(chat, model, answer_id, plan, constrained, reports, prompt.documents_order)
    if chat.stream:
        return EventStream(generation, answer.chunks(generation), on_error=service.count_failure)
    if not await finish_or_disconnect(generation, request):
        raise ClientDisconnect
    return json_response(await answer.whole(generation))


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        ChatCompletion,
        (ChatRequest,),
        event=ChatChunk,
        done="[DONE]",
        generates=True,
        example={
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_completion_tokens": 32,
        },
    ),
)
