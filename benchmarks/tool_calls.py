"""Tool calls over HTTP: functions that people have written (BFCL), called by the built-in model through OpenAI's client.

    python -m benchmarks.tool_calls --data ../shared/data/grammar          # a few minutes on two cores
    python -m benchmarks.tool_calls --data ../shared/data/grammar --cases 5     # a smoke run

Each case is asked in several ways, at temperature 0 and with `close_on_length`. Every call must name a function of the request,
and its arguments must parse and follow that function's schema, as `jsonschema` reads it; the exit status is 1 if one does not,
or if more than 2 % of the cases are refused. What the model picks is its own affair.
"""

import argparse
import collections
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import openai

from benchmarks.json_lines import read_rows
from benchmarks.server import serve
from trunkline.bench.report import platform_facts
from trunkline.bench.tables import align

AT_A_TIME = 8
MAX_TOKENS = 512
MOST_REFUSED = 0.02
WAYS = ("required", "required, one call", "named")


class Case(NamedTuple):
    """What a person asked, and the functions there are."""

    name: str
    messages: list[Any]
    tools: list[Any]

    @property
    def schemas(self) -> dict[str, Any]:
        """Of the arguments, by the name of the function."""
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


class Called(NamedTuple):
    """A call of an answer."""

    name: str
    arguments: str


class Answer(NamedTuple):
    """What came of a request.

    refused  why there is nothing else
    tokens   that the model wrote, prompt not included
    """

    calls: tuple[Called, ...] = ()
    content: str | None = None
    finish_reason: str = ""
    tokens: int = 0
    refused: str = ""


class Findings(NamedTuple):
    """Of the answers of one way to ask.

    parsed, valid  calls whose arguments are JSON; of these, those that follow their function's schema
    wrong          a sentence for each that does not, or that is no call of a known function, or comes with text
    """

    way: str
    answers: list[Answer]
    parsed: int
    valid: int
    wrong: list[str]
    seconds: float

    @property
    def refused(self) -> list[str]:
        """Why, for each request that was."""
        return [answer.refused for answer in self.answers if answer.refused]

    @property
    def calls(self) -> int:
        return sum(len(answer.calls) for answer in self.answers)


def load_cases(file: Path) -> list[Case]:
    """The cases of bfcl_sample.jsonl."""
    return [Case(row["id"], row["question"][0], row["tools_openai"]) for row in read_rows(file)]


def fields_of(way: str, case: Case) -> dict[str, Any]:
    """What a request says besides its messages and functions."""
    if way == "named":
        return {"tool_choice": {"type": "function", "function": {"name": list(case.schemas)[-1]}}}
    return {"tool_choice": "required", **({"parallel_tool_calls": False} if way == "required, one call" else {})}


def ask(client: openai.OpenAI, model: str, case: Case, fields: dict[str, Any]) -> Answer:
    """One answer, in one piece."""
    try:
        answer = client.chat.completions.create(**_request(model, case, fields))
    except openai.BadRequestError as error:
        return Answer(refused=str(error))
    choice = answer.choices[0]
    calls = tuple(Called(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ())
    return Answer(calls, choice.message.content, choice.finish_reason, answer.usage.completion_tokens)


def ask_streamed(client: openai.OpenAI, model: str, case: Case, fields: dict[str, Any]) -> Answer:
    """The same as `ask`, put together from a stream's chunks."""
    calls: dict[int, Called] = {}
    content: list[str] = []
    finish_reason, tokens = "", 0
    request = {**_request(model, case, fields), "stream": True, "stream_options": {"include_usage": True}}
    try:
        for chunk in client.chat.completions.create(**request):
            tokens = chunk.usage.completion_tokens if chunk.usage is not None else tokens
            for choice in chunk.choices:
                finish_reason = choice.finish_reason or finish_reason
                content.append(choice.delta.content or "")
                for part in choice.delta.tool_calls or ():
                    before = calls.get(part.index, Called("", ""))
                    name = before.name + (part.function.name or "")
                    calls[part.index] = Called(name, before.arguments + (part.function.arguments or ""))
    except openai.BadRequestError as error:
        return Answer(refused=str(error))
    return Answer(tuple(calls[index] for index in sorted(calls)), "".join(content) or None, finish_reason, tokens)


def _request(model: str, case: Case, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "messages": case.messages,
        "tools": case.tools,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "extra_body": {"close_on_length": True},
        **fields,
    }


def run(client: openai.OpenAI, model: str, cases: Sequence[Case], way: str) -> Findings:
    """Ask all in one way, AT_A_TIME at a time, and look at every call."""
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = list(pool.map(lambda case: ask(client, model, case, fields_of(way, case)), cases))
    seconds = time.perf_counter() - start
    parsed, valid, wrong = 0, 0, []
    for case, answer in zip(cases, answers, strict=True):
        if answer.refused:
            continue
        if answer.content is not None:
            wrong.append(f"{case.name}: text beside calls: {answer.content!r}")
        if not answer.calls or (way != "required" and len(answer.calls) > 1):
            wrong.append(f"{case.name}: {len(answer.calls)} calls")
        for call in answer.calls:
            problem = problem_of(call, case)
            parsed += problem is None or not problem.startswith("no JSON")
            valid += problem is None
            if problem is not None:
                wrong.append(f"{case.name}: {problem}")
    return Findings(way, answers, parsed, valid, wrong, seconds)


def problem_of(call: Called, case: Case) -> str | None:
    """Why a call is not one that the case's functions allow."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        return f"no JSON: {error}: {call.arguments!r}"
    if call.name not in case.schemas:
        return f"there is no function {call.name!r}"
    broken = next(iter(jsonschema.Draft202012Validator(case.schemas[call.name]).iter_errors(arguments)), None)
    return None if broken is None else f"{call.name} may not have {call.arguments}: {broken.message}"


def table(findings: Sequence[Findings]) -> str:
    """Markdown, for README.md."""
    rows = [["tool_choice", "cases", "refused", "calls", "parse", "follow", "finish_reason", "tokens", "s"]]
    for found in findings:
        reasons = collections.Counter(answer.finish_reason for answer in found.answers if not answer.refused)
        figures = [len(found.answers), len(found.refused), found.calls, found.parsed, found.valid]
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        tokens = sum(answer.tokens for answer in found.answers)
        rows.append([found.way, *map(str, figures), told, f"{tokens:,}", f"{found.seconds:.0f}"])
    return align(rows)


def main(argv: list[str] | None = None) -> int:
    """Ask, and print a table."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.tool_calls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", required=True, help="has bfcl_sample.jsonl")
    parser.add_argument("--cases", type=int, metavar="N", help="only the first so many")
    args = parser.parse_args(argv)
    cases = load_cases(args.data / "bfcl_sample.jsonl")[: args.cases]
    with serve() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=600) as client:
        model = client.models.list().data[0].id
        findings = [run(client, model, cases, way) for way in WAYS]
    print(table(findings))
    facts = platform_facts()
    print(f"\n{facts['cpus']} cores; trunkline {facts['trunkline']}; `python -m benchmarks.tool_calls`")
    for found in findings:
        for sentence in [*(f"refused: {reason}" for reason in found.refused), *found.wrong]:
            print(f"{found.way}: {sentence}", file=sys.stderr)
    return int(any(found.wrong or len(found.refused) > MOST_REFUSED * len(cases) for found in findings))


if __name__ == "__main__":
    sys.exit(main())
