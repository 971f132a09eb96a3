"""An OpenAI-compatible server that knows no model: it answers "one two three …" and keeps what it was asked.

with FakeServer() as server:
    ...                       # requests to server.url
    server.requests           # [(path, body), …] in order of arrival
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

Refusal = Callable[[dict[str, Any]], str | None]
WORDS = ("one", " two", " three", " four", " five", " six", " seven")


class FakeServer:
    """Runs in a thread of its own, on a port the system picks.

    refuses    body -> why it is answered with status 400, or None
    breaks     body -> how its stream ends early: "cut", "error" or "no usage"; None: it does not
    key        the API key it wants, or None
    answer     what a request with a response_format is answered with
    pieces     bytes per network write: small ones cut events, and characters, in two
    """

    def __init__(
        self,
        *,
        refuses: Refusal = lambda body: None,
        breaks: Refusal = lambda body: None,
        key: str | None = None,
        answer: str = "{}",
        pieces: int = 11,
    ) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.authorizations: list[str | None] = []
        self.most_at_once = 0
        self._at_once = 0
        self._refuses = refuses
        self._breaks = breaks
        self._key = key
        self._answer = answer
        self._pieces = pieces
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    @web.middleware
    async def _check_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": {"message": "Send a header."}}, status=401)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path, body))
        self.authorizations.append(request.headers.get("Authorization"))
        if why := self._refuses(body):
            return web.json_response({"error": {"message": why}}, status=400)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._stream(request, body)
        finally:
            self._at_once -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        received = "".join(f"data: {event}\n\n" for event in self._events(request.path, body)).encode()
        for start in range(0, len(received), self._pieces):
            await response.write(received[start : start + self._pieces])
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    def _events(self, path: str, body: dict[str, Any]) -> list[str]:
        chat = path.endswith("/chat/completions")
        count = body["max_tokens"]
        texts = [self._answer] if "response_format" in body else [WORDS[i % len(WORDS)] for i in range(count)]
        events: list[dict[str, Any]] = (
            [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}] if chat else []
        )
        for text in texts:
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            events.append({"choices": [{"index": 0, "finish_reason": None, **said}]})
        how = self._breaks(body)
        if how == "error":
            return [json.dumps(event) for event in events] + [json.dumps({"error": {"message": "the engine is gone"}})]
        if how == "cut":
            return [json.dumps(event) for event in events]
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        events.append({"choices": [{"index": 0, "finish_reason": "length", **last}]})
        if how != "no usage":
            prompt_tokens = len(json.dumps(body.get("messages", body.get("prompt"))).split())
            usage: dict[str, Any] = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": 16},
            }
            events.append({"choices": [], "usage": usage})
        return [json.dumps(event) for event in events] + ["[DONE]"]
