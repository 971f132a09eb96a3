"""Whatever is wrong with a request: 400 in the envelope, naming the parameter, and the next request is served."""

import json
import socket
from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, Server, wait_idle

pytestmark = pytest.mark.slow  # it starts a server

HELLO = [{"role": "user", "content": "hello"}]
HUGE = 10**30


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 2, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 2, **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return chat(messages=[{"role": "user", **fields}])


TOOL = {"type": "function", "function": {"name": "f"}}
# (path and body, the parameter that the error names)
BAD = [
    (chat(messages=None), "messages"),
    (chat(messages=[]), "messages"),
    (chat(messages="hello"), "messages"),
    (chat(messages=["hello"]), "messages[0]"),
    (chat(messages=[{"content": "hello"}]), "messages[0].role"),
    (chat(messages=[*HELLO, {"role": "wizard", "content": "hello"}]), "messages[1].role"),
    (chat(messages=HELLO * 10_001), "messages"),
    (message(), "messages[0].content"),
    (message(content=None), "messages[0].content"),
    (message(content=7), "messages[0].content"),
    (message(content=["hello"]), "messages[0].content[0]"),
    (message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]), "messages[0].content[0]"),
    (message(content=[{"type": "text", "text": 5}]), "messages[0].content[0]"),
    (message(content="hello", name=5), "messages[0].name"),
    (chat(model=5), "model"),
    (chat(temperature="1"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature=HUGE), "temperature"),
    (chat(temperature=[]), "temperature"),
    (chat(top_p=1.5), "top_p"),
    (chat(top_p=-1), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.5), "top_k"),
    (chat(min_p=2), "min_p"),
    (chat(presence_penalty=3), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=1.0), "max_tokens"),
    (chat(max_tokens=HUGE), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(min_tokens=3), "min_tokens"),
    (chat(min_tokens=-1), "min_tokens"),
    (chat(n=0), "n"),
    (chat(n=True), "n"),
    (chat(n="1"), "n"),
    (chat(n=5_000_000), "n"),
    (chat(seed=HUGE), "seed"),
    (chat(seed=1.5), "seed"),
    (chat(stop=7), "stop"),
    (chat(stop=""), "stop"),
    (chat(stop=["a", 7]), "stop[1]"),
    (chat(stop=["a"] * 65), "stop"),
    (chat(stop="x" * 1025), "stop"),
    (chat(stop_token_ids=[-1]), "stop_token_ids"),
    (chat(stop_token_ids=[10**6]), "stop_token_ids"),
    (chat(stop_token_ids=["a"]), "stop_token_ids[0]"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(logit_bias={"a": 1}), "logit_bias"),
    (chat(logit_bias={"-1": 1}), "logit_bias"),
    (chat(logit_bias={"1": "x"}), "logit_bias.1"),
    (chat(logit_bias={"1": 101}), "logit_bias"),
    (chat(logit_bias={"99999": 1}), "logit_bias"),
    (chat(logit_bias={str(HUGE): 1}), "logit_bias"),
    (chat(logprobs=5), "logprobs"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=1_000_000), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
    (chat(stream=True, stream_options=5), "stream_options"),
    (chat(priority=HUGE), "priority"),
    (chat(cache_salt=5), "cache_salt"),
    (chat(user=5), "user"),
    (chat(metadata="x"), "metadata"),
    (chat(ignore_eos="no"), "ignore_eos"),
    (chat(tools=[TOOL, TOOL]), "tools[1].function.name"),
    (chat(tools=[TOOL], tool_choice="any"), "tool_choice"),
    (chat(tools="f"), "tools"),
    (chat(tool_choice="auto"), "tool_choice"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(function_call="auto"), "function_call"),
    (chat(response_format={"type": "json"}), "response_format.type"),
    (chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}), "response_format.json_schema.name"),
    (chat(structured_outputs={"regex": "("}), "structured_outputs.regex"),
    (chat(guided_json={"type": "strng"}), "guided_json"),
    (chat(guided_json="{"), "guided_json"),
    (chat(guided_json={"enum": []}), "guided_json"),
    (chat(guided_json=False), "guided_json"),
    (chat(guided_json={"$ref": "#/nowhere"}), "guided_json"),
    (chat(guided_json={"type": "string", "minLength": 5, "maxLength": 2}), "guided_json"),
    (chat(guided_json={"type": "string", "pattern": r"^(a|b)\1$"}), "guided_json"),
    (chat(guided_regex="["), "guided_regex"),
    (chat(guided_choice=[]), "guided_choice"),
    (chat(guided_grammar="root ::= missing"), "guided_grammar"),
    (chat(regex="a", ebnf='root ::= "a"'), "ebnf"),
    (chat(regex="a", grammar_backend="nobody"), "grammar_backend"),
    (completion(regex="("), "regex"),
    (completion(guided_json=5), "guided_json"),
    (chat(logits_processors=["x"]), "logits_processors"),
    (chat(modalities=["text", "audio"]), "modalities"),
    (chat(audio={"voice": "alloy"}), "audio"),
    (chat(chat_template="{{ messages }}"), "chat_template"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (chat(chat_template_kwargs=5), "chat_template_kwargs"),
    (chat(continue_final_message=True), "continue_final_message"),
    (chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (completion(prompt=None), "prompt"),
    (completion(prompt=5), "prompt"),
    (completion(prompt={}), "prompt"),
    (completion(prompt=""), "prompt"),
    (completion(prompt=[]), "prompt"),
    (completion(prompt=[[]]), "prompt"),
    (completion(prompt=[1, "a"]), "prompt[1]"),
    (completion(prompt=["a", 1]), "prompt[1]"),
    (completion(prompt=[1.5]), "prompt[0]"),
    (completion(prompt=[True]), "prompt[0]"),
    (completion(prompt=[-1]), "prompt[0]"),
    (completion(prompt=[HUGE]), "prompt[0]"),
    (completion(prompt=[1_000_000]), "prompt"),
    (completion(prompt=[[1], [2, None]]), "prompt[1][1]"),
    (completion(prompt=["a"] * 1000, n=2), "prompt"),
    (completion(suffix="b"), "suffix"),
    (completion(best_of=0), "best_of"),
    (completion(best_of=129), "best_of"),
    (completion(best_of=True), "best_of"),
    (completion(n=3, best_of=2), "best_of"),
    (completion(n=0, best_of=2), "n"),
    (completion(n=129, best_of=129), "n"),
    (completion(best_of=2, stream=True), "best_of"),
    (completion(prompt=["a"] * 100, best_of=11), "prompt"),
    (chat(best_of=2), "best_of"),
    (completion(max_tokens=0), "max_tokens"),
    (completion(logprobs=True), "logprobs"),
    (completion(logprobs=21), "logprobs"),
    (completion(echo=1), "echo"),
]


def check_refused(response: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"].endswith((".", ")")), "a sentence"
    return error


def shown(value: object) -> str:
    """What a test is called: the last field of its body."""
    return json.dumps(dict([list(value[1].items())[-1]]))[:60] if isinstance(value, tuple) else ""


@pytest.mark.parametrize(("request_", "param"), BAD, ids=shown)
def test_bad_value_is_refused_and_named(http: httpx.Client, request_: tuple[str, dict[str, Any]], param: str) -> None:
    path, body = request_
    check_refused(http.post(path, json=body), param)


@pytest.mark.parametrize(
    ("param", "value", "instead"), [("functions", [{"name": "f"}], "tools"), ("function_call", "auto", "tool_choice")]
)
def test_what_openai_has_replaced_is_refused_in_plain_words(
    http: httpx.Client, param: str, value: Any, instead: str
) -> None:
    path, body = chat(**{param: value})
    error = check_refused(http.post(path, json=body), param)
    assert error["message"] == f"'{param}' is no longer supported; send '{instead}' instead."
    assert error["code"] == "unsupported_value"


def test_good_requests_are_served_after_all_that(http: httpx.Client, server: Server) -> None:
    for path, body in (chat(), completion()):
        assert http.post(path, json=body).status_code == 200
    wait_idle(server.url)


# Bodies that json.dumps does not write.
RAW = [
    (b"", None),
    (b"{", None),
    (b"{x}", None),
    (b"[]", None),
    (b'"text"', None),
    (b"null", None),
    (b'{"model": "tiny"} trailing', None),
    (b'{"model": "tiny", "temperature": NaN}', "temperature"),
    (b'{"model": "tiny", "top_p": Infinity}', "top_p"),
    (b'{"model": "tiny", "top_p": -Infinity}', "top_p"),
    (b'{"model": "tiny", "temperature": 1e999}', "temperature"),
    (b'{"model": "tiny", "logit_bias": {"5": NaN}}', "logit_bias.5"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff\xfe"}]}', None),
    (b'{"model": "tiny", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', "messages[0].content"),
    (b'{"model": "tiny", "n": ' + b"9" * 10_000 + b"}", None),
    (b"[" * 100_000, None),
    (b'{"messages":' * 50_000, None),
    (b'{"model": "tiny", "messages": ' + b'[{"a":' * 400 + b"1" + b"}]" * 400 + b"}", "messages[0].role"),
    ("{}".encode("utf-16"), None),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("body", "param"), RAW, ids=lambda value: repr(value)[-40:])
def test_what_is_no_strict_json_is_refused(http: httpx.Client, path: str, body: bytes, param: str | None) -> None:
    if param == "messages[0].role" and path == "/v1/completions":
        param = "prompt"
    check_refused(http.post(path, content=body), param)


def test_missing_fields_are_named(http: httpx.Client) -> None:
    assert "missing" in check_refused(http.post("/v1/chat/completions", json={}), "messages")["message"]
    assert "missing" in check_refused(http.post("/v1/completions", json={"model": MODEL}), "prompt")["message"]


def test_without_a_model_the_first_served_one_answers(http: httpx.Client) -> None:
    for path, body in (chat(), completion()):
        del body["model"]
        assert http.post(path, json=body).json()["model"] == MODEL


def test_unknown_model(http: httpx.Client) -> None:
    path, body = chat(model="gpt-4")
    assert check_refused(http.post(path, json=body), "model", 404)["code"] == "model_not_found"
    assert check_refused(http.get("/v1/models/gpt-4"), "model", 404)["code"] == "model_not_found"


def test_unknown_path_and_method_have_the_envelope(http: httpx.Client) -> None:
    assert check_refused(http.get("/v1/nothing"), None, 404)["code"] == "unknown_url"
    response = http.get("/v1/chat/completions")
    refused = check_refused(response, None, 405)
    assert refused["code"] == "method_not_supported"
    assert refused["message"] == "Not allowed: GET /v1/chat/completions. Use POST."
    assert response.headers["allow"] == "POST"


def test_large_body_is_refused_before_it_is_sent(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {33 * 2**20}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_large_body_without_a_length_is_refused_while_it_is_sent(http: httpx.Client) -> None:
    megabyte = b" " * 2**20
    error = check_refused(http.post("/v1/completions", content=(megabyte for _ in range(40))), None, 413)
    assert error["code"] == "request_too_large"
