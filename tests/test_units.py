"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.errors import ConfigError
from trunkline.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("17B", 17),
        ("4GiB", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5g", 3 * 2**29),
        ("2K", 2048),
        ("1T", 2**40),
        ("3TiB", 3 * 2**40),
        ("4GB", 4 * 10**9),
        ("0.5kb", 500),
        (" 8M ", 8 * 2**20),
    ],
)
def test_parse(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "4XB", "4ib", "-1GiB", "1e9", "1,5G", "1.5.0G", "4 Gi B", "nan", "٣G", "1" * 30]
)
def test_what_is_not_a_size_is_refused_in_a_sentence(text):
    with pytest.raises(ConfigError, match=r"is not a size; allowed is .* such as 512MiB or 1.5GiB\.$") as refused:
        parse_bytes(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.3", "0.0001K"])
def test_nothing_is_not_a_size(text):
    with pytest.raises(ConfigError, match="less than one byte"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (96 * 2**20, "96.0 MiB"),
        (4 * 2**30, "4.0 GiB"),
        (3 * 2**39, "1.5 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_format(size, text):
    assert format_bytes(size) == text


@given(st.integers(1, 2**60))
def test_what_is_written_can_be_read(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.05)
