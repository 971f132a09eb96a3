"""What the routes that compare texts share: the fields of a body, and the way from texts to vectors.

    body  ──► EmbeddingFields.parse ──► embed(request, service, asked, inputs) ──► Embedded(vectors, usage, …)

api/embeddings.py sends the vectors, api/rerank.py compares them. Knows no wire format of an answer but usage.
"""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect, Request

from trunkline.api.answer_shapes import PromptTokensDetails, Shape
from trunkline.api.edge import caller_of
from trunkline.api.embedding_plan import EmbeddingPlan, Vector
from trunkline.api.fields import read_fields, refuse_unsupported
from trunkline.api.part_cache import LONG_TEXT
from trunkline.api.service import Service
from trunkline.api.sse import finish_or_disconnect
from trunkline.async_llm import AsyncLLM
from trunkline.errors import InvalidParameter
from trunkline.inputs import NOTHING
from trunkline.sampling import INT32_MAX

MAX_INPUTS = 2048  # texts of one body, as at OpenAI
FROM_FLAG = "auto"  # of --pooling: what the checkpoint says


class EmbeddingFields(BaseModel):
    """What these bodies have in common."""

    model_config = ConfigDict(strict=True)

    model: str | None = None

    # vLLM's extensions
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)

    # Ours
    pooling: str | None = None

    # OpenAI's, without effect on the answer
    user: str | None = None

    # field -> values that ask for nothing; any other is refused
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "embed_dtype": (None, "float32"),
        "endianness": (None, "native", "little"),
        "use_activation": (None, True),
        "activation": (None, True),
        "softmax": (None,),
        "messages": (None,),
        "mm_processor_kwargs": (None,),
        "additional_data": (None,),
    }

    @classmethod
    def parse(cls, body: dict[str, Any], *, strict: bool = False) -> Self:
        """Raises InvalidParameter, naming the parameter, for a wrong type or something unsupported."""
        refuse_unsupported(body, cls.unsupported)
        for param in cls.model_fields:  # before each is looked at: a body may hold millions
            match body.get(param):
                case [first, *_] as texts if not isinstance(first, int):
                    _check_number(texts, param)
        return read_fields(cls, body, others=cls.unsupported.keys(), strict=strict)

    def longest(self, max_tokens_per_request: int) -> int | None:
        """How many tokens of each text are read, the last ones; None: all. Raises InvalidParameter."""
        wanted = self.truncate_prompt_tokens
        if wanted == -1:
            return max_tokens_per_request
        if wanted is not None and not 1 <= wanted <= INT32_MAX:
            raise InvalidParameter.of("truncate_prompt_tokens", wanted, f"-1, or an integer from 1 to {INT32_MAX}")
        return wanted


class EmbeddingUsage(Shape, frozen=True, kw_only=True):
    """Tokens of all texts; nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Text(NamedTuple):
    """One input, and the name of the parameter that it stands in, for errors: `input[3]`."""

    content: str | list[int]
    param: str


def texts_of(param: str, given: str | Sequence[str | list[int]]) -> list[Text]:
    """One text, or each of a list. Raises InvalidParameter for an empty list."""
    if isinstance(given, str):
        return [Text(given, param)]
    if not given:
        raise InvalidParameter(f"'{param}' is an empty list; it must hold at least one text.", param=param)
    return [Text(content, f"{param}[{index}]") for index, content in enumerate(given)]


def _check_number(texts: Sequence[Any], param: str) -> None:
    if len(texts) > MAX_INPUTS:
        raise InvalidParameter(
            f"{len(texts)} texts are sent at once; allowed are {MAX_INPUTS}. Send them in several requests.",
            param=param,
        )


class Embedded(NamedTuple):
    """What came of it.

    vectors  one per text
    """

    answer_id: str
    vectors: list[Vector]
    usage: EmbeddingUsage


def embedding_plan(service: Service, fields: EmbeddingFields, **wishes: Any) -> EmbeddingPlan:
    """How the embeddings of this request are made: as it says, else the server's flag, else the checkpoint.

    wishes  `normalize` and `dimensions` of EmbeddingPlan.of

    Raises InvalidParameter.
    """
    flag = service.config.pooling
    pooling = fields.pooling if fields.pooling is not None else None if flag == FROM_FLAG else flag
    checkpoint = service.llm.checkpoint
    return EmbeddingPlan.of(checkpoint.pooling, checkpoint.config.hidden_size, pooling=pooling, **wishes)


async def embed(
    request: Request,
    service: Service,
    fields: EmbeddingFields,
    texts: Sequence[Text],
    *,
    plan: EmbeddingPlan,
    kind: str,
    param: str,
) -> Embedded:
    """The vectors of the texts, in their order. A text that comes several times is read once.

    kind   what the answer's id begins with
    param  the parameter that holds the texts, for errors about them all

    Raises RequestError, and ClientDisconnect if nobody waits any more.
    """
    _check_number(texts, param)
    prompts = await _token_ids(service.llm, fields, texts)
    for prompt, text in zip(prompts, texts, strict=True):  # all are looked at before any is sent
        service.llm.check_prompt(prompt, NOTHING, what=text.param)
    distinct = {tuple(prompt): index for index, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    answer_id, caller = f"{kind}-{uuid.uuid4().hex}", caller_of(request)
    generation = service.llm.submit(
        list(distinct),
        NOTHING,
        pooling=plan.pooling,
        request_id=answer_id,
        priority=fields.priority or 0,
        tenant=caller.tenant,
        salt=fields.cache_salt or "",
        what=param,
        observer=service.observe(request, answer_id),
    )
    if not await finish_or_disconnect(generation, request):
        raise ClientDisconnect
    vectors = [plan.finish(choice.embedding) for choice in generation.choices]
    num_tokens, usage = sum(map(len, prompts)), generation.usage
    return Embedded(
        answer_id,
        [vectors[distinct[tuple(prompt)]] for prompt in prompts],
        EmbeddingUsage(
            prompt_tokens=num_tokens,
            total_tokens=num_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=num_tokens - usage.prompt_tokens + usage.cached_tokens
            ),
        ),
    )


async def _token_ids(llm: AsyncLLM, fields: EmbeddingFields, texts: Sequence[Text]) -> list[list[int]]:
    """Of each text, what is read of it. Between them other requests have their turn."""
    longest = fields.longest(llm.max_tokens_per_request)
    prompts, num_characters = [], 0
    for text in texts:
        if not text.content:
            what = "text" if isinstance(text.content, str) else "list of token ids"
            raise InvalidParameter(
                f"'{text.param}' is an empty {what}; it must have at least one token.", param=text.param
            )
        token_ids = text.content
        if isinstance(token_ids, str):
            special = fields.add_special_tokens is not False
            may_be_cut = longest is not None
            num_characters += len(token_ids)
            token_ids = await llm.encode(token_ids, add_special_tokens=special, what=text.param, may_be_cut=may_be_cut)
            if num_characters > LONG_TEXT:
                num_characters = 0
                await asyncio.sleep(0)
        prompts.append(token_ids if longest is None else token_ids[-longest:])
    return prompts
