"""The dashboard's page at / and the files it loads from /dashboard/. Knows nothing of what they show.

They are the same for everybody, hold no data and need no key; what they show comes from /v1, and does. Nothing is loaded
from any other host: the content security policy makes browsers see to it.
"""

from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import trunkline
from trunkline.api.errors import json_response

FOLDER = Path(__file__).resolve().parent / "dashboard"
PAGE = "index.html"
HEADERS = {
    # Nothing inline either: no text that a model wrote can become a script, whatever becomes of it in the page.
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304 by its ETag
}


class DashboardFiles(StaticFiles):
    """The folder, with HEADERS on everything."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def add_dashboard(app: FastAPI) -> None:
    """Serve it from `app`."""
    files = DashboardFiles()

    async def root(request: Request) -> Response:
        """The page for a browser; for whoever does not ask for HTML, where everything is."""
        if "text/html" not in request.headers.get("accept", ""):
            where = {"api": "/v1", "docs": "/docs", "metrics": "/metrics", "dashboard": "/"}
            response = json_response({"name": "Trunkline", "version": trunkline.__version__, **where})
        else:
            response = await files.get_response(PAGE, request.scope)
        response.headers["vary"] = "Accept"
        return response

    async def moved(request: Request) -> Response:
        """To the page, from where people look for it. Relative, as in the page itself: a proxy may have put a path before ours."""
        sent = request.scope.get("raw_path", b"")  # the path proper has no last slash any more
        return RedirectResponse("../" if sent.endswith(b"/") else "./", status_code=308)

    for path, answer in (("/", root), ("/dashboard", moved)):
        app.add_api_route(path, answer, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    app.mount("/dashboard", files, name="dashboard")
