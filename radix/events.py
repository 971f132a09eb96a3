"""What the tree tells the outside: prefixes that come and go, each named by a hash. The tree itself compares tokens.

A prefix hash names everything up to the end of one page: whose it is, and all its tokens.

    h[0]   = SHA-256(namespace)                   root_hash(namespace)
    h[i+1] = SHA-256(h[i] + tokens of page i)     chain(h[0], tokens, page_bytes) is h[1] h[2] … in one string

Of every SHA-256 the first 128 bits are kept. Equal hashes mean equal prefixes, in every process and on every machine.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from hashlib import sha256

HASH_BYTES = 16

Namespace = Hashable
"""Whose KV it is: a tuple such as (weights fingerprint, adapter, salt), of str, bytes, int and None, so that its repr
says all that == compares. Never joined into one string: ("a", "bc") and ("ab", "c") are different."""


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
    return sha256(ascii(namespace).encode("ascii")).digest()[:HASH_BYTES]


def chain(parent: bytes, tokens: bytes, page_bytes: int) -> bytes:
    """The prefix hashes at the end of each page of `tokens`, which follow the prefix `parent`: HASH_BYTES a page."""
    hashes = []
    for start in range(0, len(tokens), page_bytes):
        parent = sha256(parent + tokens[start : start + page_bytes]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return b"".join(hashes)
