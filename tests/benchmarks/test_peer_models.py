from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks import peer_models
from benchmarks.peer_models import prepare, write_hugging_face, write_q8_0
from tests.tiny import tiny_gguf
from trunkline.config import ModelSource
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow  # imports transformers

MESSAGES = [{"role": "user", "content": "Which of the 12 doors is open?"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the built-in file is: linears in Q4_1, the embedding in Q8_0, norms in float32."""
    path = tmp_path_factory.mktemp("source") / "model.gguf"
    return tiny_gguf(path, quantization="Q4_1", others={"token_embd": "Q8_0"}, pre="smollm")


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in open_checkpoint(ModelSource(path=str(path))).tensors()}


def test_q8_0_holds_the_same_weights_rounded_once_more(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q8_0.gguf"
    write_q8_0(source, target)
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(target).tensors if len(tensor.shape) == 2}
    assert kinds == {gguf.GGMLQuantizationType.Q8_0}
    before, after = tensors(source), tensors(target)
    assert list(before) == list(after)
    for name, values in before.items():
        if values.ndim == 1 or "embed_tokens" in name:
            np.testing.assert_array_equal(after[name], values)
        else:  # half a step of its block, whose scale is a float16
            blocks = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True)
            assert (np.abs(after[name] - values).reshape(-1, 32) <= blocks / 127 * 0.6).all()


def test_q8_0_keeps_what_the_file_says_of_itself(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q8_0.gguf"
    write_q8_0(source, target)
    before, after = (
        {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()} for file in (source, target)
    )
    assert before == after
    assert load_tokenizer(str(target)).encode("The 12 doors.") == load_tokenizer(str(source)).encode("The 12 doors.")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_folder_holds_the_same_weights_and_the_same_tokenizer(source: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "float32"
    write_hugging_face(source, folder)
    before, after = tensors(source), tensors(folder)
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values)
    ours, theirs = load_tokenizer(str(source)), AutoTokenizer.from_pretrained(str(folder))
    text = "In 2024 there were 1,234 doors.\n\tNot one was open: <|im_end|>"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False)
    assert theirs.chat_template == ours.chat_template
    assert theirs.apply_chat_template(MESSAGES, tokenize=False)


def test_files_are_written_once_and_whole(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_models, "builtin_model", lambda: str(source))
    files = prepare(tmp_path)
    assert files.q4_1 == source and files.q8_0.is_file() and files.hugging_face.is_dir()
    assert not list(tmp_path.glob("*.partial"))
    written = files.q8_0.stat().st_mtime_ns
    assert prepare(tmp_path) == files
    assert files.q8_0.stat().st_mtime_ns == written


def test_a_broken_off_write_is_not_taken_for_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(source: Path, target: Path) -> None:
        target.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(peer_models, "builtin_model", lambda: str(source))
    monkeypatch.setattr(peer_models, "write_q8_0", breaks)
    with pytest.raises(OSError, match="No space"):
        prepare(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(peer_models, "builtin_model", lambda: str(source))
    assert gguf.GGUFReader(prepare(tmp_path).q8_0).tensors
