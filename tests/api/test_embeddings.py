"""/v1/embeddings: OpenAI's shape through its own client, in numbers and in bytes; the model's vectors; refusals by name."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest

from tests.api.serving import CONTEXT, MODEL, Server, metrics, wait_idle
from tests.reference_model import hidden_states
from tests.tiny import VOCAB_SIZE, tiny_embedder
from trunkline.api.embedding_request import MAX_INPUTS
from trunkline.api.embeddings import Embeddings, EmbeddingsRequest
from trunkline.api.rerank import RerankRequest, ScoreTextsRequest
from trunkline.errors import InvalidParameter
from trunkline.models.tokenizer import Tokenizer

TEXTS = ["hello world and the", "that is the thing of your world", "hello"]
HIDDEN_SIZE = 64


def post(http: httpx.Client, **body: Any) -> Embeddings:
    response = http.post("/v1/embeddings", json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=Embeddings)


def vectors(http: httpx.Client, **body: Any) -> np.ndarray:
    return np.array([entry.embedding for entry in post(http, **body).data])


def refused(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/embeddings", json={"model": MODEL, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.fixture(scope="module")
def hidden(tiny: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    return hidden_states(tiny, [tokenizer.encode(text) for text in TEXTS])


def test_openai_s_client_by_default_and_in_numbers(client: openai.OpenAI) -> None:
    """By default it asks for bytes, and decodes them."""
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert [entry.object for entry in answer.data] == ["embedding"] * 3
    assert (answer.object, answer.model) == ("list", MODEL)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    in_numbers = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [entry.embedding for entry in in_numbers.data] == [entry.embedding for entry in answer.data]
    assert np.linalg.norm([entry.embedding for entry in answer.data], axis=1) == pytest.approx([1] * 3, abs=1e-6)


def test_bytes_are_float32_little_endian(http: httpx.Client) -> None:
    (entry,) = post(http, input=TEXTS[0], encoding_format="base64").data
    assert isinstance(entry.embedding, str)
    decoded = np.frombuffer(base64.b64decode(entry.embedding), "<f4")
    assert decoded.shape == (HIDDEN_SIZE,) and decoded.tolist() == vectors(http, input=TEXTS[0])[0].tolist()


@pytest.mark.parametrize("pooling", ["mean", "last", None])
def test_they_are_the_model_s(http: httpx.Client, hidden: list[np.ndarray], pooling: str | None) -> None:
    """The server's weights are stored in float16."""
    expected = [states.mean(axis=0) if pooling == "mean" else states[-1] for states in hidden]
    got = vectors(http, input=TEXTS, pooling=pooling, normalize=False)
    assert np.abs(got - expected).max() < 0.01 * np.abs(expected).max()


def test_texts_and_token_ids_one_or_several(http: httpx.Client, tokenizer: Tokenizer) -> None:
    together = vectors(http, input=TEXTS)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert (vectors(http, input=ids) == together).all()
    for text, token_ids, vector in zip(TEXTS, ids, together, strict=True):
        assert (vectors(http, input=text) == vector).all() and (vectors(http, input=token_ids) == vector).all()


