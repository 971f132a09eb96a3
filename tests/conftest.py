"""What every test shares: how long hypothesis searches, one torch thread, and Triton's interpreter."""

import gc
import os
import shutil
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined: without a GPU they run in NumPy

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine stalls now and then, so no example has a deadline. A test that needs another number of examples says so itself.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", _patient, max_examples=20)
settings.register_profile("ci", _patient, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))  # `--hypothesis-profile=ci` wins over this


def pytest_collection_finish() -> None:
    """What is imported by now stays: thousands of small tests need not have the collector look at all of it again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Two threads that wait for each other on two busy cores are slower than one."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
