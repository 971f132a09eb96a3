"""`trunkline bench serve` against a real HTTP server on the loopback interface."""

import json
import socket

import pytest

from tests.bench.fake_server import WORDS, FakeServer
from tests.bench.test_texts import by_words
from trunkline.bench import cli
from trunkline.bench.runner import Run, Server
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import make_workloads

pytestmark = pytest.mark.slow  # together more than a second or two

TEXTS = Texts(by_words)


@pytest.fixture(autouse=True)
def _lengths_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "make_texts", lambda path: TEXTS)


async def run(server: FakeServer, name: str, variant: int = 0) -> Run:
    async with Server(server.url) as client:
        return await client.run(make_workloads(name, TEXTS, 0)[variant], await client.model())


async def test_every_request_is_sent_and_timed() -> None:
    with FakeServer() as server:
        result = await run(server, "W5")
    assert len(server.requests) == len(result.outcomes) == 16
    assert {body["model"] for _, body in server.requests} == {"fake"}
    for _, outcome in result.outcomes:
        assert outcome.error is None and outcome.finish_reason == "length"
        assert (
            outcome.text.startswith("one two three") and outcome.completion_tokens == 64 and outcome.cached_tokens == 16
        )
        assert outcome.first is not None and outcome.last is not None
        assert outcome.started < outcome.first <= outcome.last <= outcome.finished


async def test_as_many_at_a_time_as_the_workload_says() -> None:
    with FakeServer() as server:
        await run(server, "W1")
        assert server.most_at_once == 1
        await run(server, "W5")
        assert 1 < server.most_at_once <= 8


async def test_a_chat_goes_on_from_the_servers_own_answers() -> None:
    with FakeServer() as server:
        result = await run(server, "W3")
    bodies = [body["messages"] for _, body in server.requests]
    assert len(bodies) == len(result.outcomes) == 8 * 4
    longest = [messages for messages in bodies if len(messages) == 1 + 4 + 3]
    assert len(longest) == 8
    for messages in longest:
        assert [message["role"] for message in messages] == ["system", *("user", "assistant") * 3, "user"]
        assert messages[2]["content"].startswith("".join(WORDS))


async def test_refusals_are_failures_and_the_others_go_on() -> None:
    with FakeServer(refuses=lambda body: "no grammars\nhere" if "response_format" in body else None) as server:
        refused = await run(server, "W4", 0)
        served = await run(server, "W4", 1)
    assert {outcome.error for _, outcome in refused.outcomes} == {
        'HTTP 400: {"error": {"message": "no grammars\\nhere"}}'
    }
    assert {outcome.error for _, outcome in served.outcomes} == {None}


@pytest.mark.parametrize(
    ("how", "says"),
    [("cut", "without a finish_reason"), ("error", "the engine is gone"), ("no usage", "include_usage")],
)
async def test_streams_that_end_badly(how: str, says: str) -> None:
    with FakeServer(breaks=lambda body: how) as server:
        result = await run(server, "W1")
    assert [says in (outcome.error or "") for _, outcome in result.outcomes] == [True] * 3


async def test_a_chat_that_breaks_stops_there() -> None:
    with FakeServer(breaks=lambda body: "cut" if len(body["messages"]) > 2 else None) as server:
        result = await run(server, "W3")
    assert len(result.outcomes) == 8 * 2


def test_command_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "numbers.json"
    with FakeServer(answer='{"title": 1}') as server:
        code = cli.main(
            [
                *(
                    "--base-url",
                    server.url + "/v1/",
                    "--api-key",
                    "secret",
                    "--workload",
                    "W1,w4",
                    "--output",
                    str(output),
                )
            ]
        )
    assert code == 0
    assert set(server.authorizations) == {"Bearer secret"}
    assert len(server.requests) == 3 + 16 + 16 + 3  # one warm-up each
    numbers = json.loads(output.read_text())
    assert "secret" not in output.read_text()
    assert numbers["server"] == {"base_url": server.url + "/v1/", "model": "fake", "version": "1.2.3"}
    assert [one["workload"] for one in numbers["workloads"]] == ["W1", "W4", "W4u"]
    assert numbers["workloads"][1]["valid_json"] == 16
    assert len(numbers["workloads"][0]["requests_detail"]) == 3
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 5 and "json 16/16" in printed.out


def test_failures_are_told_and_nothing_served_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(refuses=lambda body: "busy") as server:
        assert cli.main(["--base-url", server.url, "--workload", "W1"]) == 1
    assert 'W1: 3 of 3 failed, the first with: HTTP 400: {"error": {"message": "busy"}}' in capsys.readouterr().out


def test_prompts_that_were_not_cold_are_told() -> None:
    cold = {"workload": "W5", "failures": 0, "cached_tokens": 100, "prompt_tokens": 8192}
    assert cli.remarks([cold]) == []
    assert "another --seed" in cli.remarks([{**cold, "cached_tokens": 8000}])[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workload", "W9"], "--workload is 'W9'; allowed are W1,"),
        (["--num-warmups", "-1"], "--num-warmups is -1"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--output", "/no/such/folder/x.json"], "does not exist"),
        (["--output", "/"], "which is a folder; name a file in it"),
    ],
)
def test_flags_are_checked_before_anything_runs(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(flags) == 1
    assert says in capsys.readouterr().err


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: a connection is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main(["--base-url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trunkline: error: GET ") and error.count("\n") == 1


def test_all_is_everything_but_the_crowd() -> None:
    assert cli.selected(["all"]) == ("W1", "W2", "W3", "W4", "W5")
    assert cli.selected(["W6", "W1", "W6"]) == ("W6", "W1")


def test_key_that_is_missing_or_wrong_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRUNKLINE_API_KEY", raising=False)
    give = "give the right one with --api-key KEY or $TRUNKLINE_API_KEY."
    with FakeServer(key="secret") as server:
        arguments = ["--base-url", server.url + "/v1", "--workload", "W1"]
        assert cli.main(arguments) == 1
        assert capsys.readouterr().err == f"trunkline: error: The server at {server.url} wants an API key; {give}\n"
        assert cli.main([*arguments, "--api-key", "guess"]) == 1
        assert f"The server at {server.url} refuses this API key; {give}" in capsys.readouterr().err
        assert cli.main([*arguments, "--model", "m"]) == 1, "where the list of models is never asked for"
        assert f"The server wants an API key; {give}" in capsys.readouterr().out
        monkeypatch.setenv("TRUNKLINE_API_KEY", "secret")
        assert cli.main(arguments) == 0


def test_help_names_the_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for flag in ("--api-key KEY", "--seed N", "--num-warmups N", "--base-url URL", "--model NAME"):
        assert flag in text
