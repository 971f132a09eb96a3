"""FastAPI as far as we use it: a table of routes, and what /openapi.json says of them. Knows no endpoint.

    Application  app.add_middleware(…) ──► handlers of exceptions ──► table of routes
    DirectRoute      endpoint(request) ──► response

FastAPI's own layers are left out. They would trace, catch what Edge has caught, count a body that read_json counts, keep files
open, and between a route and its endpoint look for parameters, dependencies and a model of the response: nothing that an
endpoint of ours has. All of it together takes longer than to read a chat's body, and a part of it each time a token is sent.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoute(APIRoute):
    """Calls its endpoint with the request, and sends what it returns. HEAD is a GET of which HTTP's server leaves the body out."""

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = call

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD" and "GET" in (self.methods or ()):
            await self.app(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


class Application(FastAPI):
    """All its routes are DirectRoutes. Its outermost middleware is the last resort for whatever is raised."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.router.route_class = DirectRoute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        await self.middleware_stack(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To the route of that very path, if there is one; else the router looks through them all."""
        route = self._exact.get((scope.get("method", ""), scope.get("path", "")))
        if route is None:
            await self.router(scope, receive, send)
            return
        scope.update(route=route, endpoint=route.endpoint, path_params={})
        await route.app(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        self._exact = {
            (method, route.path): route
            for route in self.routes
            if isinstance(route, DirectRoute) and not route.param_convertors
            for method in route.methods or ()
        }
        stack: ASGIApp = ExceptionMiddleware(self._dispatch, handlers=self.exception_handlers)
        for middleware, args, kwargs in reversed(self.user_middleware):
            stack = middleware(stack, *args, **kwargs)
        return stack
