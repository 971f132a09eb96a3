"""drain.py, which lets requests end before a server is told to: against a real server, and against pages of every state."""

import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, Server, metrics, wait_idle
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow  # it starts a server

SCRIPT = Path(__file__).parents[2] / "deploy" / "drain.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("drain", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


drain = load()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model(tmp_path_factory.mktemp("drain") / "tiny", max_position_embeddings=8192)
    with Server(model, "--served-model-name", MODEL, "--kv-cache-memory", "16MiB") as server:
        yield server.wait_ready()


def test_an_idle_server_is_drained_at_once(server: Server) -> None:
    wait_idle(server.url)
    assert drain.main(server.url, 60, notice=0) == 0


def test_it_waits_for_requests_under_way(server: Server) -> None:
    """Until the stream has ended, and not for ever."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert drain.main(server.url, 0, notice=0) == 1
        assert metrics(server.url)[f'trunkline:num_requests_running{{model_name="{MODEL}"}}'] == 1
        waiting = threading.Thread(target=lambda: codes.append(drain.main(server.url, 60, notice=0)))
        codes: list[int] = []
        waiting.start()
    waiting.join(60)
    assert codes == [0]


READY = 'trunkline:engine_ready{model_name="m"} 1.0\n'


@pytest.mark.parametrize(
    ("page", "num"),
    [
        (
            READY
            + 'trunkline:num_requests_running{model_name="a{b}"} 2.0\ntrunkline:num_requests_waiting{model_name="m"} 1.0\n',
            3,
        ),
        (READY, 1),  # its engine has not answered in time: it is in a long step
        ('trunkline:engine_ready{model_name="m"} 0.0\n', 0),
    ],
)
def test_what_a_page_says(page: str, num: int) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as stub:
        answering = threading.Thread(target=stub.handle_request)
        answering.start()
        assert drain.num_requests(f"http://127.0.0.1:{stub.server_address[1]}") == num
        answering.join(60)


def test_a_server_that_breaks_off_is_not_drained() -> None:
    class Silent(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.close_connection = True

    with http.server.HTTPServer(("127.0.0.1", 0), Silent) as stub:
        answering = threading.Thread(target=stub.handle_request)
        answering.start()
        assert drain.num_requests(f"http://127.0.0.1:{stub.server_address[1]}") == 1
        answering.join(60)


def test_a_server_that_is_gone_is_drained() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as stub:
        gone = f"http://127.0.0.1:{stub.server_address[1]}"
    assert drain.num_requests(gone) == 0
