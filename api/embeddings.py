"""POST /v1/embeddings: texts as points among texts, in OpenAI's shape.

{"input": ["a text", "another"]} ──► one request each, of which no token is wanted ──► [{"index": 0, "embedding": […]}, …]
"""

import base64
import time
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from trunkline.api.answer_shapes import Shape
from trunkline.api.embedding_plan import Vector
from trunkline.api.embedding_request import EmbeddingFields, EmbeddingUsage, Text, embed, embedding_plan, texts_of
from trunkline.api.errors import json_response
from trunkline.api.openapi import Route
from trunkline.api.protocol import Strings, TokenIds
from trunkline.api.service import open_json


class EmbeddingsRequest(EmbeddingFields):
    """Texts or token ids, one or several."""

    input: str | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    # vLLM's
    normalize: bool | None = None

    def texts(self) -> list[Text]:
        """Raises InvalidParameter if there are none."""
        match self.input:
            case [int(), *_]:  # the token ids of one text
                return [Text(self.input, "input")]  # type: ignore[arg-type]
            case _:
                return texts_of("input", self.input)  # type: ignore[arg-type]


class Embedding(Shape, frozen=True, kw_only=True):
    """Of one input. `embedding` is a list of numbers; or with the encoding format base64 their bytes, float32 little-endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(Shape, frozen=True, kw_only=True):
    """Of all inputs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


async def embeddings(request: Request) -> Response:
    """The embeddings of texts."""
    service, body = await open_json(request)
    asked = EmbeddingsRequest.parse(body, strict=service.config.strict_params)
    model = service.served_model(asked.model)
    plan = embedding_plan(service, asked, normalize=asked.normalize, dimensions=asked.dimensions)
    found = await embed(request, service, asked, asked.texts(), plan=plan, kind="embd", param="input")
    in_base64 = asked.encoding_format == "base64"
    return json_response(
        Embeddings(
            id=found.answer_id,
            created=int(time.time()),
            model=model,
            data=[
                Embedding(index=index, embedding=_base64(vector) if in_base64 else vector.tolist())
                for index, vector in enumerate(found.vectors)
            ],
            usage=found.usage,
        )
    )


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        Embeddings,
        (EmbeddingsRequest,),
        generates=True,
        example={"input": ["The sea is blue.", "Water covers most of the Earth."]},
    ),
)
