"""Whether this machine has an NVIDIA GPU, asked of the driver itself: in a moment, and without torch."""

import ctypes
import os

DRIVER = "libcuda.so.1"


def num_gpus() -> int:
    """GPUs that the driver would let this process use; 0 without a driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return 0
    found = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(found)) != 0:
        return 0
    return found.value


def is_interpreted() -> bool:
    """True if Triton's kernels are to run on the CPU, in its interpreter: then no GPU is needed."""
    return os.environ.get("TRITON_INTERPRET") == "1"
