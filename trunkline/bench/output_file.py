"""A file that results are to be written to, after minutes: looked at before."""

import os
from pathlib import Path

from trunkline.errors import ConfigError


def check_output(flag: str, file: Path) -> None:
    """Raises ConfigError if `flag` names a file that cannot be written."""
    folder = file.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {file}, whose folder does not exist; create it first.")
    if file.is_dir():
        raise ConfigError(f"{flag} is {file}, which is a folder; name a file in it.")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} is {file}, which may not be written; name another file.")
