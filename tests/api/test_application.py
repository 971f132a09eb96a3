"""FastAPI with few layers: requests reach the same endpoints, and errors the same handlers, as with all of them."""

import threading
import traceback

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.api.test_app import make_service
from trunkline.api.app import create_app
from trunkline.api.application import Application, DirectRoute


async def echo(request: Request) -> Response:
    return PlainTextResponse(f"{request.url.path} {sorted(request.path_params)} {request.scope['route'].path}")


async def fail(_request: Request) -> Response:
    raise LookupError("seven")


class Outer:
    """Says that it was there."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app = app
        self.name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["passed"] = [*scope.get("passed", ()), self.name]
        await self.app(scope, receive, send)


def make_app() -> Application:
    async def on_lookup_error(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{error.args[0]} {request.scope['passed']}", status_code=418)

    app = Application()
    app.add_api_route("/things", echo, methods=["POST"], response_model=None)
    app.add_api_route("/things/{name:path}", echo, methods=["GET"], response_model=None)
    app.add_api_route("/fail", fail, methods=["GET"], response_model=None)
    app.add_exception_handler(LookupError, on_lookup_error)
    app.add_middleware(Outer, name="inner")
    app.add_middleware(Outer, name="outer")
    return app


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/things", 200, "/things [] /things"),
        ("GET", "/things/a/b", 200, "/things/a/b ['name'] /things/{name:path}"),
        ("HEAD", "/things/a/b", 200, ""),
        ("HEAD", "/fail", 418, ""),
        ("HEAD", "/things", 405, ""),
        ("GET", "/fail", 418, "seven ['outer', 'inner']"),
        ("GET", "/things", 405, "Method Not Allowed"),
        ("GET", "/nothing", 404, "Not Found"),
        ("GET", "/openapi.json", 200, "/things/{name}"),
    ],
)
async def test_where_requests_go(method: str, path: str, status: int, text: str) -> None:
    transport = httpx.ASGITransport(make_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert text in response.text


def test_a_path_leads_where_the_router_would_send_it() -> None:
    app = create_app(make_service())
    app.build_middleware_stack()
    assert isinstance(app, Application) and len(app._exact) > 20
    assert ("POST", "/v1/chat/completions") in app._exact
    for (method, path), route in app._exact.items():
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        first = next(candidate for candidate in app.routes if candidate.matches(dict(scope))[0] is Match.FULL)
        assert isinstance(route, DirectRoute) and first is route, (method, path)


@pytest.mark.parametrize("path", ["/again", "/again/7"])
async def test_plain_functions_handle_exceptions_which_keep_no_trace_of_it(path: str) -> None:
    """In the loop's own thread. An error may be raised for every request from its beginning on."""
    error, threads = LookupError("gone"), []

    async def raise_it(_request: Request) -> Response:
        raise error

    def on_lookup_error(_request: Request, raised: Exception) -> Response:
        threads.append(threading.current_thread())
        return PlainTextResponse(f"{raised} {len(traceback.extract_tb(raised.__traceback__))}", status_code=410)

    app = Application()
    app.add_api_route("/again", raise_it, methods=["GET"], response_model=None)
    app.add_api_route("/again/{number}", raise_it, methods=["GET"], response_model=None)
    app.add_exception_handler(LookupError, on_lookup_error)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answers = [await client.get(path) for _ in range(3)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(410, answers[0].text)] * 3
    assert set(threads) == {threading.current_thread()}
    assert error.__traceback__ is None


async def test_what_nobody_handles_comes_out() -> None:
    async def raise_it(_request: Request) -> Response:
        raise ZeroDivisionError

    app = Application()
    app.add_api_route("/bug", raise_it, methods=["GET"], response_model=None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        with pytest.raises(ZeroDivisionError):
            await client.get("/bug")
