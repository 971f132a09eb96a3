"""Tools in Python: `LLM.chat` and `AsyncLLM.chat`. The tiny model writes noise; what is right, the grammar made right."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.tiny import tiny_model
from trunkline import LLM, AsyncLLM, SamplingParams
from trunkline.constraint import Constraint
from trunkline.errors import InvalidParameter
from trunkline.outputs import CompletionOutput

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}]
ONE_CALL: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
ROOM = SamplingParams(max_tokens=200, seed=1, n=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Any:
    with LLM(tiny, threads=1) as llm:
        yield llm


def check(output: CompletionOutput) -> None:
    assert output.finish_reason == "stop"
    (call,) = output.tool_calls
    assert call.name == "forecast"
    assert call.id.startswith("call_")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert output.valid
    assert output.text == f'<tool_call>[{{"name": "forecast", "arguments": {call.arguments}}}]</tool_call>'


def test_calls_that_must_be_made_are_made(llm: LLM) -> None:
    for result in llm.chat([HELLO, HELLO], ROOM, **ONE_CALL):
        for output in result.outputs:
            check(output)


def test_text_stays_text(llm: LLM) -> None:
    (result,) = llm.chat(HELLO, SamplingParams(max_tokens=20, seed=1), tools=TOOLS)
    assert result.prompt is not None
    assert '"name": "forecast"' in result.prompt
    assert (result.outputs[0].tool_calls, result.outputs[0].valid) == ((), None)


def test_a_constraint_beside_tools_is_the_other_way_to_answer(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=200, seed=1, constraint=Constraint(json_schema={"enum": [1]}))
    (result,) = llm.chat(HELLO, sampling, tools=TOOLS, parallel_tool_calls=False)
    assert result.text == "1" or result.outputs[0].tool_calls


def test_wrong_tools_are_named(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r"tools\[0\]\.function\.name"):
        llm.chat(HELLO, tools=[{"type": "function", "function": {"name": "a b"}}])


@pytest.mark.slow
def test_asynchronously_too(tiny: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny, threads=1) as llm:
            async for result in llm.chat(HELLO, ROOM, **ONE_CALL):
                for output in result.outputs:
                    assert output.finish_reason is not None or output.tool_calls == ()
            assert result.finished
            for output in result.outputs:
                check(output)

    asyncio.run(run())
