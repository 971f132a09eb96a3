import json

import pytest

from benchmarks.against_transformers import compare, main, table
from tests.bench.fake_server import FakeServer
from tests.bench.test_texts import by_words
from trunkline.bench.texts import Texts
from trunkline.bench.workloads import Turn, make_workloads

TEXTS = Texts(by_words)


class FakePeer:
    """Writes eight tokens a second, and remembers when: how many requests our server had had before each of its own."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.asked: list[int] = []

    def generate(self, turn: Turn) -> tuple[int, float]:
        self.asked.append(len(self.server.requests))
        return turn.max_tokens, turn.max_tokens / 8


def test_half_of_the_peers_requests_run_before_ours_and_half_after() -> None:
    (workload,) = make_workloads("W5", TEXTS, 0)
    with FakeServer() as server:
        peer = FakePeer(server)
        result = compare(server.url, peer, workload, TEXTS, 0, 6)  # type: ignore[arg-type]
    assert peer.asked == [0, 0, 0, 17, 17, 17]  # sixteen requests and a warm-up
    assert result["transformers"] == {"requests": 6, "output_tokens_per_second": 8.0}
    assert result["ratio"] == pytest.approx(result["trunkline"]["output_tokens_per_second"] / 8, abs=0.01)
    json.dumps(result)


def test_table_is_markdown() -> None:
    ours = {"output_tokens_per_second": 96.0, "requests": 32, "failures": 0}
    theirs = {"requests": 8, "output_tokens_per_second": 8.0}
    lines = table(
        [{"workload": "W2", "title": "RAG", "transformers": theirs, "trunkline": ours, "ratio": 12.0}]
    ).splitlines()
    assert len(lines) == 3 and len({line.count("|") for line in lines}) == 1
    assert "12.0×" in lines[2]


def test_help_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "\n    python -m benchmarks.against_transformers --workload W1 --requests 1   # a smoke run\n" in text
    assert "--requests N" in text
