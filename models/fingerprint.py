"""A name for what a model computes: equal only where the same tokens give the same keys and values, bit by bit.

    fingerprint(checkpoint, dtype="float16", numerics="cpu kernels-1f3c…", page_size=16)     # 32 hex digits

The disk tier keeps KV under it, so that another model, or the same one computed in another way, never finds it. The
whole of the weights' files goes in: one changed value is another model. The digest of a file is kept in the user's
cache by the file's identity (path, inode, size, times), so that large models are read once. Does not import torch.
"""

import contextlib
import hashlib
import json
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from trunkline.errors import ModelError
from trunkline.models.checkpoint import Checkpoint
from trunkline.models.stored_weights import DummyWeights, FolderWeights, GGUFWeights, QuantizedFolderWeights

VERSION = 1  # of what goes into a fingerprint
MAX_REMEMBERED = 256  # digests of files
RACY_SECONDS = 2.0  # a file written so short ago could be written again without a new time


def fingerprint(checkpoint: Checkpoint, *, dtype: str, numerics: str, page_size: int, cache: Path | None = None) -> str:
    """32 hex digits.

    dtype      of the weights as they are computed with
    numerics   of the kernels: how they compute, and what a page looks like inside
    page_size  tokens of a page
    cache      the file that remembers digests of weights' files; None: the user's

    Raises ModelError if a file can't be read.
    """
    # Where a text ends has no influence on keys and values.
    config = msgspec.structs.replace(checkpoint.config, bos_token_id=None, eos_token_ids=())
    parts = [
        f"trunkline {VERSION}",
        msgspec.json.encode(config, order="sorted").decode(),
        f"{dtype} {numerics} {page_size}",
        *_weights(checkpoint, default_cache() if cache is None else cache),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def default_cache() -> Path | None:
    """Where digests are remembered; None: nowhere, for the user has no home folder."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(home) / "trunkline" / "fingerprints.json"


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that the weights are read from; none for dummy weights."""
    match checkpoint.weights:
        case FolderWeights(folder=stored) | QuantizedFolderWeights(folder=stored):
            return [stored.folder / name for name in sorted({tensor.file for tensor in stored.tensors.values()})]
        case GGUFWeights(file=file):
            return [Path(file.path)]
        case DummyWeights():
            return []
    raise TypeError(f"weights of an unknown kind, {checkpoint.weights!r}: what tells them from others?")


def _weights(checkpoint: Checkpoint, cache: Path | None) -> list[str]:
    if isinstance(checkpoint.weights, DummyWeights):
        return [f"dummy {checkpoint.weights.seed}"]
    files = weight_files(checkpoint)
    known = _recall(cache) if cache is not None else {}
    try:
        before = [_identity(file) for file in files]
        missing = [file for file, identity in zip(files, before, strict=True) if identity not in known]
        with ThreadPoolExecutor(min(4, len(missing) or 1)) as threads:
            digests = dict(zip(missing, threads.map(_digest, missing), strict=True))
        after = [_identity(file) for file in files]
        written_at = [file.stat().st_mtime for file in files]
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}.") from error
    found = [digests.get(file) or known[identity] for file, identity in zip(files, before, strict=True)]
    settled = time.time() - RACY_SECONDS
    new = {
        identity: digest
        for identity, digest, at in zip(before, found, written_at, strict=True)
        if identity not in known and identity in after and at < settled
    }
    if new and cache is not None:
        _remember(cache, {**known, **new})
    return found


def _identity(file: Path) -> str:
    """What changes whenever the file is written to. The change time can't be set by hand, unlike the modification
    time."""
    status = file.stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return f"{file.resolve()} {' '.join(map(str, numbers))}"


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _recall(cache: Path) -> dict[str, str]:
    """Digests by identity. A cache that can't be read is an empty one."""
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _remember(cache: Path, digests: dict[str, str]) -> None:
    """Keep the newest, all at once: another process may read at any moment. What can't be kept is computed again."""
    newest = dict(list(digests.items())[-MAX_REMEMBERED:])
    draft = cache.with_name(f"{cache.name}.{secrets.token_hex(6)}.tmp")
    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode(newest))
        draft.replace(cache)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
