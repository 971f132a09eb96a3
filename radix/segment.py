"""A segment: one immutable file of the disk tier, with pages of KV and the names of the prefixes that end there.

    64 bytes      magic, version, page_size (tokens), page_bytes, number of pages n, digest of the fingerprint
    n · 48 bytes  for each page: its prefix hash 16, its owner 16, its checksum 16
    16 bytes      checksum of all that comes before
    n pages       page_bytes each, from the next multiple of 4096 on

All numbers are little-endian. A checksum is the first 128 bits of a SHA-256; that of a page covers its prefix hash as
well, so a page can't pass for another. Bytes in, bytes out: this file knows no file names, and nothing of what a page
means.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from trunkline.radix.events import HASH_BYTES, Namespace

MAGIC = b"TRUNKKV\n"
VERSION = 1
CHECKSUM_BYTES = 16
MAX_PAGES = 256  # of a segment
ALIGNMENT = 4096

_FIXED = struct.Struct("<8sIIQI4x32s")
_RECORD = struct.Struct(f"{HASH_BYTES}s16s{CHECKSUM_BYTES}s")
assert _FIXED.size == 64 and _RECORD.size == 48

MAX_HEADER_BYTES = _FIXED.size + MAX_PAGES * _RECORD.size + CHECKSUM_BYTES


class Owner(NamedTuple):
    """Whose page it is, so that it can be deleted on request; digests, 8 bytes each.

    A prefix hash can't be told from another's, and tenant and salt have no business in a file.
    """

    tenant: bytes
    salt: bytes

    @classmethod
    def of(cls, namespace: Namespace) -> "Owner":
        return cls(owner_digest(namespace.tenant), owner_digest(namespace.salt))


class Record(NamedTuple):
    """One page of a segment."""

    prefix_hash: bytes  # 16
    owner: Owner
    checksum: bytes  # 16


class Layout(NamedTuple):
    """What all segments of one tier agree on.

    fingerprint  of the weights and of how they are computed, see models/fingerprint.py
    page_size    tokens
    page_bytes   bytes of KV
    """

    fingerprint: str
    page_size: int
    page_bytes: int


class Damaged(ValueError):
    """Not a whole segment of this layout; the message says in what."""


def owner_digest(name: str) -> bytes:
    """8 bytes that stand for a tenant or a salt."""
    return hashlib.sha256(name.encode()).digest()[:8]


def checksum(prefix_hash: bytes, payload: bytes | memoryview) -> bytes:
    """Of one page. hashlib lets go of the interpreter's lock for long inputs, so the engine's loop runs on."""
    digest = hashlib.sha256(prefix_hash)
    digest.update(payload)
    return digest.digest()[:CHECKSUM_BYTES]


def payload_offset(num_pages: int) -> int:
    """Where the first page of a segment of so many pages begins, in bytes."""
    header = _FIXED.size + num_pages * _RECORD.size + CHECKSUM_BYTES
    return -(-header // ALIGNMENT) * ALIGNMENT


def segment_bytes(num_pages: int, page_bytes: int) -> int:
    """Length of the file."""
    return payload_offset(num_pages) + num_pages * page_bytes


def pack_header(layout: Layout, records: Sequence[Record]) -> bytes:
    """Everything before the first page, padding included. 1 to MAX_PAGES records."""
    digest = hashlib.sha256(layout.fingerprint.encode()).digest()
    header = _FIXED.pack(MAGIC, VERSION, layout.page_size, layout.page_bytes, len(records), digest)
    header += b"".join(_RECORD.pack(prefix_hash, b"".join(owner), sum_) for prefix_hash, owner, sum_ in records)
    header += _checksum(header)
    return header.ljust(payload_offset(len(records)), b"\0")


def unpack_header(header: bytes, layout: Layout, file_bytes: int) -> list[Record]:
    """The records of a segment, from its first bytes: MAX_HEADER_BYTES of them, or the whole file if it is shorter.

    Raises Damaged if these aren't the beginning of a segment of `layout` that is `file_bytes` long.
    """
    if len(header) < _FIXED.size:
        raise Damaged(f"{len(header)} bytes are no header")
    magic, version, page_size, page_bytes, num_pages, digest = _FIXED.unpack_from(header)
    if (magic, version) != (MAGIC, VERSION):
        raise Damaged(f"it begins with {magic!r}, version {version}")
    if not 1 <= num_pages <= MAX_PAGES:
        raise Damaged(f"it claims {num_pages} pages")
    end = _FIXED.size + num_pages * _RECORD.size
    if header[end : end + CHECKSUM_BYTES] != _checksum(header[:end]):
        raise Damaged("the checksum of its header is wrong")
    wanted = hashlib.sha256(layout.fingerprint.encode()).digest()
    if (page_size, page_bytes, digest) != (layout.page_size, layout.page_bytes, wanted):
        raise Damaged(f"it is of another model, or of pages of {page_size} tokens in {page_bytes} bytes")
    if file_bytes != segment_bytes(num_pages, page_bytes):
        raise Damaged(f"it has {file_bytes} bytes instead of {segment_bytes(num_pages, page_bytes)}")
    records = (_RECORD.unpack_from(header, _FIXED.size + i * _RECORD.size) for i in range(num_pages))
    return [Record(prefix_hash, Owner(owner[:8], owner[8:]), sum_) for prefix_hash, owner, sum_ in records]


def _checksum(header: bytes) -> bytes:
    return hashlib.sha256(header).digest()[:CHECKSUM_BYTES]
