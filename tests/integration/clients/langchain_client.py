"""LangChain: a RAG chain whose system prompt stays cached, structured output in its three modes, tools, streams."""

import functools
import operator
import os
from typing import Literal

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

server = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
connection = {"base_url": f"{server}/v1", "api_key": os.environ.get("API_KEY", "unused")}
model = OpenAI(**connection).models.list().data[0].id
chat = ChatOpenAI(model=model, temperature=0, max_tokens=48, stream_usage=True, **connection)

handbook = "Answer from the documents alone, in one sentence. If they don't say it, say that you don't know. " * 4
documents = ["Parcels arrive within three days.", "Money comes back within two weeks."]
prompt = ChatPromptTemplate([("system", handbook), ("user", "Documents:\n{documents}\n\nQuestion: {question}")])
rag = prompt | chat
for question in ("When does my parcel arrive?", "When do I get my money back?"):
    answer = rag.invoke({"documents": "\n".join(documents), "question": question})
    print(answer.content, answer.usage_metadata["input_token_details"]["cache_read"], "tokens were cached")
# That was an example; from here on, everything is checked.
usage = answer.usage_metadata
assert answer.content and usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
assert usage["input_token_details"]["cache_read"] >= 96  # all of the handbook's whole pages

asked = {"documents": "\n".join(documents), "question": question}
chunks = list(rag.stream(asked))
streamed = functools.reduce(operator.add, chunks)
assert len(chunks) > 3 and streamed.content == answer.content
assert streamed.usage_metadata["output_tokens"] == usage["output_tokens"]
assert (rag | StrOutputParser()).batch([asked] * 3) == [answer.content] * 3
print("chain: whole, streamed, in a batch, cached")


class Ticket(BaseModel, extra="forbid"):
    """Hand a customer's message to a team."""

    team: Literal["billing", "shipping"]
    urgent: bool


complaint = "I paid twice. Help me today!"
for method in ("json_schema", "function_calling"):
    for strict in (True, None):
        sorter = chat.with_structured_output(Ticket, method=method, strict=strict, include_raw=True)
        found = sorter.invoke(complaint)
        assert isinstance(found["parsed"], Ticket) and not found["parsing_error"], found
examples = [("user", "Parcel lost"), ("ai", '{"team": "shipping", "urgent": false}')] * 2
json_mode = chat.with_structured_output(Ticket, method="json_mode")
assert isinstance(json_mode.invoke([*examples, ("user", complaint)]), Ticket)
print("structured output: json_schema, function_calling, json_mode")


@tool
def open_ticket(team: Literal["billing", "shipping"]) -> str:
    """Open a ticket for a team."""
    return f"The ticket of {team} is number 42."


caller = chat.bind_tools([open_ticket], tool_choice="required")
message = caller.invoke(complaint)
streamed = functools.reduce(operator.add, caller.stream(complaint))
assert message.tool_calls and not message.invalid_tool_calls and not streamed.invalid_tool_calls
assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in message.tool_calls]
results = [open_ticket.invoke(call) for call in message.tool_calls]
assert "number 42" in results[0].content
assert chat.bind_tools([open_ticket]).invoke([("user", complaint), message, *results]).content
print("tools: called, streamed, answered")

responses = ChatOpenAI(model=model, temperature=0, max_tokens=16, use_responses_api=True, **connection)
assert responses.invoke("Name a sea.").text
print("responses")
