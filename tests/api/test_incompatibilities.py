"""25 ways in which servers like this one have broken their clients, each a public issue; here none of them happens.

Named after what goes wrong. The numbers are those of a survey; the rows with a + came after it. What clients do with their own libraries is in
tests/integration; what each route does, and why, in the tests beside this one.
"""

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.api.serving import MODEL, Server, wait_idle
from tests.api.streams import read_chat
from tests.api.test_bad_input import check_refused
from tests.api.test_chat import HELLO, chunks, raw, text_of
from tests.api.test_disconnect import ENDLESS, cut, open_stream, port_of, wait_running
from tests.api.test_tools import named
from tests.api.test_tools_live import TOOLS
from trunkline.models.tokenizer import Tokenizer

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
LONG = [{"role": "user", "content": "x" * 20_000}]  # of 8,192 tokens that fit
BAD_SCHEMAS: list[Any] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": {"type": "not-a-type"}}}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": {"$ref": "#"}}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "root ::= missing"}},
]


def forced(http: httpx.Client, choice: Any = "required", **fields: Any) -> dict[str, Any]:
    """A stream of calls, read strictly."""
    body = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "max_tokens": 120, **fields}
    return read_chat(raw(http, stream=True, **body), is_plain=False)["choices"][0]


@STREAMED
@pytest.mark.parametrize("bad", BAD_SCHEMAS, ids=range(len(BAD_SCHEMAS)))
def test_01_a_malformed_schema_is_a_500_without_a_message(http: httpx.Client, bad: Any, stream: bool) -> None:
    """1: vllm#57725, vllm#35438. A 400 in the compiler's words, before any byte."""
    (name,) = bad
    error = raw(http, stream=stream, **bad)
    told = check_refused(error, error.json()["error"]["param"])
    assert told["param"].startswith(name)
    assert len(told["message"]) > 40


@pytest.mark.slow
def test_02_a_bad_schema_kills_everybody_elses_request(http: httpx.Client) -> None:
    """2: sglang#4574. Others are answered meanwhile, with the text that they get alone."""
    alone = raw(http, max_tokens=200).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor() as pool:
        other = pool.submit(chunks, http, max_tokens=200)
        for bad in BAD_SCHEMAS:
            assert raw(http, **bad).status_code == 400
        assert text_of(other.result()) == alone


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
        ({"n": 5_000_000}, "n"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_03_numbers_out_of_range_kill_the_server(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """3: sglang#40076, sglang#36856. Refused at the door; so are token ids of prompts that are no tokens."""
    check_refused(raw(http, **fields), param)
    check_refused(http.post("/v1/completions", json={"model": MODEL, "prompt": [99999999]}), "prompt")
    assert raw(http).status_code == 200


def test_04_a_body_that_is_no_json_is_a_500_of_plain_text(http: httpx.Client) -> None:
    """4: sglang#3805."""
    check_refused(http.post("/v1/chat/completions", content=b"{x}"), None)


@pytest.mark.slow
@pytest.mark.parametrize("schema", [{}, True, {"type": "number"}, {"type": "integer"}], ids=str)
def test_05_an_empty_schema_makes_endless_digits(http: httpx.Client, schema: Any) -> None:
    """5: vllm#52011. Any JSON will do, and a number in it ends by itself."""
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}}
    digits = {str(byte): 100 for byte in b"0123456789"}
    choice = raw(http, logit_bias=digits, max_tokens=2000, **fields).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), int | float)


@pytest.mark.parametrize("max_tokens", [1, 12, 30, 120])
def test_06_the_reason_is_tool_calls_without_a_call(http: httpx.Client, max_tokens: int) -> None:
    """6: vllm#53255. A call that must be made is made, or was cut off, and then it says so."""
    body = raw(http, tools=TOOLS, tool_choice="required", temperature=1, seed=3, max_tokens=max_tokens).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == ("length" if body["usage"]["completion_tokens"] == max_tokens else "tool_calls")
    if choice["finish_reason"] == "tool_calls":
        assert all(json.loads(call["function"]["arguments"]) is not None for call in choice["message"]["tool_calls"])


