"""Fingerprints: every value of the weights counts, and so does how they are computed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_gguf, tiny_model
from trunkline.config import ModelSource
from trunkline.errors import ModelError
from trunkline.models import fingerprint as module
from trunkline.models.checkpoint import builtin_model, open_checkpoint
from trunkline.models.fingerprint import fingerprint, weight_files


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "fingerprints.json"


def of(path: Path, cache: Path, *, load_format: str = "auto", seed: int = 0, **changed: Any) -> str:
    settings: dict[str, Any] = {"dtype": "float16", "numerics": "cpu kernels-1", "page_size": 16} | changed
    checkpoint = open_checkpoint(ModelSource(path=str(path), load_format=load_format, seed=seed))
    return fingerprint(checkpoint, cache=cache, **settings)


def flip_last_bit(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))


@pytest.mark.parametrize("make", [tiny_model, tiny_gguf])
def test_one_bit_of_the_weights_is_another_model(make, tmp_path: Path, cache: Path) -> None:
    path = make(tmp_path / ("tiny.gguf" if make is tiny_gguf else "tiny"))
    before = of(path, cache)
    assert len(before) == 32 and before == of(path, cache)
    checkpoint = open_checkpoint(ModelSource(path=str(path)))
    (file,) = weight_files(checkpoint)
    flip_last_bit(file)
    assert of(path, cache) != before
    flip_last_bit(file)
    assert of(path, cache) == before


def test_how_it_is_computed_counts(tmp_path: Path, cache: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    names = [
        of(folder, cache),
        of(folder, cache, dtype="float32"),
        of(folder, cache, numerics="reference"),
        of(folder, cache, page_size=32),
    ]
    config = json.loads((folder / "config.json").read_text())
    for field, value in {"rope_theta": 500.0, "rms_norm_eps": 1e-6}.items():
        (folder / "config.json").write_text(json.dumps(config | {field: value}))
        names.append(of(folder, cache))
    assert len(set(names)) == len(names)


def test_where_a_text_ends_and_where_the_folder_is_do_not_count(tmp_path: Path, cache: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    before = of(folder, cache)
    (folder / "generation_config.json").unlink()
    assert of(folder, cache) == before
    assert of(folder.rename(tmp_path / "elsewhere"), cache) == before


def test_dummy_weights_are_named_by_their_seed(tmp_path: Path, cache: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    names = [of(folder, cache, load_format="dummy", seed=seed) for seed in (0, 1)]
    assert len({*names, of(folder, cache)}) == 3


def test_files_are_read_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path / "tiny")
    read: list[Path] = []
    digest = module._digest

    def counting(file: Path) -> str:
        read.append(file)
        return digest(file)

    monkeypatch.setattr(module, "_digest", counting)
    before = of(folder, cache)
    assert not cache.exists(), "a file so new could be written again without a new time"
    os.utime(folder / "model.safetensors", (1, 1))
    assert {of(folder, cache) for _ in range(3)} == {before}
    assert len(read) == 2
    cache.write_text("not JSON")
    assert of(folder, cache) == before and len(read) == 3
    os.utime(folder / "model.safetensors", (2, 2))
    assert of(folder, cache) == before and len(read) == 4


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    os.utime(folder / "model.safetensors", (1, 1))
    (tmp_path / "file").write_text("")
    nowhere = tmp_path / "file" / "fingerprints.json"
    assert of(folder, nowhere) == of(folder, nowhere)


def test_without_a_home_folder_nothing_is_remembered(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    path = tiny_model(tmp_path / "tiny")
    checkpoint = open_checkpoint(ModelSource(path=str(path)))
    assert fingerprint(checkpoint, dtype="float16", numerics="cpu kernels-1", page_size=16) == of(path, cache)


def test_a_file_that_vanishes_is_named(tmp_path: Path, cache: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    checkpoint = open_checkpoint(ModelSource(path=str(folder)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        fingerprint(checkpoint, dtype="float32", numerics="x", page_size=16, cache=cache)


@pytest.mark.real
def test_the_builtin_model_has_one(cache: Path) -> None:
    assert len(of(Path(builtin_model()), cache)) == 32
