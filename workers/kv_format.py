"""What --kv-cache-dtype means on a device: how keys and values are stored. Knows no weights but their dtype."""

import torch

from trunkline.errors import ConfigError

FLOAT8 = ("fp8", "fp8_e4m3")  # two names for torch.float8_e4m3fn


def kv_dtype_on_cpu(name: str) -> torch.dtype | None:
    """One of config.KV_CACHE_DTYPES as a dtype; None: as the weights are stored, see Kernels.kv_dtype.

    Raises ConfigError for bfloat16: where float16 is as fast, it only costs digits.
    """
    if name == "bfloat16":
        raise ConfigError(
            "--kv-cache-dtype is 'bfloat16', which pages on the CPU don't have: float16 takes as much memory, has eight times the"
            " precision, and keys and values never need more than its range. Please use 'float16', or 'auto'."
        )
    if name == "auto":
        return None
    return torch.float8_e4m3fn if name in FLOAT8 else getattr(torch, name)


def kv_dtype_on_gpu(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """The same beside weights of `dtype`, which pages share or are float8; None: they share it.

    Raises ConfigError for any other.
    """
    if name in FLOAT8:
        return torch.float8_e4m3fn
    weights = str(dtype).removeprefix("torch.")
    if name not in ("auto", weights):
        raise ConfigError(
            f"--kv-cache-dtype is '{name}', but weights are {weights}, and on a GPU keys and values are stored as they are, or"
            f" as 'fp8'. Please use 'auto', or add --dtype {name}."
        )
    return None
