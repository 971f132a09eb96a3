"""How keys and values are stored, from the flag to the pages: their size, their name, and whose pages are found again."""

import itertools

import pytest
import torch

from tests.tiny import tiny_model
from tests.workers.plans import Chunk, need_compiler, pages_for, run
from trunkline.config import KV_CACHE_DTYPES, CacheConfig, EngineConfig, ModelSource, WorkerConfig
from trunkline.errors import ConfigError
from trunkline.models.checkpoint import open_checkpoint
from trunkline.workers.kv_format import kv_dtype_on_cpu, kv_dtype_on_gpu
from trunkline.workers.runner import load_runner
from trunkline.workers.worker import LocalWorker, load_worker

SIZES = {"float32": 4, "float16": 2, "fp8": 1}
NUMBERS = 2 * 2 * 2 * 16 * 8  # K and V, layers, heads, size of a head, tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("kv"), max_position_embeddings=64))


def load(model: str, *, dtype: str = "float16", **cache: str | int) -> LocalWorker:
    cache_config = CacheConfig(block_size=8, num_pages=20, **cache)  # type: ignore[arg-type]
    source, one_thread = ModelSource(path=model, dtype=dtype), WorkerConfig(device="cpu", threads=1)
    worker = load_worker(EngineConfig(model=source, cache=cache_config, worker=one_thread))
    assert isinstance(worker, LocalWorker)
    return worker


@pytest.mark.parametrize(("name", "size"), SIZES.items())
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pages_take_what_the_flag_says_beside_any_weights(model: str, dtype: str, name: str, size: int) -> None:
    worker = load(model, dtype=dtype, kv_cache_dtype=name, host_cache_memory=5 * NUMBERS * size + 1)
    assert (worker.dtype, worker.page_bytes) == (dtype, NUMBERS * size)
    assert worker.host_pages.shape == (5, NUMBERS * size), "as many as fit"
    worker.close()


def test_auto_is_as_the_weights_are(model: str) -> None:
    need_compiler()
    for dtype, size in (("float32", 4), ("float16", 2), ("bfloat16", 2)):
        worker = load(model, dtype=dtype)
        assert worker.page_bytes == NUMBERS * size
        worker.close()


def test_pages_of_another_kind_are_not_found_on_disk(
    model: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("digests")))
    folder = str(tmp_path_factory.mktemp("disk"))
    names = {}
    for name in ("auto", "float32", "float16", "fp8", "fp8_e4m3"):
        worker = load(model, kv_cache_dtype=name, disk_cache_dir=folder)
        names[name] = worker.fingerprint
        worker.close()
    assert names["auto"] == names["float16"] and names["fp8"] == names["fp8_e4m3"]
    assert len({names["float32"], names["float16"], names["fp8"]}) == 3


@pytest.mark.parametrize("name", SIZES)
def test_a_prompt_in_chunks_gives_the_same_logits(model: str, name: str) -> None:
    need_compiler()
    runner = load_runner(open_checkpoint(ModelSource(path=model)), "float16", 1, kv_dtype=kv_dtype_on_cpu(name))
    runner.allocate(20, 8)
    tokens, pages = list(range(3, 43)), pages_for(40)
    whole = run(runner, [Chunk(tokens, 0, 40, pages)], all_rows=True)
    for first, last in itertools.pairwise([0, 7, 8, 25, 40]):
        rows = run(runner, [Chunk(tokens, first, last, pages)], all_rows=True)
        assert torch.equal(rows, whole[first:last])


def test_bfloat16_is_refused_on_the_cpu(model: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype is 'bfloat16'.*Please use 'float16', or 'auto'"):
        load(model, kv_cache_dtype="bfloat16")


def test_a_gpu_stores_as_the_weights_or_in_float8() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert kv_dtype_on_gpu("fp8", dtype) == kv_dtype_on_gpu("fp8_e4m3", dtype) == torch.float8_e4m3fn
        assert kv_dtype_on_gpu("auto", dtype) is None
        for name in ("float32", "float16", "bfloat16"):
            if str(dtype) == f"torch.{name}":
                assert kv_dtype_on_gpu(name, dtype) is None
            else:
                with pytest.raises(ConfigError, match=f"'{name}', but weights are .* or add --dtype {name}"):
                    kv_dtype_on_gpu(name, dtype)


def test_every_name_is_known() -> None:
    for name in KV_CACHE_DTYPES:
        if name != "bfloat16":
            kv_dtype_on_cpu(name)
