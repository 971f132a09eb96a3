"""The benchmark of the disk tier, on the tiny model."""

from pathlib import Path

import pytest

from benchmarks.warm_restart import main
from tests.tiny import tiny_model
from trunkline.scheduler.tiering import Tiering


def test_every_whole_page_comes_from_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine so small a model computes 48 tokens sooner than it would load them."""
    monkeypatch.setattr(Tiering, "_pays", lambda *_: True)
    model = tiny_model(tmp_path / "tiny")
    assert main(["--model", str(model), "--tokens", "64", "100", "--prompts", "2"]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:]] == [["64", "48"], ["100", "96"]]
