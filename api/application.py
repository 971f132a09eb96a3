"""FastAPI as far as we use it: a table of routes, and what /openapi.json says of them. Knows no endpoint.

    Application  app.add_middleware(…) ──► table of routes
    DirectRoute      endpoint(request) ──► response
                                      └──► handlers of exceptions ──► response

FastAPI's own layers are left out. They would trace, catch what Edge has caught, count a body that read_json counts, keep files
open, and between a route and its endpoint look for parameters, dependencies and a model of the response: nothing that an
endpoint of ours has. All of it together takes longer than to read a chat's body, and a part of it each time a token is sent.
"""

import inspect
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send


class DirectRoute(APIRoute):
    """Calls its endpoint with the request, and sends what it returns. HEAD is a GET of which HTTP's server leaves the body out.

    What an endpoint raises goes to the application's handler of its class, as Starlette would do outside of all routes. But
    there it would have to look at every chunk that is sent, to know whether it is too late for an answer.
    """

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            request = Request(scope, receive, send)
            try:
                response = await endpoint(request)
            except Exception as error:
                handlers = scope["app"].exception_handlers
                handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)
                if handler is None:
                    raise
                response = handler(request, error)
                if inspect.isawaitable(response):
                    response = await response
                error.__traceback__ = None  # of an error that is raised again and again it would grow
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
    """All its routes are DirectRoutes. Its outermost middleware is the last resort for whatever is raised. A handler
    of exceptions that is a plain function must be quick: no thread runs it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.router.route_class = DirectRoute

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        await self.middleware_stack(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To the route of that very path, if there is one; else Starlette's router looks through them all."""
        route = self._exact.get((scope.get("method", ""), scope.get("path", "")))
        if route is None:
            await self._others(scope, receive, send)
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
        self._others = ExceptionMiddleware(self.router, handlers=self.exception_handlers)
        stack: ASGIApp = self._dispatch
        for middleware, args, kwargs in reversed(self.user_middleware):
            stack = middleware(stack, *args, **kwargs)
        return stack
