"""The files of a batch: what can be read, what is kept, and in which order."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.batches import Write, line, rows, write_lines
from trunkline.batch_files import OutputFailed, Request, Result, Results, read_requests
from trunkline.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return functools.partial(write_lines, tmp_path)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "Line 2 is not JSON: "),
        ("[" * 100_000, "Line 2 is not JSON: it is nested too deeply."),
        ("[1]", "Line 2 is [1]; allowed is a JSON object."),
        ({"method": "POST"}, "Line 2: custom_id is null; allowed is a text."),
        ({**line("b"), "custom_id": 7}, "Line 2: custom_id is 7"),
        ({**line("b"), "method": "GET"}, "Line 2: method is 'GET'; allowed is 'POST'."),
        ({**line("b"), "url": "/v1/images"}, "Line 2: url is '/v1/images'; allowed is one of /v1/chat/completions, "),
        ({**line("b"), "body": "x"}, "Line 2: body is 'x'; allowed is a JSON object."),
        (line("b", stream=True, prompt="x"), "Line 2: stream is true; in a batch answers come whole"),
    ],
)
def test_a_line_that_is_no_request_says_why(write: Write, bad: Any, words: str) -> None:
    good, refused, last = read_requests(write(line("a"), bad, "", line("c")))
    assert (good.problem, last.problem, last.line) == (None, None, 4)
    assert refused.problem is not None and words in refused.problem, refused.problem
    assert refused.key in (2, "b")


def test_what_no_batch_can_be_made_of(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lines 1 and 3 have the same custom_id, 'a'; give each its own"):
        read_requests(write(line("a"), line("b"), line("a")))
    with pytest.raises(ConfigError, match="holds no request"):
        read_requests(write("", "  "))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_requests(tmp_path / "none.jsonl")


REQUESTS = [Request(number, name, "/v1/completions", {}) for number, name in enumerate("abc", start=1)]


def test_results_come_in_the_order_of_requests_whenever_they_came(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, REQUESTS) as results:
        for at in (2, 0):
            results.add(REQUESTS[at], Result(200, f"r{at}", {"text": "é\ud800"}))
    with Results(path, REQUESTS) as results:
        assert [request.custom_id for request in results.missing()] == ["b"]
        results.add(REQUESTS[1], Result(error={"code": "no_answer", "message": "m", "line": 2}))
        results.finish()
        assert (results.num_done, results.num_succeeded) == (3, 2)
    found = rows(path)
    assert [row["custom_id"] for row in found] == ["a", "b", "c"]
    assert found[0]["response"] == {"status_code": 200, "request_id": "r0", "body": {"text": "é\ud800"}}
    assert found[0]["error"] is None
    assert (found[1]["response"], found[1]["error"]["line"]) == (None, 2)
    assert len({row["id"] for row in found}) == 3 and found[0]["id"].startswith("batch_req_")


def test_a_last_line_that_was_cut_is_taken_away_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, REQUESTS) as results:
        for request in REQUESTS[:2]:
            results.add(request, Result(200, "r", {}))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        with Results(path, REQUESTS) as results:
            assert [request.custom_id for request in results.missing()] == ["b", "c"], end
        assert path.read_bytes() == whole[:first]
    path.write_bytes(whole[:-1])  # nothing but its end is missing
    with Results(path, REQUESTS) as results:
        assert path.read_bytes() == whole
        assert [request.custom_id for request in results.missing()] == ["c"]
        results.add(REQUESTS[2], Result(200, "r", {}))
    assert path.read_bytes().startswith(whole) and len(rows(path)) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("my diary\n", "line 1 is no result of a batch, so nothing is written there"),
        ("my diary", "line 1 is no result of a batch"),
        (
            '{"id": "batch_req_1", "custom_id": "z", "response": {"status_code": 200}, "error": null}\n',
            "is the result of 'z'",
        ),
        ('{"id": "else", "custom_id": "a", "response": {"status_code": 200}, "error": null}\n', "is no result"),
        ('{"id": "batch_req_1"}\n', "is no result"),
        (
            '{"id": "batch_req_1", "custom_id": "z", "response": {"status_code": 200}, "error": null}',
            "is the result of 'z'",
        ),
        (
            '{"id": "batch_req_1", "custom_id": ["a"], "response": {"status_code": 200}, "error": null}\n',
            "is no result",
        ),
        ("[" * 100_000, "is no result"),
    ],
)
def test_a_file_of_somebody_else_stays_as_it_is(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        Results(path, REQUESTS)
    assert path.read_text() == content


def test_two_batches_do_not_write_the_same_file(tmp_path: Path) -> None:
    with Results(tmp_path / "out.jsonl", REQUESTS), pytest.raises(ConfigError, match="Another batch is writing"):
        Results(tmp_path / "out.jsonl", REQUESTS)
    with pytest.raises(ConfigError, match="which cannot be written: No such file or directory"):
        Results(tmp_path / "no" / "out.jsonl", REQUESTS)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_a_device_is_no_place_for_results(device: str) -> None:
    """It would be replaced by a file, or read without end."""
    with pytest.raises(ConfigError, match="no regular file"):
        Results(device, REQUESTS)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link.jsonl", tmp_path / "target.jsonl"
    link.symlink_to(target)
    with Results(link, REQUESTS) as results:
        for request in reversed(REQUESTS):
            results.add(request, Result(200, "r", {}))
        results.finish()
    assert link.is_symlink()
    assert [row["custom_id"] for row in rows(target)] == ["a", "b", "c"]


def test_there_is_no_room_for_the_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.ordered").mkdir()
    with Results(path, REQUESTS) as results:
        for request in reversed(REQUESTS):
            results.add(request, Result(200, "r", {}))
        with pytest.raises(OutputFailed, match="cannot be written: Is a directory"):
            results.finish()
    assert len(rows(path)) == 3


def test_failed_results_can_be_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path, REQUESTS) as results:
        results.add(REQUESTS[0], Result(200, "r", {}))
        results.add(REQUESTS[1], Result(500, "r", {}))
    with Results(path, REQUESTS, retry_failed=True) as results:
        assert [request.custom_id for request in results.missing()] == ["b", "c"]
        results.add(REQUESTS[1], Result(200, "again", {}))
    with Results(path, REQUESTS) as results:  # as after a crash: of two results of b the later counts
        results.finish()
        assert (results.num_done, results.num_succeeded) == (2, 2)
    assert [(row["custom_id"], row["response"]["request_id"]) for row in rows(path)] == [("a", "r"), ("b", "again")]


def test_a_line_that_was_mended_is_asked_for(write: Write, tmp_path: Path) -> None:
    path, broken = tmp_path / "out.jsonl", read_requests(write(line("a"), "{", line("c")))
    with Results(path, broken) as results:
        for request in broken:
            error = {"code": "invalid_request", "message": request.problem, "line": request.line}
            results.add(request, Result(error=error) if request.problem else Result(200, "r", {}))
    mended = read_requests(write(line("a"), line("b"), line("c")))
    with pytest.raises(
        ConfigError, match=r"line 2 is the result of input line 2, which .* has changed since; add --retry"
    ):
        Results(path, mended)
    with Results(path, mended, retry_failed=True) as results:
        (missing,) = results.missing()
        assert missing.custom_id == "b"
        results.add(missing, Result(200, "again", {}))
        results.finish()
    assert [row["custom_id"] for row in rows(path)] == ["a", "b", "c"], "the line's own result has gone"
