"""A hub like Hugging Face's, on this machine: what its HTTP API answers to somebody who downloads a model.

    with Hub() as hub:
        hub.add("org/tiny", {"config.json": b"{}"}, gated=True)
        ...                        # with hub.url as $HF_ENDPOINT
        hub.requests               # ["GET /api/models/org/tiny/revision/main", …]

Files are cut off (`cut`) or refused (`broken`) once each, or never end (`held`).
"""

import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

TOKEN = "hf_right"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False  # its list of files is open, but not the files
    private: bool = False  # shown with TOKEN only
    revisions: dict[str, str] = field(default_factory=dict)  # branches and tags -> commit


class Hub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []  # method, path, and the range that is asked for
        self.cut: set[str] = set()  # files of which the connection breaks in the middle
        self.broken: set[str] = set()  # files that are answered with 500
        self.status: int | None = None  # of everything; 200: a page that says nothing
        self.held: set[str] = set()  # files of which the second half never comes
        self.is_held = threading.Event()  # the first half of such a file has been sent
        hub = self

        class Handler(_Handler):
            """Of this hub."""

            def do_GET(self) -> None:
                self.serve(hub)

            do_HEAD = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Nobody answers any more. Idempotent."""
        self._server.shutdown()
        self._server.server_close()

    def add(self, name: str, files: Mapping[str, bytes] | Path, **settings: Any) -> Repository:
        """A repository of these files, or of those in a folder."""
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()
            }
        repository = Repository(dict(files), **settings)
        repository.revisions.setdefault("main", repository.commit)
        self.repositories[name] = repository
        return repository

    def downloads(self) -> list[str]:
        """Files that were asked for, with the range."""
        return [request.partition("/resolve/")[2][41:] for request in self.requests if request.startswith("GET /org/")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def serve(self, hub: Hub) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        asked = self.headers.get("range")
        hub.requests.append(f"{self.command} {path}" + (f" {asked}" if asked else ""))
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if hub.status is not None:
            return self.answer(hub.status, b"<html></html>")
        if token and token != TOKEN:
            return self.answer(401, X_Error_Message="Invalid credentials in Authorization header")
        match = re.fullmatch(
            r"(?:/api/models)?/(?P<name>\w+/[\w.-]+)/(?P<what>revision|tree|resolve)/(?P<rest>.+)", path
        )
        repository = hub.repositories.get(match["name"]) if match else None
        if match is None or repository is None or (repository.private and not token):
            return self.answer(401, X_Error_Code="RepoNotFound")
        known = {commit: commit for commit in repository.revisions.values()} | repository.revisions
        revision = match["rest"] if match["what"] == "revision" else match["rest"].partition("/")[0]
        if revision not in known:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        if match["what"] == "resolve":
            if repository.gated and not token:
                return self.answer(401, X_Error_Code="GatedRepo")
            return self.file(hub, repository, match["rest"].partition("/")[2], known[revision])
        files = [
            {"rfilename": name, "path": name, "type": "file", "size": len(content), "oid": _etag(content)}
            for name, content in repository.files.items()
        ]
        info = {"id": match["name"], "sha": known[revision], "siblings": files, "gated": repository.gated}
        return self.answer(200, json.dumps(info if match["what"] == "revision" else files).encode())

    def file(self, hub: Hub, repository: Repository, name: str, commit: str) -> None:
        content = repository.files.get(name)
        headers = {"X_Repo_Commit": commit}
        if content is None:
            return self.answer(404, b"", X_Error_Code="EntryNotFound", **headers)
        headers |= {"ETag": f'"{_etag(content)}"', "Accept_Ranges": "bytes"}
        if self.command == "GET" and name in hub.broken:
            hub.broken.remove(name)
            return self.answer(500)
        if self.command == "GET" and name in hub.cut:
            hub.cut.remove(name)
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return None
        if self.command == "GET" and name in hub.held:
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            hub.is_held.set()
            self.rfile.read()  # until the client is gone
            return None
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range") or ""):
            start = int(asked[1])
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self.answer(206, content[start:], **headers)
        return self.answer(200, content, **headers)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
