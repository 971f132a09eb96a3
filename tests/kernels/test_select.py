"""Which kernels serve which device, and what is said where there are none."""

import logging

import pytest
import torch

from trunkline.errors import ConfigError
from trunkline.kernels.select import gpu_kernels, resolve_device


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu() -> None:
    assert resolve_device() == resolve_device("auto") == resolve_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"--device is 'cuda', but torch .* finds no GPU\. .* use --device cpu"):
        resolve_device("cuda")


@pytest.mark.usefixtures("no_gpu")
def test_in_the_interpreter_cuda_is_the_cpu_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (resolve_device("cuda"), resolve_device("auto")) == ("cuda", "cpu")
    with caplog.at_level(logging.WARNING):
        kernels = gpu_kernels(torch.bfloat16, head_dim=64, query_heads=4, max_model_len=100)
    assert "not for serving" in caplog.text
    assert kernels.device == torch.device("cpu") and kernels.activation_dtype == torch.bfloat16


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (resolve_device("auto"), resolve_device("cuda"), resolve_device("cpu")) == ("cuda", "cuda", "cpu")


def test_another_device() -> None:
    with pytest.raises(ConfigError, match="--device is 'tpu', for which there are no kernels"):
        resolve_device("tpu")


@pytest.mark.parametrize("head_dim", [12, 264])
@pytest.mark.usefixtures("no_gpu")
def test_heads_that_the_gpu_kernels_do_not_know(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"are of size {head_dim}; .* --device cpu"):
        gpu_kernels(torch.float16, head_dim=head_dim, query_heads=4, max_model_len=100)
