"""`trunkline grammar check` against a real server."""

import io
import json
import re
from pathlib import Path

import pytest

from tests.api.serving import Server
from trunkline.cli import main

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


def check(server: Server, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["grammar", "check", "--url", server.url, *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_schema_that_is_followed(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(PERSON))
    code, text = check(server, capsys, str(file))
    assert (code, text.startswith("Taken, by llguidance: compiled in ")) == (0, True), text
    assert re.search(r" ms, .*it has [\d.]+ [KMG]iB", text), text
    assert "\n  xgrammar: yes\n" in text
    code, text = check(server, capsys, str(file), "--backend", "outlines", "--json")
    assert (code, json.loads(text)["backend"]) == (0, "outlines")


def test_what_cannot_be_enforced(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(UNIQUE)))
    code, text = check(server, capsys, "-")
    assert (code, text.startswith("Refused: ")) == (1, True), text
    assert "  llguidance: no, at /: uniqueItems: " in text
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(UNIQUE)))
    code, text = check(server, capsys, "-", "--unsupported", "validate")
    assert (code, text.startswith("Taken, by ")) == (0, True), text
    assert "  left to the check of the finished text: no, at /: uniqueItems: " in text


def test_expressions_and_whole_requests(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert check(server, capsys, "--regex", "[0-9]{3}")[0] == 0
    assert check(server, capsys, "--regex", "(")[0] == 1
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"response_format": {"type": "json_object"}, "messages": []}))
    assert check(server, capsys, "--request", str(body))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give one of FILE, a JSON schema"),
        (["a.json", "--regex", "b"], "Give one of FILE, a JSON schema"),
        (["/no/such/file"], "can't be read as JSON"),
        (["--request", __file__], "can't be read as JSON"),
    ],
)
def test_mistakes(server: Server, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, text = check(server, capsys, *arguments)
    assert (code, words in text) == (1, True), text
