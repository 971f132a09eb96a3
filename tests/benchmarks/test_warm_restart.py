"""The benchmark of the disk tier, on the tiny model."""

from pathlib import Path

import pytest

from benchmarks.warm_restart import main
from tests.tiny import tiny_model


def test_every_whole_page_comes_from_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path / "tiny")
    assert main(["--model", str(model), "--tokens", "64", "100", "--prompts", "2"]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:]] == [["64", "48"], ["100", "96"]]
