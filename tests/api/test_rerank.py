"""/v1/rerank and /v1/score: the cosines of what /v1/embeddings gives, in the shapes of vLLM, Jina and Cohere."""

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from tests.api.serving import MODEL
from trunkline.api.embedding_request import MAX_INPUTS
from trunkline.api.rerank import Reranked, Scores, cosine

QUERY = "hello world and the"
DOCUMENTS = ["that is the thing", "hello world and the", "hello world and your", "of the other = {"]


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=Scores if path.endswith("score") else Reranked)


def refused(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.fixture(scope="module")
def cosines(http: httpx.Client) -> list[float]:
    """Of QUERY and each of DOCUMENTS."""
    answer = http.post("/v1/embeddings", json={"input": [QUERY, *DOCUMENTS]}).json()
    query, *documents = (np.array(entry["embedding"]) for entry in answer["data"])
    return [float(query @ document) for document in documents]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_the_nearest_come_first(http: httpx.Client, cosines: list[float], path: str) -> None:
    answer = post(http, path, query=QUERY, documents=DOCUMENTS)
    ranking = sorted(range(4), key=lambda index: -cosines[index])
    assert [result.index for result in answer.results] == ranking and ranking[0] == 1
    assert [result.relevance_score for result in answer.results] == pytest.approx(
        sorted(cosines, reverse=True), abs=1e-6
    )
    assert [result.document.text for result in answer.results] == [DOCUMENTS[index] for index in ranking]
    assert answer.results[0].relevance_score == 1 and answer.id.startswith("rerank-") and answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0


def test_only_so_many_and_without_their_texts(http: httpx.Client, cosines: list[float]) -> None:
    objects = [{"text": text, "title": "ignored"} for text in DOCUMENTS]
    answer = post(http, "/v1/rerank", query=QUERY, documents=objects, top_n=2, return_documents=False)
    assert [result.index for result in answer.results] == sorted(range(4), key=lambda index: -cosines[index])[:2]
    assert all(result.document is msgspec.UNSET for result in answer.results)
    for top_n in (0, None, 99):
        assert len(post(http, "/v1/rerank", query=QUERY, documents=objects, top_n=top_n).results) == 4


def test_equals_keep_their_order(http: httpx.Client) -> None:
    answer = post(http, "/v1/rerank", query="hello", documents=["the", "hello", "the", "hello"])
    assert [result.index for result in answer.results if result.document.text == "hello"] == [1, 3]
    assert [result.index for result in answer.results if result.document.text == "the"] == [0, 2]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_scores(http: httpx.Client, cosines: list[float], path: str, names: tuple[str, str]) -> None:
    """One with one, one with each, each with its counterpart."""

    def scores(first: Any, second: Any) -> list[float]:
        answer = post(http, path, **dict(zip(names, (first, second), strict=True)))
        assert [score.index for score in answer.data] == list(range(len(answer.data)))
        assert answer.id.startswith("score-") and answer.object == "list"
        return [score.score for score in answer.data]

    assert scores(QUERY, DOCUMENTS[0]) == pytest.approx(cosines[:1], abs=1e-6)
    assert scores(QUERY, DOCUMENTS) == scores([QUERY], DOCUMENTS) == pytest.approx(cosines, abs=1e-6)
    assert scores([QUERY, DOCUMENTS[0]], [DOCUMENTS[2], QUERY]) == pytest.approx([cosines[2], cosines[0]], abs=1e-6)
    assert scores(QUERY, [QUERY]) == [1]


def test_the_pooling_counts(http: httpx.Client, cosines: list[float]) -> None:
    mean = [score.score for score in post(http, "/score", text_1=QUERY, text_2=DOCUMENTS, pooling="mean").data]
    assert mean != pytest.approx(cosines, abs=1e-3) and mean[1] == 1


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query", "'query' is missing"),
        ("/v1/rerank", {"query": "a"}, "documents", "'documents' is missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "empty list"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "empty text"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1]", "empty text"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"image": ""}]}, "documents[1].text", "is missing"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "'top_n' is -1"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 5}, "max_tokens_per_doc", "is 5"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * MAX_INPUTS}, "documents", f"allowed are {MAX_INPUTS}."),
        ("/v1/score", {"text_1": "a"}, "text_2", "'text_2' is missing"),
        ("/v1/score", {}, "text_1", "'text_1' is missing"),
        ("/v1/score", {"queries": "a", "documents": []}, "documents", "empty list"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "'text_1' has 2 texts and 'text_2' has 1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1", "send one pair of them"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(http, path, **body)
    assert error["param"] == param and words in error["message"], error


def test_cosine() -> None:
    one, other = np.array([3, 4], np.float32), np.array([-8, 6], np.float32)
    assert (cosine(one, one), cosine(one, other), cosine(one, -one), cosine(one, 0 * one)) == (1, 0, -1, 0)
    assert cosine(one, 7 * one) == 1
