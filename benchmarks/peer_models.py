"""The built-in model's own weights in the formats that other servers read.

    python -m benchmarks.peer_models FOLDER

    q4_1            the built-in file as it is: linears in Q4_1, the embedding in Q8_0
    q8_0            FOLDER/smollm2-q8_0.gguf: what the file's blocks stand for, rounded once more, to Q8_0
    hugging_face    FOLDER/smollm2-float32: what they stand for exactly, as a Hugging Face folder with the tokenizer

Needs the test tools (`make test-fast` once): transformers writes the folder.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import NamedTuple

from trunkline.models.checkpoint import builtin_model
from trunkline.models.tokenizer import load_tokenizer
from trunkline.models.tokenizer_json import JsonTokenizer


class ModelFiles(NamedTuple):
    q4_1: Path
    q8_0: Path
    hugging_face: Path


def prepare(folder: Path) -> ModelFiles:
    """Write what is not there yet. Each file appears under its name when all of it is written."""
    source = Path(builtin_model())
    files = ModelFiles(q4_1=source, q8_0=folder / "smollm2-q8_0.gguf", hugging_face=folder / "smollm2-float32")
    folder.mkdir(parents=True, exist_ok=True)
    if not files.q8_0.exists():
        partial = files.q8_0.with_suffix(".partial")
        write_q8_0(source, partial)
        partial.rename(files.q8_0)
    if not files.hugging_face.exists():
        partial = files.hugging_face.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_hugging_face(source, partial)
        partial.rename(files.hugging_face)
    return files


def write_q8_0(source: Path, target: Path) -> None:
    """A copy of a GGUF file with its matrices [out, in] in Q8_0; vectors and metadata stay as they are."""
    import gguf

    q8_0 = gguf.GGMLQuantizationType.Q8_0
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)  # which notes the architecture itself
    for field in reader.fields.values():
        if field.name == gguf.Keys.General.ARCHITECTURE or field.name.startswith("GGUF."):
            continue
        value = gguf.LlamaFileType.MOSTLY_Q8_0 if field.name == gguf.Keys.General.FILE_TYPE else field.contents()
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 or tensor.tensor_type == q8_0:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(values, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hugging_face(source: Path, folder: Path) -> None:
    """config.json, model.safetensors in float32 and the tokenizer, as transformers and vLLM read them."""
    from tests.reference_model import load_reference

    load_reference(str(source)).save_pretrained(folder)
    tokenizer = load_tokenizer(str(source))
    assert isinstance(tokenizer, JsonTokenizer), "the built-in model's is byte-level BPE"
    tokenizer._library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "clean_up_tokenization_spaces": False,
                "chat_template": tokenizer.chat_template,
                **tokenizer.special_tokens,
            },
            indent=1,
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.peer_models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    for name, path in prepare(parser.parse_args().folder)._asdict().items():
        print(f"{name:14}{path}")


if __name__ == "__main__":
    main()
