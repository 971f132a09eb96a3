"""docs/api-fields.md says what becomes of each field; OpenAI's client says which there are, and the server what it does with them."""

import logging
import re
import typing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.api.serving import MODEL
from tests.api.test_app import connect, make_service
from tests.api.test_bad_input import check_refused
from trunkline.api import fields as fields_module
from trunkline.api.body import MOST_FIELDS
from trunkline.api.edge import LONGEST_HEADER
from trunkline.api.embeddings import EmbeddingsRequest
from trunkline.api.protocol import ChatRequest, CompletionRequest
from trunkline.api.responses_protocol import ResponsesRequest
from trunkline.errors import LONGEST_SHOWN, InvalidParameter

PAGE = Path(__file__).parents[2] / "docs" / "api-fields.md"
WORDS = {"honoured", "ignored", "refused", "–"}
HELLO = [{"role": "user", "content": "hello"}]


class Subject(typing.NamedTuple):
    """A route, its body here, its body in OpenAI's client, and the least that it takes."""

    path: str
    ours: Any
    openais: Any
    least: dict[str, Any]
    text: typing.Callable[[Any], Any]


SUBJECTS = {
    "chat": Subject(
        "/v1/chat/completions",
        ChatRequest,
        chat_create_params.CompletionCreateParamsStreaming,
        {"messages": HELLO, "max_tokens": 6, "temperature": 0},
        lambda body: body["choices"][0]["message"],
    ),
    "completions": Subject(
        "/v1/completions",
        CompletionRequest,
        completion_create_params.CompletionCreateParamsStreaming,
        {"prompt": "hello", "max_tokens": 6, "temperature": 0},
        lambda body: body["choices"][0]["text"],
    ),
    "responses": Subject(
        "/v1/responses",
        ResponsesRequest,
        response_create_params.ResponseCreateParamsStreaming,
        {"input": "hello", "max_output_tokens": 6, "temperature": 0},
        lambda body: body["output"][0]["content"],
    ),
    "embeddings": Subject(
        "/v1/embeddings",
        EmbeddingsRequest,
        embedding_create_params.EmbeddingCreateParams,
        {"input": "hello"},
        lambda body: body["data"],
    ),
}


def read_page() -> dict[str, dict[str, str]]:
    """Route -> field -> what becomes of it."""
    told: dict[str, dict[str, str]] = {route: {} for route in SUBJECTS}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if row := re.fullmatch(r"\| `(\w+)` \|(.*)\|", line):
            cells = [cell.strip() for cell in row[2].split(" | ")]
            assert set(cells[:4]) <= WORDS, line
            for route, word in zip(SUBJECTS, cells, strict=False):
                assert row[1] not in told[route], f"{row[1]} is told of twice"
                told[route][row[1]] = word
    return told


TOLD = read_page()
ROUTE = pytest.mark.parametrize("route", SUBJECTS)


def fields_that_are(word: str, route: str) -> list[str]:
    return [field for field, told in TOLD[route].items() if told == word]


@ROUTE
def test_every_field_of_openais_client_is_told_of(route: str) -> None:
    known = typing.get_type_hints(SUBJECTS[route].openais).keys()
    assert len(known) > 4
    assert {field for field in known if TOLD[route].get(field, "–") == "–"} == set()


@ROUTE
def test_every_field_of_ours_is_told_of_and_no_other(route: str) -> None:
    ours = SUBJECTS[route].ours
    known = {*ours.model_fields, *ours.unsupported}
    assert {field for field in known if TOLD[route].get(field, "–") == "–"} == set()
    assert {field for field in (*fields_that_are("honoured", route), *fields_that_are("ignored", route))} <= known
    assert not {*fields_that_are("honoured", route), *fields_that_are("ignored", route)} & {*ours.unsupported}


@ROUTE
def test_what_is_refused_is_refused_by_its_name(route: str) -> None:
    """Whatever the value, if it isn't one that asks for nothing."""
    subject = SUBJECTS[route]
    for field in fields_that_are("refused", route):
        for value in ("x", 7, ["x"], {"x": "y"}):
            with pytest.raises(InvalidParameter) as refused:
                subject.ours.parse({**subject.least, field: value})
            assert (refused.value.param, refused.value.code) == (field, "unsupported_value")
        subject.ours.parse({**subject.least, field: None})


def some_value(annotation: Any) -> Any:
    """That a field of this type takes."""
    kinds = typing.get_args(annotation) or (annotation,)
    for kind, value in ((str, "x"), (bool, True), (int, 1)):
        if kind in kinds:
            return value
    return {}


