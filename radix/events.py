"""What the tree tells the outside: prefixes that come and go, each named by a hash. The tree itself compares tokens.

A prefix hash names everything up to the end of one page: whose it is, and all its tokens.

    h[0]   = SHA-256(namespace)                   root_hash(namespace)
    h[i+1] = SHA-256(h[i] + tokens of page i)     chain(h[0], tokens, page_bytes) is h[1] h[2] … in one string

Of every SHA-256 the first 128 bits are kept. Equal hashes mean equal prefixes, in every process and on every machine.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

HASH_BYTES = 16


class Namespace(NamedTuple):
    """Whose KV it is. Never joined into one string: ("a", "bc") and ("ab", "c") are different."""

    weights: str = ""  # fingerprint of the checkpoint and of how it is computed; "" where KV never leaves the process
    adapter: str = ""  # digest of a LoRA adapter
    tenant: str = ""  # whose requests
    salt: str = ""  # within a tenant, the caller's own division


NOBODY = Namespace()
"""One for all: where there are no weights, adapters or tenants to tell apart."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages entered the tree below the prefix `parent`.

    parent  prefix hash of all that comes before, 16 bytes
    tokens  bytes of int32, the tokens of one or more whole pages
    """

    namespace: Namespace
    parent: bytes
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages left the tree, and nothing below them was in it. Fields as in Stored, though rarely the same runs."""

    namespace: Namespace
    parent: bytes
    tokens: bytes


Event = Stored | Removed


def root_hash(namespace: Namespace) -> bytes:
    """The prefix hash of no tokens at all: HASH_BYTES bytes."""
    return sha256(ascii(tuple(namespace)).encode("ascii")).digest()[:HASH_BYTES]


def chain(parent: bytes, tokens: bytes, page_bytes: int) -> bytes:
    """The prefix hashes at the end of each page of `tokens`, which follow the prefix `parent`: HASH_BYTES a page."""
    hashes = []
    for start in range(0, len(tokens), page_bytes):
        parent = sha256(parent + tokens[start : start + page_bytes]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return b"".join(hashes)
