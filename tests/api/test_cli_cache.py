"""`trunkline cache`: what it draws, and what it says of a real server."""

import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.serving import MODEL, Server
from trunkline.cli import main
from trunkline.cli_cache import printable, tree_lines

SYSTEM = "A command line looks into the cache of this one."


def node(text: str, *children: dict[str, Any], left_out: int = 0, **fields: Any) -> dict[str, Any]:
    plain = {
        "num_tokens": 16,
        "hits": 0,
        "tokens_saved": 0,
        "last_use_seconds_ago": 3.9,
        "tier": "device",
        "copies": [],
        "pinned": False,
        "references": 0,
    }
    return {**plain, "text": text, "children": list(children), "left_out": left_out, **fields}


DRAWN = """\
tokens  hits   saved  last used  tier                    prefix
 1,024    99  10,137        3 s  device, pinned, in use  ├─ You answer.⏎…
    16     0       0        3 s  device                  │  ├─ Hello
    16     0       0      3 min  device                  │  │  └─ world
                                                         │  └─ and 2 more
    16     0       0        2 h  device                  └─ other"""


def test_drawing() -> None:
    best = {"num_tokens": 1024, "hits": 99, "tokens_saved": 10137, "pinned": True, "references": 1}
    hello = node("Hello", node("world", last_use_seconds_ago=200))
    root = node("", node("You answer.\n…", hello, left_out=2, **best), node("other", last_use_seconds_ago=7201))
    assert "\n".join(tree_lines(root, width=200)) == DRAWN
    narrow = tree_lines(root, width=62)
    assert max(map(len, narrow)) == 62
    assert narrow[1].endswith("├─ Y…")


def test_prompts_move_no_cursor() -> None:
    assert printable("a\x1b[2J\r\nb\t☃ \u202e") == "a\\x1b[2J\\r⏎b\\t☃ \\u202e"


def run(capsys: pytest.CaptureFixture[str], server: Server, *arguments: str) -> str:
    assert main(["cache", *arguments, "--url", server.url]) == 0
    return capsys.readouterr().out


@pytest.fixture
def read_prompt(http: httpx.Client) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
    http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 1}).raise_for_status()


@pytest.mark.usefixtures("read_prompt")
def test_tree_of_a_server(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    out = run(capsys, server, "tree", "--limit", "1000")
    assert out.splitlines()[0].split() == ["tokens", "hits", "saved", "last", "used", "tier", "prefix"]
    assert "A command line looks into the cache" in out
    assert "This memory (" in out
    told = json.loads(run(capsys, server, "tree", "--limit", "1", "--json"))
    assert sum(len(namespace["children"]) for namespace in told["namespaces"]) == 1


@pytest.mark.usefixtures("read_prompt")
def test_explanation_of_a_server(
    capsys: pytest.CaptureFixture[str], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = run(capsys, server, "explain", "hello", "--system", SYSTEM)
    assert "which is all that can be" in same
    other = run(capsys, server, "explain", "--system", SYSTEM.replace("one", "two"), "hello")
    assert "at character 43 of messages[0] (system), it has ' one." in other
    body = json.dumps({"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]})
    (tmp_path / "body.json").write_text(body)
    assert run(capsys, server, "explain", "--request", str(tmp_path / "body.json")) == same
    monkeypatch.setattr("sys.stdin", io.StringIO(body))
    assert json.loads(run(capsys, server, "explain", "--request", "-", "--json"))["sentence"] + "\n" == same
    assert "None of the 22 prompt tokens" in run(capsys, server, "explain", "--raw", "zebras of one prompt alone")


def test_queue_of_a_server(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    assert run(capsys, server, "queue") == "Nobody runs, and nobody waits.\n"


def test_queue_in_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    request = {
        "request_id": "r1",
        "tenant": "5f2c41d0ffff",
        "seconds": 1.26,
        "prompt_tokens": 2000,
        "cached_tokens": 48,
    }
    queue = {
        "running": [
            {**request, "prompt_tokens_computed": 2000, "generated_tokens": 7},
            {**request, "prompt_tokens_computed": 512, "generated_tokens": 0},
        ],
        "waiting": [{**request, "request_id": "r22", "tenant": "", "why": "all places are taken"}],
    }
    monkeypatch.setattr("trunkline.cli_client.ApiClient.fetch", lambda *_: queue)
    assert main(["cache", "queue"]) == 0
    assert capsys.readouterr().out == (
        "request  tenant    seconds  prompt  cached  state\n"
        "r1       5f2c41d0      1.3   2,000      48  runs: 7 tokens generated\n"
        "r1       5f2c41d0      1.3   2,000      48  runs: 512 tokens of its prompt read\n"
        "r22      -             1.3   2,000      48  waits: all places are taken\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explain"], "Give either TEXT or --request FILE."),
        (["explain", "hi", "--request", "x"], "Give either TEXT or --request FILE."),
        (["explain", "--raw", "hi", "--system", "s"], "leave one of them out"),
        (["explain", "--request", "/no/such/file"], "--request is '/no/such/file', which can't be read as JSON: "),
        (["tree", "--depth", "0"], "'depth' is '0'; allowed is an integer from 1 to 64."),
        (["tree", "--tenant", "acme"], "There is no tenant 'acme'."),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], server: Server, arguments: list[str], says: str) -> None:
    assert main(["cache", *arguments, "--url", server.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "tree", "--url", "http://127.0.0.1:9"]) == 1
    assert "No server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err
