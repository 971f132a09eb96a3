"""Tools of models that mark calls with special tokens, through a server: the tiny model, with such tokens added.

The marks are forced as single tokens, and what is enforced holds in the model's own form, also where it chooses freely.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import openai
import pytest

from tests.api.serving import CONTEXT, MODEL, Server
from tests.api.test_tools import named
from tests.tiny import VOCAB_SIZE, tiny_model
from trunkline.api.tool_parsers import find_dialect

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("weather", "now")
]
FIELDS: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello world"}],
    "tools": TOOLS,
    "temperature": 1,
    "max_tokens": 160,
}


class Marked(NamedTuple):
    """A server of one dialect.

    marks   that begin a call, whatever it is
    ids     of the special tokens
    """

    dialect: str
    client: openai.OpenAI
    first: str
    ids: dict[str, int]


def marked_model(folder: Path, markers: tuple[str, ...]) -> dict[str, int]:
    """The tiny model with these special tokens added to its vocabulary; their ids."""
    tiny_model(folder, vocab_size=VOCAB_SIZE + len(markers), max_position_embeddings=CONTEXT)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = {marker: VOCAB_SIZE + index for index, marker in enumerate(markers)}
    for marker, number in ids.items():
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": number, "content": marker})
    file.write_text(json.dumps(tokenizer))
    return ids


@pytest.fixture(scope="module", params=["deepseek_v31", "mistral_v11"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    dialect = find_dialect(request.param)
    assert dialect.form is not None
    folder = tmp_path_factory.mktemp("marked")
    ids = marked_model(folder, dialect.markers)
    flags = ["--served-model-name", MODEL, "--kv-cache-memory", "16MiB", "--generation-config", "vllm"]
    with Server(folder, *flags, "--tool-call-parser", dialect.name) as server:
        server.wait_ready()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
            yield Marked(dialect.name, client, dialect.form.trigger, ids)


def ask(marked: Marked, **fields: Any) -> Any:
    fields = {**FIELDS, "extra_body": {"close_on_length": True, "return_token_ids": True}, **fields}
    (choice,) = marked.client.chat.completions.create(**fields).choices
    return choice


def check_calls(choice: Any) -> list[str]:
    """Asserts that all are valid; returns their names."""
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    return [call.function.name for call in choice.message.tool_calls]


@pytest.mark.parametrize("seed", range(3))
def test_required(marked: Marked, seed: int) -> None:
    choice = ask(marked, tool_choice="required", seed=seed)
    assert check_calls(choice)
    assert choice.message.content is None
    assert choice.token_ids[0] == marked.ids[marked.first], "one token, not its spelling"
    assert len([token for token in choice.token_ids if token >= VOCAB_SIZE]) >= 2


def test_named(marked: Marked) -> None:
    assert check_calls(ask(marked, tool_choice=named("now"), seed=1)) == ["now"]


@pytest.mark.parametrize("seed", range(3))
def test_strict_functions_are_enforced_where_the_model_chooses(marked: Marked, seed: int) -> None:
    biased = {str(marked.ids[marked.first]): 100}
    choice = ask(marked, parallel_tool_calls=False, logit_bias=biased, seed=seed)
    assert len(check_calls(choice)) == 1
    assert choice.token_ids[0] == marked.ids[marked.first]


def test_free_text_holds_no_other_mark(marked: Marked) -> None:
    others = {str(number): 100 for mark, number in marked.ids.items() if mark != marked.first}
    choice = ask(marked, logit_bias=others, seed=1)
    marks = [token for token in choice.token_ids if token >= VOCAB_SIZE]
    assert marks[:1] in ([], [marked.ids[marked.first]])
    assert choice.message.content or choice.message.tool_calls


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"parallel_tool_calls": False}, {"tool_choice": named("now")}]
)
def test_streams_say_the_same(marked: Marked, fields: Any) -> None:
    bias = {} if "tool_choice" in fields else {"logit_bias": {str(marked.ids[marked.first]): 100}}
    fields = {**FIELDS, **bias, **fields, "seed": 3, "extra_body": {"close_on_length": True}}
    plain = marked.client.chat.completions.create(**fields).choices[0]
    with marked.client.chat.completions.stream(**fields) as stream:
        for _ in stream:
            pass
        streamed = stream.current_completion_snapshot.choices[0]
    assert plain.message.tool_calls
    assert streamed.finish_reason == plain.finish_reason
    assert (streamed.message.content or None) == plain.message.content
    assert _calls(streamed) == _calls(plain)


def _calls(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
