"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.errors import ConfigError
from trunkline.units import format_bytes, parse_bytes, parse_count


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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("0", 0),
        ("-1", -1),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1m", 10**6),
        ("1M", 2**20),
        ("2g", 2 * 10**9),
        ("2G", 2**31),
        ("25.6k", 25_600),
        ("1.5m", 1_500_000),
        ("1.500k", 1500),
        (" 8k ", 8000),
    ],
)
def test_counts_are_read_as_vllm_reads_them(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "4kb", "25.6K", "1.5", "1.2345k", "0x10", "1e3", "٣k", "1 k", "1,000"])
def test_what_is_not_a_count_is_refused_in_a_sentence(text):
    with pytest.raises(
        ConfigError, match=r"^is .*; allowed is an integer, such as 4096, or one with a unit: k, m, g "
    ) as refused:
        parse_count(text)
    assert repr(text) in str(refused.value)
