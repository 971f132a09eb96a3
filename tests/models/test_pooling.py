"""What a checkpoint's files say of its embeddings."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.tiny import tiny_gguf, tiny_model
from trunkline.config import ModelSource
from trunkline.errors import ModelError
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.pooling import PoolingSettings

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def settings(path: Path) -> PoolingSettings:
    return open_checkpoint(ModelSource(path=str(path))).pooling


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


def test_a_folder_that_says_nothing(folder: Path) -> None:
    assert settings(folder) == PoolingSettings(method="last", normalize=True, dimensions=(), unbuilt=())


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": True}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "max_tokens and mean"),
        ({"pooling_mode": "mean", "word_embedding_dimension": 64}, "mean"),
        ({"word_embedding_dimension": 64}, "last"),
    ],
)
def test_sentence_transformers_pooling(folder: Path, config: dict[str, Any], method: str) -> None:
    write(folder / "1_Pooling" / "config.json", config)
    assert settings(folder) == PoolingSettings(method=method)


def test_modules_say_where_pooling_is_and_whether_length_counts(folder: Path) -> None:
    write(folder / "pool" / "config.json", {"pooling_mode_mean_tokens": True})
    write(folder / "modules.json", [TRANSFORMER, POOLING | {"path": "pool"}])
    assert settings(folder) == PoolingSettings(method="mean", normalize=False)
    write(folder / "modules.json", [TRANSFORMER, POOLING | {"path": "pool"}, NORMALIZE])
    assert settings(folder) == PoolingSettings(method="mean", normalize=True)
    write(folder / "modules.json", [TRANSFORMER, POOLING | {"path": "pool"}, DENSE])
    assert settings(folder) == PoolingSettings(method="mean", normalize=False, unbuilt=("Dense",))


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [
        ({}, ()),
        ({"is_matryoshka": False}, ()),
        ({"is_matryoshka": True}, None),
        ({"is_matryoshka": True, "matryoshka_dimensions": [16, 32]}, (16, 32)),
        ({"matryoshka_dimensions": [16]}, (16,)),
    ],
)
def test_how_short_they_may_be(folder: Path, config: dict[str, Any], dimensions: tuple[int, ...] | None) -> None:
    write(folder / "config.json", json.loads((folder / "config.json").read_text()) | config)
    assert settings(folder) == PoolingSettings(dimensions=dimensions)


def test_files_that_cannot_be_read_are_one_sentence(folder: Path) -> None:
    write(folder / "modules.json", {"not": "a list"})
    with pytest.raises(ModelError, match=r"modules\.json is not a valid JSON array"):
        settings(folder)
    write(folder / "modules.json", [TRANSFORMER])
    write(folder / "1_Pooling" / "config.json", ["not an object"])
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json is not a valid JSON object"):
        settings(folder)
    write(folder / "1_Pooling" / "config.json", {})
    write(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"matryoshka_dimensions": [0]})
    with pytest.raises(ModelError, match=r"'matryoshka_dimensions' is \[0\]"):
        settings(folder)


@pytest.mark.parametrize(
    ("kind", "method"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank")]
)
def test_a_gguf_file(tmp_path: Path, kind: int | None, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_header = gguf.GGUFWriter.write_header_to_file

    def with_kind(writer: gguf.GGUFWriter, *args: Any) -> None:
        if kind is not None:
            writer.add_pooling_type(gguf.PoolingType(kind))
        write_header(writer, *args)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_kind)
    assert settings(tiny_gguf(tmp_path / "tiny.gguf")) == PoolingSettings(method=method)


def test_a_cross_encoder_is_refused_at_the_start(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    write(folder / "config.json", config)
    with pytest.raises(ModelError, match="'LlamaForSequenceClassification', a cross-encoder or another classifier"):
        settings(folder)