@ROUTE
def test_what_is_ignored_changes_nothing_and_is_not_warned_of(
    http: httpx.Client, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = SUBJECTS[route]
    ignored = {
        field: some_value(subject.ours.model_fields[field].annotation) for field in fields_that_are("ignored", route)
    }
    assert ignored
    with caplog.at_level(logging.WARNING, "trunkline.api"):
        subject.ours.parse({**subject.least, **ignored}, strict=True)
    assert not caplog.records
    body = {"model": MODEL, **subject.least}
    plain, more = (http.post(subject.path, json=sent).json() for sent in (body, {**body, **ignored}))
    assert subject.text(more) == subject.text(plain)


@ROUTE
def test_a_field_that_nobody_knows_is_warned_of_with_what_was_meant(
    route: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields_module, "_warned_keys", set())
    subject = SUBJECTS[route]
    with caplog.at_level(logging.WARNING, "trunkline.api"):
        subject.ours.parse({**subject.least, "cache_slat": "x", "zzz": 1})
    (record,) = caplog.records
    assert record.getMessage() == "Ignored unknown request fields: 'cache_slat' (did you mean 'cache_salt'?), 'zzz'"


def test_so_is_one_within_another(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields_module, "_warned_keys", set())
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usge": True, "include_obfuscation": False}}
    with caplog.at_level(logging.WARNING, "trunkline.api"):
        ChatRequest.parse(body)
    (record,) = caplog.records
    assert record.getMessage().endswith("'stream_options.include_usge' (did you mean 'stream_options.include_usage'?)")
    with pytest.raises(InvalidParameter, match=r"did you mean 'stream_options\.include_usage'"):
        ChatRequest.parse(body, strict=True)


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_ignored_stands_in_a_header(http: httpx.Client, stream: bool) -> None:
    """Each time: the log says it only once, and only to the operator."""
    body = {**SUBJECTS["chat"].least, "model": MODEL, "stream": stream}
    typos: dict[str, Any] = {"temprature": 1, "größe": 2, "two\r\nlines, of it": 3}
    if stream:
        typos["stream_options"] = {"include_usge": True}
    for _ in range(2):
        answer = http.post("/v1/chat/completions", json={**body, **typos})
        assert answer.status_code == 200
        named = "temprature, two%0D%0Alines%2C%20of%20it, gr%C3%B6%C3%9Fe"
        assert sorted(answer.headers["x-ignored-fields"].split(", ")) == sorted(
            [*named.split(", "), *(["stream_options.include_usge"] if stream else [])]
        )
    many = http.post("/v1/chat/completions", json={**body, **{"ü" * number: 1 for number in range(100, 300)}})
    assert len(many.headers["x-ignored-fields"]) == LONGEST_HEADER
    assert "x-ignored-fields" not in http.post("/v1/chat/completions", json=body).headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 1}),
        ("/v1/cache/explain", {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
def test_so_it_does_on_other_routes(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json={"model": MODEL, **body, "zzz": 1})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "zzz")


def test_more_fields_than_anybody_means_are_refused_unread(http: httpx.Client) -> None:
    """A million of them would be sorted while everybody waits."""
    many = dict.fromkeys(map(str, range(MOST_FIELDS + 1)), 1)
    for path in ("/v1/chat/completions", "/tokenize", "/v1/grammar/check"):
        answer = http.post(path, json=many)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(
            "The request body has 10001 fields; allowed are at most 10000."
        )
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True, "stream_options": many})
    assert check_refused(answer, "stream_options")["message"].startswith("'stream_options' has 10001 fields; allowed")


@ROUTE
def test_strict_params_refuses_it(route: str) -> None:
    subject = SUBJECTS[route]
    for field, advice in (
        ("cache_slat", "did you mean 'cache_salt'?"),
        ("zzz", "leave it out: --strict-params is on."),
    ):
        with pytest.raises(InvalidParameter) as refused:
            subject.ours.parse({**subject.least, field: 1}, strict=True)
        assert str(refused.value) == f"'{field}' is not known; {advice}"
        assert refused.value.param == field