@pytest.mark.parametrize(
    "choice", ["auto", "none", "required", named("now")], ids=["auto", "none", "required", "named"]
)
def test_07_a_stream_ends_for_another_reason(http: httpx.Client, choice: Any) -> None:
    """7: vllm#9209, vllm#25054. One rule: `tool_calls` where calls end the answer, `stop` where a function was named."""
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5, "temperature": 1}
    plain = raw(http, max_tokens=120, **fields).json()["choices"][0]["finish_reason"]
    streamed = read_chat(raw(http, stream=True, max_tokens=120, **fields), is_plain=choice == "none")
    assert streamed["choices"][0]["finish_reason"] == plain
    assert plain == {"auto": "length", "none": "length", "required": "tool_calls"}.get(str(choice), "stop")


@pytest.mark.parametrize("choice", ["required", named("weather")], ids=["required", "named"])
def test_08_a_call_is_streamed_as_text(http: httpx.Client, choice: Any) -> None:
    """8: sglang-jax#1275."""
    message = forced(http, choice)["message"]
    assert message["content"] is None
    assert message["tool_calls"]


@pytest.mark.slow
def test_09_calls_have_no_index_or_all_the_same(http: httpx.Client) -> None:
    """9: ollama#7881, ollama#15457. They count up from 0, so that parallel calls are not one."""
    most = 0
    for seed in range(6):
        events = chunks(http, tools=TOOLS, tool_choice="required", temperature=1, seed=seed, max_tokens=200)
        deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
        begun = [delta["index"] for delta in deltas if "id" in delta]
        assert begun == list(range(len(begun)))
        assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)
        most = max(most, len(begun))
    assert most > 1


def test_10_a_name_is_repeated_and_clients_glue_it(client: openai.OpenAI) -> None:
    """10: llama.cpp#13774, llama.cpp#12379. Name, id and type come once: OpenAI's client joins what comes twice."""
    fields: Any = {
        "model": MODEL,
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": named("weather"),
        "max_tokens": 120,
    }
    with client.chat.completions.stream(**fields) as stream:
        message: Any = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.type) == ("weather", "function")
    assert call.id.startswith("call_") and call.id.count("call_") == 1


def test_11_names_are_empty_and_indices_null_in_later_deltas(http: httpx.Client) -> None:
    """11: sglang#4700, langchain#34654. What has been said is absent."""
    events = chunks(http, tools=TOOLS, tool_choice=named("weather"), max_tokens=120, seed=1)
    _, *later = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert later
    assert all(call == {"index": 0, "function": {"arguments": call["function"]["arguments"]}} for call in later)


def test_12_arguments_are_an_object(http: httpx.Client) -> None:
    """12: TGI#2136, TGI#2461. They are a string of JSON."""
    choice = raw(http, tools=TOOLS, tool_choice=named("weather"), max_tokens=120).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert isinstance(call["function"]["arguments"], str)
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CALLED = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}], ids=["null", "absent", "empty"])
def test_13_an_answer_without_text_is_refused_in_the_next_turn(http: httpx.Client, content: dict[str, Any]) -> None:
    """13: lmstudio#261, sglang#3637, mistral-common#324."""
    said = {"role": "assistant", "tool_calls": [CALL], **content}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
    assert raw(http, messages=[*HELLO, said, result], tools=TOOLS).status_code == 200


