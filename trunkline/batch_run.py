"""Sends the requests of a batch to a server and notes what becomes of each. Knows HTTP, and no format of files but batch_files'.

what there is                                          what happens
an answer, whatever its status                         it is the result
429, 503 and what else asks to come again              it is sent again, after as long as the server says; at last the answer
                                                       is the result
an answer that the engine has died                     it is sent again; at last the batch ends, to be gone on with: Unreachable
no answer, but the server lives                        the same; in the end the error is the result
no answer, and no server any more                      the batch ends, too
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from trunkline.batch_files import Request, Result
from trunkline.bench.runner import Server
from trunkline.errors import StartupError

AGAIN = (408, 409, 429, 502, 503, 504)  # statuses that may be others the next time
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between two tries, doubled each time
REASON_CHARACTERS = 300


class Unreachable(StartupError):
    """The server is gone. What is done is in the output file; the same command goes on from there."""


@dataclass(kw_only=True)
class Tally:
    """Tokens of the answers, as their `usage` says."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, body: Any) -> None:
        usage = _field(body, "usage")
        details = _field(usage, "prompt_tokens_details", "input_tokens_details")
        self.prompt_tokens += _number(_field(usage, "prompt_tokens", "input_tokens"))
        self.output_tokens += _number(_field(usage, "completion_tokens", "output_tokens"))
        self.cached_tokens += _number(_field(details, "cached_tokens"))


async def run_batch(
    server: Server,
    requests: Iterable[Request],
    on_result: Callable[[Request, Result], None],
    *,
    concurrency: int,
    max_retries: int,
) -> None:
    """Send all of them, `concurrency` at a time and in order, and report each result as it comes.

    Raises Unreachable, after the results that are there, if the server is gone; and what `on_result` raises as StartupError.
    """
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:  # all workers take from the same one
            on_result(request, await _result(server, request, max_retries))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except* StartupError as ended:
        raise ended.exceptions[0] from None


async def _result(server: Server, request: Request, max_retries: int) -> Result:
    if request.problem is not None:
        return Result(error={"code": "invalid_request", "message": request.problem, "line": request.line})
    wait = FIRST_WAIT
    for tries_left in range(max_retries, -1, -1):
        try:
            result, retry_after = await _send(server, request)
            is_dead = _engine_died(result.body)
            if result.status_code not in AGAIN and not is_dead:
                return result
            if not tries_left:
                if is_dead:
                    raise _gone(server, "its engine has died")
                return result
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            reason = (str(error) or type(error).__name__)[:REASON_CHARACTERS]
            retry_after = None
            if not tries_left:
                await _check_alive(server, reason)
                return Result(
                    error={
                        "code": "no_answer",
                        "message": f"The server gave no answer: {reason}.",
                        "line": request.line,
                    }
                )
        await asyncio.sleep(retry_after if retry_after is not None else wait * random.uniform(0.75, 1.25))
        wait = min(2 * wait, LONGEST_WAIT)
    raise AssertionError("the last try returns")


async def _send(server: Server, request: Request) -> tuple[Result, float | None]:
    """One try: the result, and in how many seconds the server wants to be asked again, if it says so."""
    async with server.post(request.url, request.body) as response:
        text = await response.text(errors="replace")
        try:
            body = json.loads(text)
        except ValueError:
            body = text  # a proxy's page, say
        after = response.headers.get("retry-after", "")
        result = Result(response.status, response.headers.get("x-request-id", ""), body)
        return result, min(float(after), LONGEST_WAIT) if after.isascii() and after.isdecimal() else None


async def _check_alive(server: Server, reason: str) -> None:
    try:
        await server.model()
    except StartupError:
        raise _gone(server, reason) from None


def _field(value: Any, *names: str) -> Any:
    """The first of these fields that is there; None for what is no object: any server may have answered."""
    return next((value[name] for name in names if value.get(name)), None) if isinstance(value, dict) else None


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _engine_died(body: Any) -> bool:
    """Trunkline's answer then; the server ends, or starts it again."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("code") == "engine_dead"


def _gone(server: Server, reason: str) -> Unreachable:
    return Unreachable(
        f"The server at {server.base_url} is gone ({reason}). What is done is kept: run the same command again to go on."
    )
