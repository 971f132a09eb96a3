"""/tokenize and /detokenize: the tokens that the generating routes would read, in vLLM's shapes."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tests.api.serving import CONTEXT, MODEL
from tests.api.test_app import KEY, connect, make_service
from tests.api.test_cache_routes import NotingEngine
from tests.api.test_cache_routes import make_service as with_tokenizer
from tests.tiny import BOS, TOKEN_IDS, VOCAB_SIZE, tiny_model
from trunkline.api.tokenize_routes import MANY_TOKENS
from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "hello world and the"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text(http: httpx.Client, tokenizer: Tokenizer, prefix: str) -> None:
    answer = post(http, f"{prefix}/tokenize", prompt="hello world and the")
    tokens = tokenizer.encode("hello world and the")
    assert answer == {"count": 4, "max_model_len": CONTEXT, "tokens": tokens, "token_strs": None}
    shown = post(http, f"{prefix}/tokenize", prompt="hello world and the", return_token_strs=True)
    assert shown == {**answer, "token_strs": ["hello", " world", " and", " the"]}


@pytest.fixture
def with_begin(tmp_path: Path) -> Tokenizer:
    """A tokenizer that puts a begin token before a text."""
    folder = tiny_model(tmp_path)
    file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, TOKEN_IDS[BOS])])
    file.save(str(folder / "tokenizer.json"))
    return load_tokenizer(str(folder))


async def test_begin_token(with_begin: Tokenizer) -> None:
    """By default before a text, and not before a conversation, whose template writes its own: as where they are answered."""
    bodies: tuple[dict[str, Any], ...] = ({"prompt": "?"}, {"messages": MESSAGES})
    async with connect(with_tokenizer(NotingEngine(), with_begin)) as client:
        for body, default in zip(bodies, (True, False), strict=True):
            begins = [
                (await client.post("/tokenize", json=body | fields)).json()["tokens"][0] == TOKEN_IDS[BOS]
                for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
            ]
            assert begins == [default, True, False]


@pytest.mark.real
def test_the_example_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    sent, answer = page.partition("## Tokens")[2].split("```")[1:4:2]
    prompt = json.loads(sent.partition("-d '")[2].partition("'")[0])["prompt"]
    told = json.loads(answer.removeprefix("json"))
    read = load_tokenizer(builtin_model())
    assert told["tokens"] == read.encode(prompt)
    assert told["token_strs"] == [read.token_text(token_id) for token_id in told["tokens"]]
    assert (told["count"], read.decode(told["tokens"])) == (len(told["tokens"]), prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": [TOOL], "tool_choice": "none"},
        {"add_special_tokens": True},
        {"documents": ["Nothing else."]},
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "the world"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ],
    ids=lambda fields: ",".join(fields) or "plain",
)
def test_a_conversation_has_the_tokens_that_a_chat_reads(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **fields}
    read = post(http, "/v1/chat/completions", max_tokens=1, return_token_ids=True, **body)
    answer = post(http, "/tokenize", return_token_strs=True, **body)
    assert answer["tokens"] == read["prompt_token_ids"]
    assert answer["count"] == read["usage"]["prompt_tokens"] == len(answer["token_strs"])


def test_options_of_the_template_are_honoured(http: httpx.Client) -> None:
    """The test above would not see it if both routes ignored them."""
    texts = [
        "".join(post(http, "/tokenize", messages=MESSAGES, return_token_strs=True, **fields)["token_strs"])
        for fields in ({}, {"add_generation_prompt": False})
    ]
    assert texts == [
        "<|im_start|>user\nhello world and the<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\nhello world and the<|im_end|>\n",
    ]


def test_a_prompt_longer_than_the_context_is_counted(http: httpx.Client) -> None:
    assert post(http, "/tokenize", prompt="?" * (CONTEXT + 1))["count"] == CONTEXT + 1


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_text_of_tokens(http: httpx.Client, tokenizer: Tokenizer, prefix: str) -> None:
    tokens = tokenizer.encode(f"{BOS}hello world")
    assert post(http, f"{prefix}/detokenize", tokens=tokens) == {"prompt": f"{BOS}hello world"}
    assert post(http, f"{prefix}/detokenize", tokens=[]) == {"prompt": ""}


def test_many_tokens(http: httpx.Client) -> None:
    tokens = [ord("?")] * (MANY_TOKENS + 1)
    assert post(http, "/detokenize", tokens=tokens)["prompt"] == "?" * len(tokens)


@given(text=st.text(max_size=40))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(http: httpx.Client, text: str) -> None:
    tokens = post(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    assert post(http, "/detokenize", tokens=tokens)["prompt"] == text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "hello"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, "tokens"),
    ],
)
def test_bad_bodies(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert refused(http, path, **body)["param"] == param


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_unknown_model(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json={"model": "other", **body})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert http.post(path, json=body).status_code == 200


async def test_the_key_is_wanted() -> None:
    async with connect(make_service(api_keys=(KEY,))) as locked:
        for path in ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "//tokenize/"):
            assert (await locked.post("http://test" + path, json={})).status_code == 401
            answer = await locked.post("http://test" + path, json={}, headers={"x-api-key": KEY})
            assert answer.json()["error"]["code"] == "model_loading"


def test_they_are_described(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    (schema,) = document["paths"]["/tokenize"]["post"]["requestBody"]["content"]["application/json"].values()
    assert schema["anyOf"] == [
        {"$ref": f"#/components/schemas/{name}"} for name in ("TokenizeTextRequest", "TokenizeChatRequest")
    ]
    assert {"Tokenized", "Detokenized", "DetokenizeRequest"} <= document["components"]["schemas"].keys()
