"""Traces of requests in OpenTelemetry's protocol: a span for each, and below it one for each of its stages.

    chat SmolLM2                      the request: from its arrival to the last byte of its answer
    ├── prepare                       reading the body and the grammar, the chat template, the tokenizer
    ├── queued                        until the engine takes it in hand
    ├── compile grammar               if that was not known yet
    ├── prefill                       until its first token
    └── decode                        until its last one

Of a request without a token, such as an embedding, or one that was given up before its first, there is one stage `engine`.

    tracing = Tracing.of(config)                     # None without --otlp-endpoint: nothing is imported, nothing costs
    span = tracing.begin(headers, record)                       # joins the trace that `traceparent` names
    tracing.end(span, record, method="POST", route="/v1/…")     # after the answer; everything is known by now
    tracing.close(seconds=2)

Spans wait in a bounded queue for a thread that sends them. A collector that is slow or gone loses spans; it never holds up or
fails a request. Nothing is done per token. Holds numbers and names, never a word of a prompt or an answer.

https://opentelemetry.io/docs/specs/semconv/gen-ai/ has the names that begin with gen_ai.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from trunkline import __version__
from trunkline.api.request_log import LoggedRequest, Record
from trunkline.config import ApiConfig
from trunkline.errors import ConfigError, shown, without_passwords

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span

logger = logging.getLogger("trunkline.api")

TRACES_PATH = "/v1/traces"  # of a collector, by the protocol
FLUSH_SECONDS = 2.0  # at the end, for what still waits
# What a route does, in the words of gen_ai.operation.name; of others it is the last part of their path.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
# Loggers of the library whose lines OneLine replaces.
_TALKATIVE = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")


class Stage(NamedTuple):
    """A part of a request's life; times are those of time.perf_counter."""

    name: str
    start: float
    end: float


