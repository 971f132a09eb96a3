"""Tool users: a call that must be made, with arguments that follow its schema; then its result, and an answer in words."""

from typing import Any

from locust import task

from loadtests.answer import Answer
from loadtests.model_user import ModelUser, text
from loadtests.schemas import MAX_TOKENS, WORD, objection, schema

SYSTEM_WORDS = 80
QUESTION_WORDS = 20
RESULT_WORDS = 30

PARAMETERS = {
    "weather": schema(city=WORD, days={"type": "integer", "minimum": 1, "maximum": 7}),
    "find_order": schema(number={"type": "integer", "minimum": 1, "maximum": 9999}, state={"enum": ["open", "sent"]}),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text(name, 8), "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]


def check(answer: Answer) -> str | None:
    """Why these are not the calls that were asked for, or None."""
    if len(answer.calls) != 1:
        return f"{len(answer.calls)} calls, not one"
    (call,) = answer.calls
    if call.name not in PARAMETERS:
        return "a call of a tool that was not offered"
    return objection(call.arguments, PARAMETERS[call.name])


class ToolUser(ModelUser):
    """Asks, runs the tool that is called, and asks on with its result."""

    kind = "tools"
    weight = 1

    @task
    def call(self) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": text(f"agent {self.application()}", SYSTEM_WORDS)},
            {"role": "user", "content": self.question(QUESTION_WORDS)},
        ]
        required = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": MAX_TOKENS}
        if (answer := self.ask(messages, check=check, **required)) is None:
            return
        (call,) = answer.calls
        function = {"name": call.name, "arguments": call.arguments}
        messages += [
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": text(f"result {call.arguments}", RESULT_WORDS)},
        ]
        self.ask(messages, tools=TOOLS, tool_choice="none")