def test_usage_counts_every_text_and_what_the_cache_had(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "that is the thing of your world, hello and of the other world " * 3
    num = len(tokenizer.encode(text))
    cold = post(http, input=text, cache_salt="usage").usage
    assert (cold.prompt_tokens, cold.total_tokens, cold.prompt_tokens_details.cached_tokens) == (num, num, 0)
    warm = post(http, input=text, cache_salt="usage").usage
    assert warm.prompt_tokens_details.cached_tokens == (num - 1) // 16 * 16 > 0
    assert post(http, input=text, cache_salt="usage", pooling="mean").usage.prompt_tokens_details.cached_tokens == 0
    twice = post(http, input=[text, text], cache_salt="twice").usage
    assert (twice.prompt_tokens, twice.prompt_tokens_details.cached_tokens) == (2 * num, num), "it is read once"


def test_a_long_text_is_cut_only_if_somebody_says_so(http: httpx.Client) -> None:
    long = list(range(200)) * (CONTEXT // 200) + [7] * (CONTEXT % 200)
    assert len(post(http, input=long).data) == 1, "as long as the context: nothing is generated behind it"
    error = refused(http, input=[[1], [1] * (CONTEXT + 1)])
    assert error["message"].startswith(
        f"This model's maximum context length is {CONTEXT} tokens. However, your input[1] resulted in {CONTEXT + 1} tokens."
        " Please reduce the length of the input[1]."
    )
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert refused(http, input="the " * 300_000)["code"] == "context_length_exceeded"
    cut = vectors(http, input=[[1, 2, *range(50)], list(range(47, 50))], truncate_prompt_tokens=3)
    assert (cut[0] == cut[1]).all()
    whole = vectors(http, input=[[9] * 5 + long, long], truncate_prompt_tokens=-1)
    assert (whole[0] == whole[1]).all()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "'input' is missing"),
        ({"input": []}, "input", "empty list"),
        ({"input": ""}, "input", "empty text"),
        ({"input": ["a", ""]}, "input[1]", "empty text"),
        ({"input": [[1], []]}, "input[1]", "empty list of token ids"),
        ({"input": 5}, "input", "'input' is 5"),
        ({"input": ["a", 5]}, "input[1]", "'input[1]' is 5"),
        ({"input": [[1, VOCAB_SIZE]]}, "input[0]", f"token ids from 0 to {VOCAB_SIZE - 1}"),
        (
            {"input": ["a"] * (MAX_INPUTS + 1)},
            "input",
            f"{MAX_INPUTS + 1} texts are sent at once; allowed are {MAX_INPUTS}",
        ),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "dimensions": 8}, "dimensions", "does not support specifying fewer"),
        ({"input": "a", "pooling": "cls"}, "pooling", '"mean" or "last"'),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or an integer from 1"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "'float16'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "'messages' is"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(http, **body)
    assert error["param"] == param and words in error["message"], error


def test_millions_of_texts_are_counted_before_they_are_read() -> None:
    """Reading them would hold up everybody for seconds: their types are not even looked at."""
    for field, kind in (("input", EmbeddingsRequest), ("documents", RerankRequest), ("text_2", ScoreTextsRequest)):
        with pytest.raises(InvalidParameter, match=f"^{MAX_INPUTS + 1} texts are sent at once") as refused:
            kind.parse({field: [{}] * (MAX_INPUTS + 1)})
        assert refused.value.param == field
    assert len(EmbeddingsRequest.parse({"input": [1] * (MAX_INPUTS + 1)}).texts()) == 1, "the token ids of one"


def test_what_changes_nothing(http: httpx.Client) -> None:
    plain = vectors(http, input=TEXTS[0])
    harmless = {"user": "u", "dimensions": HIDDEN_SIZE, "priority": 3, "embed_dtype": "float32", "endianness": "little"}
    assert (vectors(http, input=TEXTS[0], **harmless) == plain).all()
    assert http.post("/v1/embeddings", json={"model": "other", "input": "a"}).status_code == 404


def test_it_is_counted_and_leaves_nothing_behind(server: Server, http: httpx.Client) -> None:
    name = 'trunkline:prompt_tokens_total{model_name="tiny"}'
    before = metrics(server.url)[name]
    num = post(http, input=TEXTS, cache_salt="counted").usage.prompt_tokens
    assert wait_idle(server.url)[name] == before + num


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A checkpoint for embeddings alone, which asks for CLS pooling and was trained to be cut, served with another pooling."""
    folder = tiny_embedder(tmp_path_factory.mktemp("trained") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_matryoshka": True, "matryoshka_dimensions": [16]}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    with Server(folder, "--served-model-name", MODEL, "--kv-cache-memory", "4MiB", "--pooling", "mean") as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client


@pytest.mark.slow
def test_the_flag_and_shorter_vectors(trained: httpx.Client) -> None:
    whole = vectors(trained, input=TEXTS[0])[0]
    assert (vectors(trained, input=TEXTS[0], pooling="mean")[0] == whole).all()
    assert (vectors(trained, input=TEXTS[0], pooling="last")[0] != whole).any()
    short = vectors(trained, input=TEXTS[0], dimensions=16)[0]
    np.testing.assert_allclose(short, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-6)
    assert "one of 16, which the model was trained for" in refused(trained, input="a", dimensions=8)["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_model_for_embeddings_writes_nothing(trained: httpx.Client, path: str) -> None:
    body = {"model": MODEL, "prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}
    response = trained.post(path, json=body)
    assert response.status_code == 400, response.text
    assert "/v1/embeddings" in response.json()["error"]["message"]
    assert trained.post("/v1/score", json={"text_1": "hello", "text_2": "hello"}).json()["data"][0]["score"] == 1
