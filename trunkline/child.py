"""How a module of this package is run as a process of its own."""

import os
import sys
from pathlib import Path

import trunkline


def command(module: str) -> list[str]:
    """The command line. -P: no module of the current folder can take the place of a library's."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """Ours, in which the child finds this very package first, installed or not."""
    root = str(Path(trunkline.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root + os.pathsep + inherited if inherited else root}
