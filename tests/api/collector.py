"""A small collector of traces: takes OTLP over HTTP as the real ones do, and keeps the spans.

with Collector() as collector:
    … serve with --otlp-endpoint collector.url …
    span = collector.wait(lambda span: span.attributes.get("trunkline.request_id") == "job-1")
"""

import gzip
import http.server
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.api.serving import PATIENCE


class Received(NamedTuple):
    """A span; ids are in hex, times in nanoseconds of Unix time."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """Listens from `open` to `close`; both can be done again and again, on the same port."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._port = 0
        self._changed = threading.Condition()
        self._server: http.server.ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                is_right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                self.send_response(200 if is_right else 404)
                self.send_header("content-length", "0")
                self.send_header("connection", "close")
                self.end_headers()
                if is_right:
                    collector._take(ExportTraceServiceRequest.FromString(body))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def wait(self, wanted: Callable[[Received], bool]) -> Received:
        """The first such span. Raises AssertionError, with what came instead, if none comes."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(wanted, self.spans)), PATIENCE), self.spans
            return next(filter(wanted, self.spans))

    def below(self, parent: Received) -> dict[str, Received]:
        """Its children, by name. They have been sent before it."""
        with self._changed:
            return {span.name: span for span in self.spans if span.parent_id == parent.span_id}

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for of_resource in request.resource_spans:
                for scope in of_resource.scope_spans:
                    self.spans += [_read(span, of_resource.resource) for span in scope.spans]
            self._changed.notify_all()


def _read(span: Any, resource: Any) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        status=span.status.code,
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
        resource={pair.key: _value(pair.value) for pair in resource.attributes},
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return MessageToDict(value) if kind == "kvlist_value" else getattr(value, kind)
