"""/v1/messages through Anthropic's own client: what it parses, and which of its errors it raises."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from tests.api.serving import MODEL, Server
from tests.api.test_docs import DOCS
from tests.api.test_messages import HELLO, ONE, PAGES, SCHEMA, TOOLS

pytestmark = pytest.mark.slow  # together more than a second or two
anthropic: Any = pytest.importorskip(
    "anthropic", reason="needs Anthropic's client: pip install 'trunkline[integration]'"
)

# The client has no arguments for these.
GREEDY: Any = {"temperature": 0}
ROOM: Any = {"max_tokens": 150, "extra_body": {"close_on_length": True, "temperature": 1, "seed": 1}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", auth_token=None, max_retries=0) as client:
        yield client


def fields(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 12, "extra_body": GREEDY, **more}


def test_stream_helper_puts_together_what_create_returns(client: Any) -> None:
    plain = client.messages.create(**fields())
    with client.messages.stream(**fields()) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == plain.content[0].text == streamed.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (plain.stop_reason, 12) == ("max_tokens", 12)
    assert plain._request_id.startswith("req_")


def test_raw_stream(client: Any) -> None:
    kinds = [event.type for event in client.messages.create(**fields(), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


async def test_async_client(server: Server) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        plain = await client.messages.create(**fields())
        async with client.messages.stream(**fields()) as stream:
            assert await stream.get_final_text() == plain.content[0].text


def test_a_tool_is_called_and_its_result_read(client: Any) -> None:
    asked = fields(tools=TOOLS, tool_choice=ONE, **ROOM)
    message = client.messages.create(**asked)
    (call,) = message.content
    jsonschema.validate(call.input, SCHEMA)
    with client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input, message.stop_reason) == (call.name, call.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**fields(messages=turns, tools=TOOLS)).content


def test_cache_control_and_usage(client: Any) -> None:
    system = [{"type": "text", "text": PAGES[0]["content"], "cache_control": {"type": "ephemeral"}}]
    asked = fields(system=system, extra_body={**GREEDY, "cache_salt": "anthropic"})
    length = client.messages.count_tokens(model=MODEL, messages=HELLO, system=system).input_tokens
    first, again = client.messages.create(**asked).usage, client.messages.create(**asked).usage
    for usage in (first, again):
        assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == length
    assert first.cache_creation_input_tokens > 0 == first.cache_read_input_tokens
    assert again.cache_read_input_tokens >= first.cache_creation_input_tokens
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message().usage
    assert streamed == again


def test_parse(client: Any) -> None:
    class Forecast(BaseModel):
        days: int

    asked = fields(max_tokens=60, extra_body={**GREEDY, "close_on_length": True})
    assert isinstance(client.messages.parse(**asked, output_format=Forecast).parsed_output, Forecast)


@pytest.mark.parametrize(
    ("more", "error", "kind"),
    [
        ({"model": "nobody"}, "NotFoundError", "not_found_error"),
        ({"messages": []}, "BadRequestError", "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "a b " * 5000}]}, "BadRequestError", "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client: Any, more: Any, error: str, kind: str, stream: bool) -> None:
    with pytest.raises(getattr(anthropic, error)) as caught:
        client.messages.create(**fields(**more), stream=stream)
    assert caught.value.body["error"]["type"] == kind
    assert caught.value.request_id.startswith("req_")


def test_the_example_of_the_page_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(from anthropic .*?)```", page, flags=re.DOTALL)
    assert code is not None
    exec(code[1].replace("http://127.0.0.1:8000", server.url), {})  # noqa: S102  # our own page
    assert capsys.readouterr().out