class Tracing:
    """Makes spans, and sends them.

    exporter    where they go
    model_name  of the model that every span names. What else is said about this server, $OTEL_SERVICE_NAME and
                $OTEL_RESOURCE_ATTRIBUTES say
    """

    def __init__(self, exporter: "SpanExporter", *, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "trunkline"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("trunkline", __version__)

    @classmethod
    def of(cls, config: ApiConfig) -> "Tracing | None":
        """Raises ConfigError if the endpoint is none, or the packages are not there."""
        if config.otlp_endpoint is None:
            return None
        url = traces_url(config.otlp_endpoint)
        try:
            import opentelemetry.sdk.trace.export  # noqa: F401
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(
                f"--otlp-endpoint needs OpenTelemetry's packages, and {error.name} is not there; install them by"
                " pip install 'trunkline[otel]', or leave the flag out."
            ) from None
        return cls(
            one_line(OTLPSpanExporter(endpoint=url), without_passwords(url)), model_name=config.served_model_names[0]
        )

    def begin(self, headers: Mapping[str, str], record: Record) -> "Span":
        """A request arrives. Its span belongs to the trace of the header `traceparent`, which also says whether it is recorded."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(headers)
        return self._tracer.start_span("request", context=context, kind=SpanKind.SERVER, start_time=record.arrived_ns)

    def end(self, span: "Span", record: Record, *, method: str, route: str) -> None:
        """It is answered: say what it was, and what became of it. route: the path it came to; "": none of ours."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        if not span.is_recording():
            return
        span.set_attributes({"http.request.method": method, "trunkline.request_id": record.request_id})
        if route:
            span.set_attribute("http.route", route)
        if record.status is not None:
            span.set_attribute("http.response.status_code", record.status)
        if record.failure is not None:
            span.set_attribute("error.type", record.failure)
            if record.status is None or not 400 <= record.status < 500:  # not the client's doing; 200: a stream's end
                span.set_status(StatusCode.ERROR)
        generated = record.generated
        if generated is None or generated.line is None:
            span.update_name(f"{method} {route}".strip())
        else:
            operation = OPERATIONS.get(route) or route.rpartition("/")[2]
            span.update_name(f"{operation} {self._model_name}")
            span.set_attributes({"gen_ai.operation.name": operation, **self._attributes(generated, generated.line)})
            below = set_span_in_context(span)
            for stage in stages(record.arrived, generated):
                child = self._tracer.start_span(stage.name, context=below, start_time=_wall(record, stage.start))
                child.end(_wall(record, stage.end))
        span.end()

    def _attributes(self, generated: LoggedRequest, line: Mapping[str, Any]) -> dict[str, Any]:
        """Only those that are there: OpenTelemetry knows no null."""
        found: dict[str, Any] = {
            "gen_ai.provider.name": "trunkline",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": generated.answer_id,
            "gen_ai.response.finish_reasons": sorted(line["finish_reasons"]),
            "gen_ai.response.time_to_first_chunk": line["ttft_seconds"],
            "gen_ai.usage.input_tokens": line["prompt_tokens"],
            "gen_ai.usage.output_tokens": line["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": line["cached_tokens"],
            "trunkline.cached_tokens": line["cached_tokens"],
            "trunkline.cache_reasons": sorted(line["cache_reasons"]),
            "trunkline.tenant": line["tenant"] or None,
        }
        if (sampling := generated.sampling) is not None:
            found |= {
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.request.choice.count": sampling.n if sampling.n != 1 else None,
            }
        return {name: value for name, value in found.items() if value is not None}

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send what waits, within so many seconds."""
        flushing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        flushing.start()
        flushing.join(seconds)


def traces_url(endpoint: str) -> str:
    """Where traces are sent: a collector's address, with the path that the protocol gives them if it has none.

    traces_url("http://collector:4318")     # "http://collector:4318/v1/traces"

    Raises ConfigError for what is no URL of HTTP.
    """
    try:
        parts = urlsplit(endpoint)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_one = False
    if not is_one:
        raise ConfigError(
            f"--otlp-endpoint is {shown(without_passwords(endpoint))}; allowed is the URL of a collector that takes OTLP over HTTP, such as"
            " http://localhost:4318. (Port 4317 is usually that of gRPC, which is not spoken here.)"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


def stages(arrived: float, generated: LoggedRequest) -> Iterator[Stage]:
    """Those of a request's stages that it came to; of several choices, those of the one that was first."""
    opened, closed = generated.opened_at, generated.closed_at
    if opened is None or closed is None:
        return
    yield Stage("prepare", arrived, opened)
    if generated.queue_seconds is None or generated.prefill_seconds is None:
        yield Stage("engine", opened, closed)
        return
    admitted = min(opened + generated.queue_seconds, closed)
    began = min(admitted + generated.prefill_seconds, closed)
    yield Stage("queued", opened, admitted)
    if generated.grammar_seconds is not None:
        yield Stage("compile grammar", opened, min(opened + generated.grammar_seconds, closed))
    yield Stage("prefill", admitted, began)
    yield Stage("decode", began, closed)


def _wall(record: Record, moment: float) -> int:
    return record.arrived_ns + round(1e9 * (moment - record.arrived))


class _LastLine(logging.Filter):
    """Keeps what the library would have logged, and lets nothing through."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.text = record.getMessage()
        return False


# One for all: loggers are the process's, and ask no filter behind one that lets nothing through.
_last_line = _LastLine()


def one_line(exporter: "SpanExporter", url: str) -> "SpanExporter":
    """The same exporter, of which the log has one line when it begins to fail, and one when it succeeds again.

    url  what the log calls its collector
    """
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    for name in _TALKATIVE:
        logging.getLogger(name).addFilter(_last_line)

    class OneLine(SpanExporter):
        num_lost = 0  # spans, since it failed

        def export(self, spans: "Sequence[ReadableSpan]") -> "SpanExportResult":
            result = exporter.export(spans)
            if result is SpanExportResult.SUCCESS:
                if self.num_lost:
                    logger.info("Traces can be sent to %s again; %d spans were lost.", url, self.num_lost)
                self.num_lost = 0
            else:
                if not self.num_lost:
                    logger.warning("Traces cannot be sent to %s, and are lost until they can: %s", url, _last_line.text)
                self.num_lost += len(spans)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return OneLine()
