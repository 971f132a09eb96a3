"""`trunkline serve --tensor-parallel-size 2`: real processes over real sockets, and what becomes of them."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.api.serving import CONTEXT, MODEL, PATIENCE, Server, children, sse_events
from tests.api.test_launch import serve_fails, wait_gone

FLAGS = ("--tensor-parallel-size", "2", "--served-model-name", MODEL, "--dtype", "float32")
SHORT = {"model": MODEL, "prompt": "hello world", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
ENDLESS = {**SHORT, "max_tokens": CONTEXT - 100, "stream": True}


def text_of(server: Server) -> str:
    answer = httpx.post(server.url + "/v1/completions", json=SHORT, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.slow
def test_a_lost_rank_ends_requests_and_the_group_is_started_again(tiny: Path) -> None:
    with Server(tiny, "--served-model-name", MODEL, "--dtype", "float32") as server:
        expected = text_of(server.wait_ready())
    with Server(tiny, *FLAGS) as server:
        server.wait_ready()
        assert "on 2 × cpu (1 thread" in server.output
        assert text_of(server) == expected
        with httpx.stream("POST", server.url + "/v1/completions", json=ENDLESS, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            assert next(lines) and next(lines) == ""  # the first event
            (rank,) = children(server.engine_pid())
            os.kill(rank, signal.SIGKILL)
            events = sse_events("\n".join(lines) + "\n\n")
        assert "engine_dead" in events[-1]
        server.wait_for(rf"Rank 1 of 2 \(process {rank}\) has ended, by signal SIGKILL.*The engine process ends\.")
        server.wait_for(r"(?s)The engine process ended \(exit code 3\)\. It is started again\..*Ready: ")
        assert text_of(server) == expected

        engine = server.engine_pid()
        (rank,) = children(engine)
        pidfds = [os.pidfd_open(pid) for pid in (engine, rank)]
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit() == 0
        assert all(map(wait_gone, pidfds))
        assert "Traceback" not in server.output and server.output.endswith("\nStopped.\n")


@pytest.mark.slow
def test_an_idle_server_notices_too_and_no_rank_outlives_the_engine(tiny: Path) -> None:
    with Server(tiny, *FLAGS) as server:
        server.wait_ready()
        (rank,) = children(server.engine_pid())
        os.kill(rank, signal.SIGKILL)
        server.wait_for(r"It is started again\.")
        health = httpx.get(server.url + "/health")
        assert (health.status_code, health.json()["status"]) == (503, "restarting")
        server.wait_for(r"(?s)It is started again\..*Ready: ")
        engine = server.engine_pid()
        (rank,) = children(engine)
        pidfd = os.pidfd_open(rank)
        os.kill(engine, signal.SIGKILL)
        assert wait_gone(pidfd)
        assert server.wait_exit() == 1
        assert "The engine process ended (signal SIGKILL). The server stops." in server.output


@pytest.mark.slow
def test_what_does_not_divide_is_one_sentence(tiny: Path) -> None:
    assert "--tensor-parallel-size is 3, but 4 query heads" in serve_fails(str(tiny), "--tensor-parallel-size", "3")
