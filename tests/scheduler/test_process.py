"""The engine process: its socket, its death pipe, its status line."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.scheduler.factories import Clock, generate, hold_up_texts, make_engine, run
from tests.tiny import tiny_model
from trunkline.config import engine_config
from trunkline.messages import Call, Finished, Ready, Reply, decode_from_engine, encode
from trunkline.scheduler.process import StatusLine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[subprocess.Popen[bytes], "zmq.Socket[bytes]", Path]]:
    """A running engine process with the tiny model, a socket to it, and the socket's folder."""
    folder = tmp_path_factory.mktemp("engine")
    address = f"ipc://{folder}/engine.sock"
    config = engine_config(str(tiny_model(tmp_path_factory.mktemp("tiny"))), num_pages=64, threads=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "trunkline.scheduler.process"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode({"config": config, "socket": address}) + b"\n")
    process.stdin.flush()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(address)
        yield process, socket, folder
        process.kill()
        process.wait()
        process.stdin.close()


def receive(socket: "zmq.Socket[bytes]", kind: type) -> object:
    """The next message of a kind; others are passed over."""
    while True:
        for message in decode_from_engine(socket.recv()):
            if isinstance(message, kind):
                return message


@pytest.mark.slow
def test_a_life(parts: tuple[subprocess.Popen[bytes], "zmq.Socket[bytes]", Path]) -> None:
    process, socket, folder = parts
    socket.send(encode([Call(call_id=0, method="hello")]))
    ready = receive(socket, Ready)
    assert isinstance(ready, Ready) and ready.num_pages == 64

    socket.send(b"\x00 no list of messages")  # dropped, and nothing else happens
    socket.send(encode([generate("r", [1, 2, 3], max_tokens=4)]))
    finished = receive(socket, Finished)
    assert isinstance(finished, Finished) and finished.completion_tokens == 4

    socket.send(encode([Call(call_id=7, method="check")]))
    assert receive(socket, Reply) == Reply(call_id=7, result={"ok": True})

    assert process.stdin is not None
    process.stdin.close()  # the parent is gone
    assert process.wait(timeout=30) == 0
    assert not folder.exists()


def test_status_line_counts_busy_time_only(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    engine = make_engine()
    status = StatusLine(engine, 10.0, clock)
    caplog.set_level("INFO", logger="trunkline.engine")

    run(engine, generate("a", range(1, 21), max_tokens=10))
    clock.now = 9.0
    status.update()
    assert not caplog.messages, "too early"
    clock.now = 109.0
    status.skip(99.0)  # of 109 seconds it worked 10
    status.update()
    (line,) = caplog.messages
    assert "Running: 0 reqs, Waiting: 0 reqs" in line
    assert "prompt throughput: 2.0 tokens/s, generation throughput: 1.0 tokens/s" in line
    clock.now = 200.0
    status.update()
    assert len(caplog.messages) == 1, "nothing was done since"


@pytest.mark.parametrize(("target", "chunk", "told"), [(None, 64, 1), (None, 32, 0), (5.0, 64, 0)])
def test_status_line_tells_once_that_prompts_hold_up_texts(
    caplog: pytest.LogCaptureFixture, target: float | None, chunk: int, told: int
) -> None:
    """Unless a target was set, or the pieces of prompts are small."""
    hold_up_texts(0.75, max_num_batched_tokens=chunk + 1, target_token_seconds=target)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == told
    assert all("waited 0.8 s" in line and "--target-token-seconds" in line for line in warnings)


def test_status_line_tells_of_the_tiers(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    clock = Clock()
    engine = make_engine(host_slots=8, disk_cache_dir=tmp_path)
    status = StatusLine(engine, 10.0, clock)
    caplog.set_level("INFO", logger="trunkline.engine")
    for name in "ab":  # the second stores the four whole pages before the last token
        run(engine, generate(name, range(1, 18), max_tokens=1))
    clock.now = 10.0
    status.update()
    (line,) = caplog.messages
    assert "KV cache usage: 0.0%, host: 50.0%, disk: 0.0%, prefix cache hit rate: 47.1%" in line
    engine.close()
