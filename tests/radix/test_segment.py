"""The format of a segment: what is packed is unpacked, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.radix.tier_factories import FINGERPRINT, PAGE_BYTES, name, owner, payload
from trunkline.radix.segment import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    MAX_PAGES,
    Damaged,
    Layout,
    Record,
    checksum,
    pack_header,
    payload_offset,
    segment_bytes,
    unpack_header,
)

LAYOUT = Layout(FINGERPRINT, 16, PAGE_BYTES)


def records(number: int) -> list[Record]:
    return [
        Record(name(i), owner(f"tenant {i}", f"salt {i}"), checksum(name(i), payload(i).data)) for i in range(number)
    ]


@pytest.mark.parametrize("number", [1, 2, 84, MAX_PAGES])
def test_what_is_packed_is_unpacked(number: int) -> None:
    header = pack_header(LAYOUT, records(number))
    assert len(header) == payload_offset(number) and len(header) % ALIGNMENT == 0
    assert unpack_header(header[:MAX_HEADER_BYTES], LAYOUT, segment_bytes(number, PAGE_BYTES)) == records(number)


@given(at=st.integers(0, 64 + 3 * 48 + 15), bit=st.integers(0, 7))
def test_any_bit_that_is_flipped_is_seen(at: int, bit: int) -> None:
    header = bytearray(pack_header(LAYOUT, records(3)))
    header[at] ^= 1 << bit
    with pytest.raises(Damaged):
        unpack_header(bytes(header), LAYOUT, segment_bytes(3, PAGE_BYTES))


@given(end=st.integers(0, 64 + 3 * 48 + 15))
def test_any_beginning_is_too_short(end: int) -> None:
    with pytest.raises(Damaged):
        unpack_header(pack_header(LAYOUT, records(3))[:end], LAYOUT, segment_bytes(3, PAGE_BYTES))


@given(st.binary(max_size=300))
def test_anything_else_is_damaged(content: bytes) -> None:
    with pytest.raises(Damaged):
        unpack_header(content, LAYOUT, len(content))


@pytest.mark.parametrize(
    "other",
    [Layout("f" * 32, 16, PAGE_BYTES), Layout(FINGERPRINT, 32, PAGE_BYTES), Layout(FINGERPRINT, 16, PAGE_BYTES + 1)],
)
def test_another_layout_is_not_ours(other: Layout) -> None:
    with pytest.raises(Damaged, match="another model"):
        unpack_header(pack_header(other, records(1)), LAYOUT, segment_bytes(1, PAGE_BYTES))


def test_a_file_of_another_length_is_torn() -> None:
    with pytest.raises(Damaged, match="instead of"):
        unpack_header(pack_header(LAYOUT, records(2)), LAYOUT, segment_bytes(2, PAGE_BYTES) - 1)


def test_a_page_cannot_pass_for_another() -> None:
    assert checksum(name(1), payload(1).data) != checksum(name(2), payload(1).data)
