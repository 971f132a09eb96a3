"""POST /v1/rerank and /v1/score: how near texts are to each other, by the cosine of their embeddings. Shapes as in vLLM, Jina, Cohere.

    {"query": …, "documents": [a, b]}   ──► [{"index": 1, "relevance_score": 0.83, "document": {"text": b}}, …], the nearest first
    {"text_1": …, "text_2": [a, b]}     ──► [{"index": 0, "score": 0.41}, {"index": 1, "score": 0.83}]

There are no cross-encoders here, which read both texts at once (models/config.py refuses them). Routes lie also where others have them:
/rerank, /v2/rerank, /score.
"""

import math
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.answer_shapes import Shape
from trunkline.api.embedding_plan import Vector
from trunkline.api.embedding_request import EmbeddingFields, EmbeddingUsage, Text, embed, embedding_plan, texts_of
from trunkline.api.errors import json_response
from trunkline.api.openapi import Route
from trunkline.api.protocol import Strings
from trunkline.api.service import open_json
from trunkline.errors import InvalidParameter
from trunkline.sampling import INT32_MAX


class RerankDocument(BaseModel):
    """A document as an object; what else it holds is ignored."""

    model_config = ConfigDict(strict=True)

    text: str


class RerankRequest(EmbeddingFields):
    """Which documents answer a query best."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True)]
    top_n: int | None = None
    return_documents: bool | None = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EmbeddingFields.unsupported,
        "rank_fields": (None, ["text"]),
        "max_chunks_per_doc": (None,),
        "max_tokens_per_doc": (None,),
    }

    def contents(self) -> list[str]:
        """The documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def num_wanted(self) -> int:
        """Documents to name. Raises InvalidParameter."""
        if self.top_n is not None and not 0 <= self.top_n <= INT32_MAX:
            raise InvalidParameter.of("top_n", self.top_n, f"an integer from 1 to {INT32_MAX}, or 0 for all")
        return self.top_n or len(self.documents)


class ScoreTextsRequest(EmbeddingFields):
    """Pairs of texts: one with each of several, or each of some with its counterpart."""

    sides: ClassVar[tuple[str, str]] = ("text_1", "text_2")

    text_1: str | Strings
    text_2: str | Strings


class ScoreQueriesRequest(EmbeddingFields):
    """The same by vLLM's other names."""

    sides: ClassVar[tuple[str, str]] = ("queries", "documents")

    queries: str | Strings
    documents: str | Strings


class RankedDocument(Shape, frozen=True, kw_only=True):
    """The text of one."""

    text: str


class RerankResult(Shape, frozen=True, kw_only=True):
    """`index` is the document's place in the request."""

    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class Reranked(Shape, frozen=True, kw_only=True):
    """Documents, the nearest first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class Score(Shape, frozen=True, kw_only=True):
    """Of one pair, -1 to 1."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(Shape, frozen=True, kw_only=True):
    """Of all pairs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


async def rerank(request: Request) -> Response:
    """The documents that are nearest to a query."""
    service, body = await open_json(request)
    asked = RerankRequest.parse(body, strict=service.config.strict_params)
    model, contents, num_wanted = service.served_model(asked.model), asked.contents(), asked.num_wanted()
    texts = [*texts_of("query", asked.query), *texts_of("documents", contents)]
    plan = embedding_plan(service, asked)
    found = await embed(request, service, asked, texts, plan=plan, kind="rerank", param="documents")
    query, *documents = found.vectors
    scores = [cosine(query, document) for document in documents]
    ranking = sorted(range(len(scores)), key=lambda index: -scores[index])[:num_wanted]
    with_text = asked.return_documents is not False
    return json_response(
        Reranked(
            id=found.answer_id,
            model=model,
            usage=found.usage,
            results=[
                RerankResult(
                    index=index,
                    document=RankedDocument(text=contents[index]) if with_text else UNSET,
                    relevance_score=scores[index],
                )
                for index in ranking
            ],
        )
    )


async def score(request: Request) -> Response:
    """How near the two texts of each pair are."""
    service, body = await open_json(request)
    kind = _kind_of_score(body)
    asked = kind.parse(body, strict=service.config.strict_params)
    model = service.served_model(asked.model)
    first, second = _pairs(asked, *kind.sides)
    texts = list(dict.fromkeys([*first, *second]))
    plan = embedding_plan(service, asked)
    found = await embed(request, service, asked, texts, plan=plan, kind="score", param=kind.sides[1])
    vectors = dict(zip(texts, found.vectors, strict=True))
    return json_response(
        Scores(
            id=found.answer_id,
            created=int(time.time()),
            model=model,
            data=[
                Score(index=index, score=cosine(vectors[one], vectors[other]))
                for index, (one, other) in enumerate(zip(first, second, strict=True))
            ],
            usage=found.usage,
        )
    )


def cosine(one: Vector, other: Vector) -> float:
    """Of the angle between two vectors, -1 to 1; 0 if one of them is nothing but zeros."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = math.sqrt(np.dot(a, a) * np.dot(b, b))
    return min(1.0, max(-1.0, float(np.dot(a, b)) / lengths)) if lengths else 0.0


def _kind_of_score(body: dict[str, Any]) -> type[ScoreTextsRequest] | type[ScoreQueriesRequest]:
    """By the names that it uses. Raises InvalidParameter for a body with names of both kinds."""
    by_queries = "queries" in body or "documents" in body
    if by_queries and ("text_1" in body or "text_2" in body):
        raise InvalidParameter(
            "Both 'text_1' or 'text_2' and 'queries' or 'documents' are given; send one pair of them.", param="text_1"
        )
    return ScoreQueriesRequest if by_queries else ScoreTextsRequest


def _pairs(asked: EmbeddingFields, one: str, other: str) -> tuple[list[Text], list[Text]]:
    """Texts to be compared, as many on the one side as on the other. Raises InvalidParameter."""
    first, second = (texts_of(name, getattr(asked, name)) for name in (one, other))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidParameter(
            f"'{one}' has {len(first)} texts and '{other}' has {len(second)}; allowed is one and any number, or as many of each.",
            param=one,
        )
    return first, second


_RERANK_EXAMPLE = {"query": "What is the capital of France?", "documents": ["The sea is blue.", "Paris is in France."]}
_SCORE_EXAMPLE = {"text_1": "The sea is blue.", "text_2": ["Water is wet.", "Paris is in France."]}
ROUTES = (
    *(
        Route("POST", path, rerank, Reranked, (RerankRequest,), generates=True, example=_RERANK_EXAMPLE)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
    *(
        Route(
            "POST",
            path,
            score,
            Scores,
            (ScoreTextsRequest, ScoreQueriesRequest),
            generates=True,
            example=_SCORE_EXAMPLE,
        )
        for path in ("/v1/score", "/score")
    ),
)
