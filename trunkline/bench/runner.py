"""Runs a workload against a server: so many sessions at a time, each session's turns one after another."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from trunkline.bench.client import Outcome, reused_connections, stream
from trunkline.bench.load import Timed
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import Message, Turn, Workload
from trunkline.config import API_KEY_VARIABLE
from trunkline.errors import StartupError


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A workload that was run: `outcomes` of its requests in order of sending, and how long it took as a whole."""

    workload: Workload
    outcomes: tuple[tuple[Turn, Outcome], ...]
    wall_seconds: float


class Server:
    """An OpenAI-compatible server. Use it as an asynchronous context manager.

    async with Server("http://127.0.0.1:8000", api_key=None, timeout=600) as server:
        run = await server.run(workload, await server.model())

    base_url   with or without the trailing /v1
    timeout    seconds without a byte after which a request counts as failed
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 600) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),  # the default limit of 100 would be what is measured
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self._timeout),
            trace_configs=[reused_connections()],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self) -> str:
        """The name of the first model served. Raises StartupError if the server does not tell."""
        answer = await self._get("/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (TypeError, LookupError):
            raise StartupError(f"{self.base_url}/v1/models lists no model; name one with --model.") from None

    async def version(self) -> str | None:
        """What the server says of itself at /version, or None."""
        try:
            answer = await self._get("/version")
        except StartupError:
            return None
        return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None

    async def _get(self, path: str) -> Any:
        url = self.base_url + path
        try:
            async with self._session.get(url) as response:
                if response.status == 401:
                    seen = "refuses this API key" if self._headers else "wants an API key"
                    give = f"give the right one with --api-key KEY or ${API_KEY_VARIABLE}"
                    raise StartupError(f"The server at {self.base_url} {seen}; {give}.")
                if response.status != 200:
                    raise StartupError(
                        f"GET {url} answers with status {response.status}; is this an OpenAI-compatible server?"
                    )
                return await response.json(content_type=None)
        except (TimeoutError, aiohttp.ClientError, ValueError) as error:
            raise StartupError(f"GET {url} failed ({error}); is a server running there? See --url.") from None

    def post(self, path: str, body: Any) -> Any:
        """A request with a JSON body, to be awaited or entered as aiohttp's."""
        return self._session.post(self.base_url + path, json=body)

    async def run(self, workload: Workload, model: str) -> Run:
        """Send all of it and wait for the end. A request that fails is reported, and the others go on."""
        turns: list[tuple[Turn, Outcome]] = []
        places = asyncio.Semaphore(workload.concurrency)

        async def hold(session: tuple[Turn, ...]) -> None:
            async with places:
                await self._hold(session, model, turns)

        start = time.perf_counter()
        await asyncio.gather(*(hold(session) for session in workload.sessions))
        wall_seconds = time.perf_counter() - start
        turns.sort(key=lambda sent: sent[1].started)
        return Run(workload=workload, outcomes=tuple(turns), wall_seconds=wall_seconds)

    async def run_load(
        self,
        load: Sequence[Timed],
        model: str,
        *,
        most: int | None = None,
        on_end: Callable[[], object] = lambda: None,
    ) -> tuple[list[Outcome], float]:
        """Send each request when its time has come. Returns what each gave, in the same order, and seconds in all.

        most    requests under way at a time; those above wait, and are timed from when they are sent. None: no limit
        on_end  called whenever one has ended
        """
        places = asyncio.Semaphore(most) if most is not None else contextlib.nullcontext()
        start = time.perf_counter()

        async def send(timed: Timed) -> Outcome:
            await asyncio.sleep(start + timed.arrival - time.perf_counter())
            async with places:
                turn = timed.turn
                outcome = await stream(self._session, self.base_url + turn.path, turn.body(model, list(turn.messages)))
            on_end()
            return outcome

        outcomes = await asyncio.gather(*(send(timed) for timed in load))
        return outcomes, time.perf_counter() - start

    async def warm_up(self, texts: Texts, model: str, *, seed: int, count: int) -> None:
        """Some short requests that share nothing with what is measured."""
        for number in range(count):
            text = texts.piece(16, random.Random(f"{seed}/warm-up {number}"), first=True)
            turn = Turn(prompt=text, prompt_tokens=16, max_tokens=8)
            await stream(self._session, self.base_url + turn.path, turn.body(model, []))

    async def _hold(self, session: tuple[Turn, ...], model: str, turns: list[tuple[Turn, Outcome]]) -> None:
        history: list[Message] = []
        for turn in session:
            history += turn.messages
            outcome = await stream(self._session, self.base_url + turn.path, turn.body(model, history))
            turns.append((turn, outcome))
            if outcome.error is not None:
                break  # the chat cannot go on without the answer
            history.append({"role": "assistant", "content": outcome.text})