def test_14_a_result_in_parts_is_refused(http: httpx.Client) -> None:
    """14: ninfer#56. It reads like the text of its parts."""
    parts = [{"type": "text", "text": "noon"}]
    prompts = [
        raw(
            http,
            messages=[*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": content}],
            return_token_ids=True,
        )
        for content in ("noon", parts)
    ]
    first, second = (prompt.json()["prompt_token_ids"] for prompt in prompts)
    assert first == second


def test_15_the_developer_is_not_heard(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """15: sglang#40082, vllm#42407, llama.cpp#20215. The role is read as `system`. (Templates that want one system message
    in front get one: test_template.py.)"""
    messages = [{"role": "developer", "content": "be brief"}, *HELLO]
    ids = raw(http, messages=messages, return_token_ids=True).json()["prompt_token_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|im_start|>system\nbe brief")


def test_16_a_stop_string_leaks(http: httpx.Client) -> None:
    """16: vllm#3574, vllm#2577, TGI#1724. One that spans tokens is held back, and cut."""
    choice = raw(http, max_tokens=40, logprobs=True).json()["choices"][0]
    text, tokens = choice["message"]["content"], [entry["token"] for entry in choice["logprobs"]["content"]]
    spans = [
        first[-1] + second + third[:1] for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False)
    ]
    stops = [stop for stop in spans if stop.isascii() and stop in text]
    assert len(stops) > 3
    for stop in stops:
        streamed = read_chat(raw(http, max_tokens=40, stop=[stop], stream=True))["choices"][0]
        assert streamed["message"]["content"] == text[: text.index(stop)]
        assert (streamed["finish_reason"], streamed["stop_reason"]) == ("stop", stop)


def test_17_streams_lack_their_frame(http: httpx.Client) -> None:
    """17: LocalAI#1744, LocalAI#1194, LocalAI#340. Roles once, a reason at the end, usage last, then [DONE]: see streams.py."""
    options = {"stream_options": {"include_usage": True}}
    whole = read_chat(raw(http, stream=True, n=2, temperature=1, ignore_eos=True, **options), n=2, with_usage=True)
    assert whole["usage"]["completion_tokens"] == 24


@STREAMED
def test_18_the_reason_is_none_that_clients_know(http: httpx.Client, tokenizer: Tokenizer, stream: bool) -> None:
    """18: TGI#2344. The end-of-text token is `stop`."""
    response = raw(http, stream=stream, logit_bias={str(tokenizer.eos_token_ids[0]): 100})
    body = read_chat(response) if stream else response.json()
    assert body["choices"][0]["finish_reason"] == "stop"


def test_19_logprobs_want_top_logprobs(http: httpx.Client) -> None:
    """19: vllm#4795, llama.cpp#11346."""
    entries = raw(http, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 12
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in entries)
    body = {"model": MODEL, "prompt": "hello", "logprobs": 1, "max_tokens": 3}
    lists = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [len(lists[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [3] * 4


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_20_an_echo_has_no_scores_of_the_prompt(http: httpx.Client, max_tokens: int) -> None:
    """20: llama.cpp#27174. With them lm-eval scores; the first token, which nothing predicts, has none."""
    body = {"model": MODEL, "prompt": [104, 105, 106], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == 3 + max_tokens
    assert scores[0] is None and all(score <= 0 for score in scores[1:])
    assert choice["text"].startswith("hij")


@STREAMED
def test_21_cached_tokens_are_not_told(http: httpx.Client, stream: bool) -> None:
    """21: vllm#16162, vllm#44475, sglang#30755. Always, 0 too, and without a flag."""

    def cached(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        if not stream:
            usage = raw(http, messages=messages).json()["usage"]
        else:
            options = {"stream_options": {"include_usage": True}}
            usage = read_chat(raw(http, messages=messages, stream=True, **options), with_usage=True)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    text = f"{stream}: nobody has asked this before, and it is longer than a page"
    assert raw(http, messages=[{"role": "user", "content": "x"}], cache_salt=f"new {stream}").json()["usage"][
        "prompt_tokens_details"
    ] == {"cached_tokens": 0}
    assert cached(text) < cached(text)


@STREAMED
async def test_22_a_client_goes_and_its_request_goes_on(server: Server, stream: bool) -> None:
    """22: llama.cpp#24496, vllm#32439, mini-sglang#15. It is freed, streamed or not."""
    wait_idle(server.url)
    body = {**ENDLESS, "messages": HELLO, "stream": stream}
    reader, writer = await open_stream(port_of(server), "/v1/chat/completions", body)
    if stream:
        await reader.readuntil(b'"content":')
    await wait_running(server, 1)
    await cut(writer)
    assert wait_idle(server.url)['trunkline:kv_cache_pages{owner="lease"}'] == 0


@STREAMED
def test_23_an_overflow_is_a_200_with_an_error_in_it(http: httpx.Client, stream: bool) -> None:
    """23: llama.cpp#16486, llama.cpp#19774, lmstudio#2322. A 400 with both numbers, in the words that clients look for."""
    error = check_refused(raw(http, messages=LONG, stream=stream), "messages")
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in error["message"]
    assert "resulted in 200" in error["message"]


def test_24_a_long_prompt_is_cut_silently(http: httpx.Client) -> None:
    """24: ollama#17889, ollama#6026. Only if the request says so."""
    assert raw(http, messages=LONG).status_code == 400
    prompt = {"model": MODEL, "prompt": "x" * 20_000, "max_tokens": 1}
    assert http.post("/v1/completions", json=prompt).status_code == 400
    assert http.post("/v1/completions", json={**prompt, "truncate_prompt_tokens": 100}).status_code == 200


def test_25_base64_is_not_what_the_client_reads(client: openai.OpenAI, http: httpx.Client) -> None:
    """25: openclaw#45982, litellm#42426, vllm#6174. float32, little-endian: OpenAI's client asks for it by itself."""
    text = "vectors of the right width"
    by_default = client.embeddings.create(model=MODEL, input=text).data[0].embedding
    encoded, floats = (
        http.post("/v1/embeddings", json={"model": MODEL, "input": text, "encoding_format": kind}).json()["data"][0][
            "embedding"
        ]
        for kind in ("base64", "float")
    )
    assert by_default == np.frombuffer(base64.b64decode(encoded), "<f4").tolist()
    assert len(by_default) == len(floats) == 64
    assert by_default == pytest.approx(floats, abs=1e-6)


def test_plus_many_empty_chunks_while_text_is_held_back(http: httpx.Client) -> None:
    """+: vllm#13087. Nothing is sent where there is nothing to say."""
    text = raw(http, max_tokens=40).json()["choices"][0]["message"]["content"]
    events = chunks(http, max_tokens=40, stop=[text + "never"])
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": text}, {}]


def test_plus_choices_are_the_same_or_overwrite_each_other(http: httpx.Client) -> None:
    """+: vllm#16863, vllm#10852. Choice i has the seed + i, and the same text in a stream."""
    fields = {"n": 3, "seed": 11, "temperature": 1}
    texts = [choice["message"]["content"] for choice in raw(http, **fields).json()["choices"]]
    assert len(set(texts)) == 3
    streamed = read_chat(raw(http, stream=True, **fields), n=3)["choices"]
    assert [choice["message"]["content"] for choice in streamed] == texts


def test_plus_a_character_of_several_tokens_is_broken(http: httpx.Client) -> None:
    """+: ferrox#124, exo#1691, mlx-vlm#1076. Its bytes are held back until it is whole."""
    streamed = read_chat(raw(http, stream=True, regex="(🦊|é|👩‍🚀){3,6}", temperature=1, max_tokens=80))["choices"][0]
    text = streamed["message"]["content"]
    assert streamed["finish_reason"] == "stop"
    assert "\ufffd" not in text and text.strip("🦊é👩‍🚀") == ""


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1/models/"])
def test_plus_a_base_url_that_ends_in_a_slash_finds_nothing(http: httpx.Client, path: str) -> None:
    """+: open-webui#12117."""
    answer = http.get(httpx.URL(str(http.base_url).rstrip("/") + path))
    assert [model["id"] for model in answer.json()["data"]] == [MODEL, "alias/of-tiny"]


@pytest.mark.parametrize(
    "nothing",
    [{"tool_choice": None}, {"tools": None, "tool_choice": None}, {"tools": [], "tool_choice": None}],
    ids=str,
)
def test_plus_no_choice_of_no_tools_is_refused(http: httpx.Client, nothing: dict[str, Any]) -> None:
    """+: camel#1585. null is absent."""
    assert raw(http, **nothing).status_code == 200


def test_plus_strict_functions_are_refused(http: httpx.Client) -> None:
    """+: inspect_ai#825."""
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    assert raw(http, tools=[tool]).status_code == 200