def test_strict_params_names_all_of_them_and_never_too_many() -> None:
    with pytest.raises(InvalidParameter) as refused:
        ChatRequest.parse({"messages": HELLO, "zzz": 1, "cache_slat": 1}, strict=True)
    assert str(refused.value) == (
        "'cache_slat' (did you mean 'cache_salt'?), 'zzz' are not known; leave them out: --strict-params is on."
    )
    with pytest.raises(InvalidParameter) as refused:
        ChatRequest.parse({"messages": HELLO, **{f"{'z' * 300}{number}": 1 for number in range(200)}}, strict=True)
    assert len(str(refused.value)) < 10 * LONGEST_SHOWN + 200


def test_what_other_servers_need_and_this_one_does_not_is_taken_in_silence() -> None:
    """--strict-params is no reason to change a client that the page about moving calls fine."""
    text = (PAGE.parent / "migrating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(.*)\| not needed: [^|]*\|$", text.split("## Fields")[1].split("\n## ")[0], re.MULTILINE)
    harmless = re.findall(r"`(\w+)`", "".join(rows))
    assert "cache_prompt" in harmless
    for subject in (SUBJECTS["chat"], SUBJECTS["completions"], SUBJECTS["responses"]):
        sent = {field: some_value(subject.ours.model_fields[field].annotation) for field in harmless}
        subject.ours.parse({**subject.least, **sent}, strict=True)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/chat/completions",
            {"mesages": HELLO},
            "'messages' is missing; it is required. 'mesages' was sent; did you mean 'messages'?",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"rol": "user", "content": "hello"}]},
            "'messages[0].role' is missing; it is required. 'rol' was sent; did you mean 'role'?",
        ),
        (
            "/tokenize",
            {"promt": "hello"},
            "'messages' and 'prompt' are both missing; one of them is required. 'promt' was sent; did you mean 'prompt'?",
        ),
        ("/v1/completions", {"prompts_of_mine": "x"}, "'prompt' is missing; it is required."),
        # A field that is known was meant as it is spelt.
        ("/v1/completions", {"prompt_logprobs": 1, "promts": 1}, "'prompt' is missing; it is required. 'promts' was"),
    ],
)
def test_what_is_missing_is_found_if_it_is_misspelt(
    http: httpx.Client, path: str, body: dict[str, Any], message: str
) -> None:
    answer = http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert told == message if message.endswith((".", "?")) else told.startswith(message)


@ROUTE
@pytest.mark.parametrize("is_strict", [False, True])
async def test_the_flag_makes_routes_strict(route: str, is_strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, service = SUBJECTS[route], make_service(strict_params=is_strict)
    monkeypatch.setattr(service, "check_ready", lambda: None)
    async with connect(service) as client:
        answer = await client.post(subject.path, json={**subject.least, "model": "nobody's", "cache_slat": "x"})
    assert answer.json()["error"]["param"] == ("cache_slat" if is_strict else "model")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stop": None, "n": True}, "'n' is true; allowed is an integer."),
        ({"temperature": [None, False]}, "'temperature' is [null, false]; allowed is a number."),
        ({"audio": {"voice": None}}, "'audio' is {\"voice\": null}; allowed is nothing: "),
        ({"use_beam_search": True}, "'use_beam_search' is true; allowed is nothing, or false: "),
        ({"modalities": ["audio"]}, '\'modalities\' is ["audio"]; allowed is nothing, or ["text"]: '),
        ({"tools": [{"type": None}]}, "'tools[0].type' is null; allowed is \"function\""),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_messages_show_json(http: httpx.Client, body: dict[str, Any], message: str) -> None:
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, **body})
    error = answer.json()["error"]
    assert check_refused(answer, error["param"])["message"].startswith(message)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "f"}}
TEXT = {"type": "text", "text": "hello"}
SHOWN = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(
            (
                "/v1/chat/completions",
                {"messages": [*HELLO, {"role": "user", "content": [TEXT, part]}]},
                "messages[1].content[1]",
            )
            for part in (IMAGE, AUDIO, FILE)
        ),
        *(
            ("/v1/responses", {"input": [{"role": "user", "content": [part]}]}, "input[0].content[0]")
            for part in ({"type": "input_image", "image_url": "data:"}, {"type": "input_file", "file_id": "f"}, AUDIO)
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_is_no_text_is_refused_by_its_place(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = check_refused(http.post(path, json={"model": MODEL, **body}), param)
    assert "reads text only" in error["message"]


def test_what_is_no_text_is_refused_in_anthropics_words(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [TEXT, SHOWN]}]
    answer = http.post("/v1/messages", json={"model": MODEL, "max_tokens": 4, "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "type": "invalid_request_error",
        "message": "'messages[0].content[1]' is a block of type 'image', which cannot be read here: this model reads text only.",
    }
