"""Reading the small JSON objects and arrays of a checkpoint folder, with errors that are sentences."""

import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trunkline.errors import ModelError

Content = TypeVar("Content", dict[str, Any], list[Any])

MAX_BYTES = 64 * 2**20  # an index of half a million tensors; settings are a few KiB


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises ModelError if it is missing, too large, or anything but a JSON object."""
    return _read(path, dict[str, Any], "object")


def read_json_list(path: Path) -> list[Any]:
    """The same of a file that holds an array."""
    return _read(path, list[Any], "array")


def _read(path: Path, kind: type[Content], name: str) -> Content:
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
        value: Content = msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a valid JSON {name}: {error}.") from error
    return value
