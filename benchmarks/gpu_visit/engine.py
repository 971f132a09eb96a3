"""The whole server under the workloads of benchmarks/README.md, with random weights in the shape of a model that is known.

The weights are written to memory as a checkpoint, which takes seconds; the tokenizer is a small one, whose tokens are mostly single
letters: lengths are in its tokens, as always. Qwen3-0.6B's shape is run as a Llama, without the norms of q and k.
"""

import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import server
from benchmarks.against_transformers import our_run
from benchmarks.gpu_visit.part import Visit
from tests.tiny import tiny_model
from trunkline.bench.cli import make_texts
from trunkline.bench.workloads import make_workloads
from trunkline.models.config import ModelConfig
from trunkline.models.weights import tensor_shapes

WORKLOADS = ("W1", "W2", "W5", "W6")
IN_MEMORY, NEEDED_BYTES = Path("/dev/shm"), 20 * 2**30
STD = 0.02

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
QWEN3_600M = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
TINY = {"num_hidden_layers": 1, "max_position_embeddings": 2048}


def measure(visit: Visit, title: str, shape: dict[str, Any]) -> None:
    """Rows of one model: loading it, then each workload."""
    in_memory = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > NEEDED_BYTES
    folder = Path(tempfile.mkdtemp(prefix="gpu-visit-", dir=IN_MEMORY if in_memory else None))
    try:
        with visit.row(f"{title}: starts"):
            write_model(visit, folder, visit.sizes(shape, TINY))
            # Random weights repeat themselves: drafts would be right more often than any real text's.
            flags = ["--max-num-seqs", "256", "--max-model-len", "2048", "--num-speculative-tokens", "0"]
            flags += visit.sizes(["--device", "cuda", "--dtype", "bfloat16"], ["--device", "cpu"])
            started = time.monotonic()
            with server.serve(str(folder), *flags) as url:
                visit.emit(f"{title}: starts", time.monotonic() - started, "s", note="weights, graphs and all")
                for name in visit.sizes(WORKLOADS, ("W1",)):
                    run_workload(visit, title, name, url, folder)
    finally:
        shutil.rmtree(folder)


def run_workload(visit: Visit, title: str, name: str, url: str, folder: Path) -> None:
    with visit.row(f"{title}: {name}"):
        texts = make_texts(str(folder))
        (workload,) = make_workloads(name, texts, visit.seed)
        summary = asyncio.run(our_run(url, workload, texts, visit.seed))
        first, later = summary["ttft_ms"]["mean"], summary["tpot_ms"]["mean"]
        visit.emit(
            f"{title}: {name}, {workload.title}",
            summary["output_tokens_per_second"],
            "tokens/s",
            failed=bool(summary["failures"]),
            note=f"{summary['requests']} requests, {summary['failures']} failed; first token {first} ms, each other {later} ms;"
            f" {summary['cached_tokens']:,} of {summary['prompt_tokens']:,} prompt tokens cached",
        )


def write_model(visit: Visit, folder: Path, shape: dict[str, Any]) -> None:
    """A checkpoint in the Hugging Face format, its random numbers made on the device."""
    tiny_model(folder)  # for its tokenizer
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 131_072, "torch_dtype": "bfloat16"} | shape
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(ModelConfig.from_hf(config))
    header: dict[str, Any] = {}
    end = 0
    for name, sizes in shapes.items():
        start, end = end, end + 2 * torch.Size(sizes).numel()
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    torch.manual_seed(visit.seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, sizes in shapes.items():
            values = torch.randn(sizes, dtype=torch.bfloat16, device=visit.device).mul_(STD)
            if name.endswith("norm.weight"):
                values += 1
            file.write(values.cpu().view(torch.uint8).numpy().data)
