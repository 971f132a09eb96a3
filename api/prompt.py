"""From a chat request to the tokens of its prompt, for `/v1/chat/completions` and for the routes of the cache.

    prompt = await read_chat(llm, chat, tenant=caller.tenant)
    prompt.token_ids            # [1, 9690, …]
    prompt.documents_order      # [2, 0, 1]; None without documents

A prompt with documents is tokenized piece by piece: what comes before them, each document, what comes after. So the
tokens of a document do not depend on its neighbours, and the cache finds it wherever the same documents come before it.
If their order is free, the engine is asked for the one of which most is cached (radix/document_order.py).
"""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trunkline.api.cache_control import NAME as CACHE_CONTROL
from trunkline.api.documents import Layout, Pieces, Placement, TemplateDocuments, lay_out
from trunkline.api.part_cache import LONG_TEXT
from trunkline.api.prompt_map import ReadPrompt, source_spans
from trunkline.api.protocol import ChatRequest
from trunkline.api.template import ChatTemplate
from trunkline.async_llm import AsyncLLM
from trunkline.errors import InvalidParameter
from trunkline.models.tokenizer import Tokenizer


async def read_chat(llm: AsyncLLM, chat: ChatRequest, *, tenant: str, is_sent: bool = True) -> ReadPrompt:
    """The conversation as the model reads it.

    tenant   whose cache decides about the order of documents
    is_sent  False: the request is only looked at, and doesn't count for the popularity of its documents

    Raises InvalidParameter if the template refuses the chat, ContextLengthExceeded if it is far too long.
    """
    template = llm.template
    if template is None:
        raise InvalidParameter("The model has no chat template; use /v1/completions, or serve it with --chat-template.")
    if chat.documents:
        return await _read_with_documents(llm, template, chat, tenant=tenant, is_sent=is_sent)
    longest = chat.longest_prompt(llm.max_tokens_per_request)
    text = render(template, chat)
    token_ids = await llm.encode(
        text,
        add_special_tokens=bool(chat.add_special_tokens),
        what="messages",
        may_be_cut=longest is not None,
        owner=(tenant, chat.cache_salt or ""),
    )
    spans = partial(source_spans, chat, text, partial(render, template))
    return ReadPrompt(token_ids, llm.tokenizer, text=text, spans=spans, longest=longest)


async def _read_with_documents(
    llm: AsyncLLM, template: ChatTemplate, chat: ChatRequest, *, tenant: str, is_sent: bool
) -> ReadPrompt:
    longest = chat.longest_prompt(llm.max_tokens_per_request)
    layout = lay_out(partial(render, template), chat, template_knows_documents="documents" in template.source)
    order = list(range(layout.num_documents))
    pieces = layout.pieces(order)
    encoder = _PieceEncoder(llm, chat, layout)
    await encoder.read(pieces)
    if chat.documents_order == "free" and len(pieces.documents) > 1:
        order = await llm.call(
            "order_documents",
            tenant=tenant,
            salt=chat.cache_salt or "",
            head=_to_bytes(encoder.head(pieces)),
            documents=[_to_bytes(encoder.document(document)) for document in pieces.documents],
            glue=[_to_bytes(encoder.between(glue)) for glue in pieces.glue] if any(pieces.glue) else [],
            count=is_sent,
        )
        pieces = layout.pieces(order)
        await encoder.read(pieces)
    text = pieces.text
    spans = partial(source_spans, chat, text, partial(layout.text, order))
    token_ids = encoder.token_ids(pieces)
    return ReadPrompt(token_ids, llm.tokenizer, text=text, spans=spans, documents_order=order, longest=longest)


def render(template: ChatTemplate, chat: ChatRequest, documents: TemplateDocuments | None = None) -> str:
    """The prompt. A template that refuses several system messages, or one that is not the first, gets one in front."""
    messages = chat.conversation()
    continued = bool(chat.continue_final_message)
    options: dict[str, Any] = {
        "add_generation_prompt": not continued if chat.add_generation_prompt is None else chat.add_generation_prompt,
        "continue_final_message": continued,
        "tools": [{key: tool[key] for key in tool if key != CACHE_CONTROL} for tool in chat.tools or ()],
        "documents": documents,
        "chat_template_kwargs": chat.chat_template_kwargs,
    }
    try:
        return template.render(messages, **options)
    except InvalidParameter:
        merged = _system_in_front(messages)
        if merged == messages:
            raise
        return template.render(merged, **options)


def _system_in_front(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    system = [message for message in messages if message["role"] in ("system", "developer")]
    if not system or not all(isinstance(message["content"], str) for message in system):
        return messages
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(message["content"] for message in system)}, *others]


class _PieceEncoder:
    """Tokenizes the pieces of a prompt, each text once. `read` first; then the rest looks up."""

    def __init__(self, llm: AsyncLLM, chat: ChatRequest, layout: Layout) -> None:
        self._llm = llm
        self._adds_special_tokens = bool(chat.add_special_tokens)
        # In our own layout no token of a document steers the model. A template may write some between title and text.
        self._parses_special = layout.placement is Placement.TEMPLATE
        self._known: dict[tuple[str, str], list[int]] = {}

    async def read(self, pieces: Pieces) -> None:
        """Tokenize what is new, long texts in a thread. Raises ContextLengthExceeded for a prompt that can't fit."""
        num_characters = len(pieces.text)
        self._llm.check_num_characters(num_characters, what="messages")
        if num_characters < LONG_TEXT:
            self.token_ids(pieces)
        else:
            await asyncio.to_thread(self.token_ids, pieces)

    def token_ids(self, pieces: Pieces) -> list[int]:
        token_ids = list(self.head(pieces))
        for glue, document in zip(pieces.glue, pieces.documents, strict=True):
            token_ids += self.between(glue)
            token_ids += self.document(document)
        return token_ids + self.between(pieces.tail)

    def head(self, pieces: Pieces) -> list[int]:
        return self._once("head", pieces.head, self._encode_head)

    def document(self, text: str) -> list[int]:
        return self._once("document", text, self._encode_document)

    def between(self, text: str) -> list[int]:
        return self._once("between", text, self._encode_between)

    def _once(self, kind: str, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        found = self._known.get((kind, text))
        if found is None:
            found = self._known[kind, text] = encode(text)
        return found

    def _encode_head(self, text: str) -> list[int]:
        return self._llm.tokenizer.encode(text, add_special_tokens=self._adds_special_tokens)

    def _encode_document(self, text: str) -> list[int]:
        return encode_within(self._llm.tokenizer, text, parse_special=self._parses_special)

    def _encode_between(self, text: str) -> list[int]:
        return encode_within(self._llm.tokenizer, text)


def encode_within(tokenizer: Tokenizer, text: str, *, parse_special: bool = True) -> list[int]:
    """Token ids of a text that continues another one: without the space that some tokenizers put before a text."""
    if not tokenizer.strips_leading_space or not text:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
    newline = tokenizer.encode("\n", add_special_tokens=False)
    token_ids = tokenizer.encode("\n" + text, add_special_tokens=False, parse_special=parse_special)
    if token_ids[: len(newline)] != newline:  # the newline has become part of a token: better a space too many
        return tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
    return token_ids[len(newline) :]


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
