"""What the driver says of GPUs, and flags that want one where there is none."""

import ctypes
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.test_cli import fails
from trunkline.cli import make_parser
from trunkline.cli_serve import check_gpu, serve_config
from trunkline.config import KV_CACHE_DTYPES
from trunkline.gpu_driver import num_gpus


class Driver:
    """The part of libcuda that is asked."""

    def __init__(self, status: int, count: int) -> None:
        self.status, self.count = status, count

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.status

    def cuDeviceGetCount(self, found: Any) -> int:
        found._obj.value = self.count
        return 0


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(("status", "count", "gpus"), [(0, 2, 2), (0, 0, 0), (100, 2, 0)])
def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch, status: int, count: int, gpus: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(status, count))
    assert num_gpus() == gpus


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert num_gpus() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--device", "cuda"],
            "--device is 'cuda', but the NVIDIA driver is not there or knows of no GPU. See that nvidia-smi",
        ),
        (
            ["--device", "cuda", "--kv-cache-dtype", "fp8"],
            "--device is 'cuda', but the NVIDIA driver is not there or knows of no GPU. See that nvidia-smi",
        ),
    ],
)
def test_what_takes_a_gpu_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    code, line = fails(capsys, "serve", "no-model-is-looked-at", *flags)
    assert (code, words in line) == (1, True), line


@pytest.mark.parametrize("kv_cache_dtype", KV_CACHE_DTYPES)
def test_no_way_to_store_keys_and_values_takes_a_gpu(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for device in ("auto", "cpu"):
        flags = ["serve", "m", "--device", device, "--kv-cache-dtype", kv_cache_dtype]
        check_gpu(serve_config(make_parser().parse(flags)).engine)


def test_with_a_gpu_or_the_interpreter_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = serve_config(make_parser().parse(["serve", "m", "--device", "cuda", "--kv-cache-dtype", "fp8"])).engine
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(0, 1))
    check_gpu(config)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_gpu(config)


def test_torch_is_not_asked() -> None:
    code = (
        "import sys\nfrom trunkline.cli import main\nmain(['serve', 'm', '--device', 'cuda'])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60, env=hidden
    )
    assert ended.returncode == 0 and "--device is 'cuda'" in ended.stderr, ended.stderr
