"""Reading the small JSON objects of a checkpoint folder, with errors that are sentences."""

import stat
from pathlib import Path
from typing import Any

import msgspec

from trunkline.errors import ModelError

MAX_BYTES = 64 * 2**20  # an index of half a million tensors; settings are a few KiB


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises ModelError if it is missing, too large, or anything but a JSON object."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
            raise ModelError(f"{path} is not a file, but a folder, pipe or device.")
        if status.st_size > MAX_BYTES:
            raise ModelError(f"{path} has {status.st_size} bytes; allowed are {MAX_BYTES}.")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}.") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a valid JSON object: {error}.") from error
