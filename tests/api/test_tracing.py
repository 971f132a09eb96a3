"""Traces: what a real collector gets from a real server, and that nobody is hurt when it is gone."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.api.collector import Collector, Received
from tests.api.serving import MODEL, Server
from trunkline.api.request_log import Record
from trunkline.api.tracing import Tracing, traces_url
from trunkline.cli import make_parser
from trunkline.cli_serve import serve_config
from trunkline.config import ApiConfig
from trunkline.errors import ConfigError

pytestmark = pytest.mark.slow  # it starts a server

SERVER_KIND, OK, ERROR = 2, 0, 2  # of OTLP
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # of the W3C's own example
CANARY = "CANARYword"
BODY = {"model": MODEL, "prompt": f"{CANARY} and so on, as long as it takes", "max_tokens": 6, "ignore_eos": True}


class Traced(NamedTuple):
    """A server and the collector it sends to."""

    server: Server
    http: httpx.Client
    collector: Collector

    def post(self, name: str, path: str, body: dict[str, Any], **headers: str) -> Received:
        """The span of a request that is called `name`."""
        self.http.post(path, json=body, headers={"x-request-id": name, **headers})
        return self.collector.wait(lambda span: span.attributes.get("trunkline.request_id") == name)


@pytest.fixture(scope="module")
def traced(tiny: Path) -> Iterator[Traced]:
    with pytest.MonkeyPatch.context() as patch, Collector() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
        flags = ["--served-model-name", MODEL, "--kv-cache-memory", "16MiB", "--otlp-endpoint", collector.url]
        with Server(tiny, *flags) as server:
            server.wait_ready()
            with httpx.Client(base_url=server.url, timeout=60) as http:
                yield Traced(server, http, collector)


def test_a_request_and_its_stages(traced: Traced) -> None:
    traced.post("warm-up", "/v1/completions", BODY)
    span = traced.post("job-1", "/v1/completions", {**BODY, "temperature": 0.5, "top_p": 0.9, "seed": 7, "n": 2})
    assert (span.name, span.kind, span.status, span.parent_id) == ("text_completion tiny", SERVER_KIND, OK, "")
    assert span.resource["service.name"] == "trunkline"
    found = span.attributes
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found.pop("gen_ai.response.id").startswith("cmpl-")
    cached = found.pop("trunkline.cached_tokens")
    assert 0 < cached == found.pop("gen_ai.usage.cache_read.input_tokens") < found.pop("gen_ai.usage.input_tokens")
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "trunkline.request_id": "job-1",
        "trunkline.cache_reasons": ["complete"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trunkline",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.output_tokens": 12,
    }
    below = traced.collector.below(span)
    assert below.keys() == {"prepare", "queued", "prefill", "decode"}
    assert all(child.trace_id == span.trace_id for child in below.values())
    prepare, queued, prefill, decode = (below[name] for name in ("prepare", "queued", "prefill", "decode"))
    assert span.start == prepare.start <= prepare.end == queued.start <= queued.end == prefill.start
    assert prefill.start <= prefill.end == decode.start <= decode.end <= span.end  # of a clock that may stand still


def test_a_grammar_that_was_not_known_is_a_stage(traced: Traced) -> None:
    schema = {"type": "object", "properties": {"b": {"enum": [1, 2]}}, "required": ["b"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {**BODY, "max_tokens": 32, "ignore_eos": False, "response_format": wanted}
    first = traced.collector.below(traced.post("grammar-1", "/v1/completions", body))
    assert first["queued"].start == first["compile grammar"].start < first["compile grammar"].end
    second = traced.collector.below(traced.post("grammar-2", "/v1/completions", body))
    assert "compile grammar" not in second


def test_a_request_without_a_token_has_one_stage_in_the_engine(traced: Traced) -> None:
    span = traced.post("embedded", "/v1/embeddings", {"model": MODEL, "input": CANARY})
    assert (span.name, span.attributes["gen_ai.usage.output_tokens"]) == ("embeddings tiny", 0)
    assert traced.collector.below(span).keys() == {"prepare", "engine"}


def test_the_trace_of_the_caller_goes_on(traced: Traced) -> None:
    span = traced.post("child", "/v1/completions", BODY, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    chat = {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 2}
    assert traced.post("chat", "/v1/chat/completions", chat, traceparent="nonsense").name == "chat tiny"
    # Of a trace that its caller does not record nothing is sent: the one after it comes alone.
    traced.http.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"})
    traced.post("after", "/v1/completions", BODY)
    assert TRACE[::-1] not in {span.trace_id for span in traced.collector.spans}


def test_refused_and_streamed(traced: Traced) -> None:
    refused = traced.post("refused", "/v1/completions", {**BODY, "max_tokens": "many"})
    assert (refused.name, refused.status) == ("POST /v1/completions", OK), "the caller's mistake, not the server's"
    assert (refused.attributes["http.response.status_code"], refused.attributes["error.type"]) == (400, "400")
    assert not traced.collector.below(refused)
    streamed = traced.post("streamed", "/v1/completions", {**BODY, "stream": True})
    assert streamed.attributes["gen_ai.usage.output_tokens"] == 6
    cancelled = {**BODY, "stream": True, "max_tokens": 8000}
    with traced.http.stream("POST", "/v1/completions", json=cancelled, headers={"x-request-id": "cut"}) as answer:
        lines = answer.iter_lines()  # a name of its own: the connection is closed with it
        next(lines)
        assert traced.http.post("/v1/requests/cut/cancel").status_code == 200
    cut = traced.collector.wait(lambda span: span.attributes.get("trunkline.request_id") == "cut")
    assert (cut.status, cut.attributes["error.type"]) == (ERROR, "request_cancelled")


def test_a_collector_that_is_gone_is_one_line_and_hurts_nobody(traced: Traced) -> None:
    traced.collector.close()
    try:
        for number in range(20):
            answer = traced.http.post("/v1/completions", json=BODY, headers={"x-request-id": f"lost-{number}"})
            assert answer.status_code == 200
        traced.server.wait_for(
            r"Traces cannot be sent to http://127\.0\.0\.1:\d+/v1/traces, and are lost until they can: .+\n"
        )
    finally:
        traced.collector.open()
    traced.http.post("/v1/completions", json=BODY)
    traced.server.wait_for(r"Traces can be sent to \S+ again; \d+ spans were lost\.\n")
    assert len(re.findall("Traces cannot be sent", traced.server.output)) == 1
    assert "Transient" not in traced.server.output, "the library's own lines are left out"
    traced.post("again", "/v1/completions", BODY)


def test_no_word_of_a_prompt_is_sent(traced: Traced) -> None:
    assert traced.collector.spans
    assert CANARY not in str(traced.collector.spans)


# ---------------------------------------------------------------- the flag


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://[::1]:4318/otlp/v1/traces", "http://[::1]:4318/otlp/v1/traces"),
    ],
)
def test_where_traces_go(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "http://[::1", "http://a:b", ""]
)
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint is .*; allowed is the URL"):
        traces_url(endpoint)


def test_a_password_of_the_collector_stays_out_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as refused:
        traces_url("ftp://me:canary@collector")
    assert "canary" not in str(refused.value) and "collector" in str(refused.value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    with Collector() as collector:
        gone = collector.url.replace("//", "//me:canary@")
    tracing = Tracing.of(ApiConfig(served_model_names=("m",), otlp_endpoint=gone))
    assert tracing is not None
    record = Record("req_1")
    tracing.end(tracing.begin({}, record), record, method="POST", route="/v1/completions")
    tracing.close(seconds=60)
    assert "Traces cannot be sent to http://…@127.0.0.1:" in caplog.text
    assert "canary" not in caplog.text


def test_without_the_packages_it_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tracing.of(ApiConfig(served_model_names=("m",))) is None
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'trunkline\[otel\]'"):
        Tracing.of(ApiConfig(served_model_names=("m",), otlp_endpoint="http://localhost:4318"))


def test_closing_does_not_wait_for_a_collector_that_never_answers() -> None:
    """What it holds up is a thread of its own; here the closing is what lets it go."""
    held, released = threading.Event(), threading.Event()

    class Stuck(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            held.set()
            released.wait()
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            pass

    tracing = Tracing(Stuck(), model_name="m")
    record = Record("req_1")
    tracing.end(tracing.begin({}, record), record, method="POST", route="/v1/completions")
    tracing.close(seconds=0.01)
    assert held.wait(60)
    released.set()


def test_both_names_of_the_flag() -> None:
    for flag in ("--otlp-endpoint", "--otlp-traces-endpoint"):
        config = serve_config(make_parser().parse(["serve", "m", flag, "http://localhost:4318"]))
        assert config.api.otlp_endpoint == "http://localhost:4318"


def test_without_the_flag_the_library_is_not_imported() -> None:
    code = "import sys, trunkline.api.app, trunkline.api.launch; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
