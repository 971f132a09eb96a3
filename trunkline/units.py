"""Sizes and counts as people write them: "4GiB", "512MiB", "1.5g"; "32k", "32K".

parse_bytes("1.5g")      # 1610612736
format_bytes(2**30)      # "1.0 GiB"
parse_count("32k")       # 32000
parse_count("32K")       # 32768
"""

import re

from trunkline.errors import ConfigError

_FACTORS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _FACTORS |= {_prefix: 1024**_power, f"{_prefix}ib": 1024**_power, f"{_prefix}b": 1000**_power}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_COUNT = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?)([kmgtKMGT]?)", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of a size: a number and a unit, in any case. KiB and K are 1024 bytes, KB is 1000, and no unit is bytes.

    Raises ConfigError if `text` is not a size, or is less than one byte.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{text!r} is not a size; allowed is a number with a unit B, KiB, MiB, GiB or TiB (K, M, G, T for short) or"
            " KB, MB, GB or TB, such as 512MiB or 1.5GiB."
        )
    size = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size < 1:
        raise ConfigError(f"{text!r} is less than one byte; allowed is a positive size, such as 512MiB.")
    return size


def format_bytes(size: int) -> str:
    """The size in its largest binary unit, to one decimal: "4.0 GiB", "96.0 MiB", "17 B"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size} B"


def parse_count(text: str) -> int:
    """A number of tokens or the like, as vLLM reads it: k, m, g, t are powers of 1000, K, M, G, T are powers of 1024.

    Only the decimal ones may come with a fraction, "25.6k", and it must name a whole number. Raises ConfigError.
    """
    match = _COUNT.fullmatch(text.strip())
    if match is not None:
        number, unit = match[1], match[2]
        power = " kmgt".index(unit.lower() or " ")
        if "." not in number:
            factor: int = (1024 if unit.isupper() else 1000) ** power
            return int(number) * factor
        whole, fraction = number.split(".")
        if unit.islower() and len(fraction.rstrip("0")) <= 3 * power:
            return int(whole + fraction.ljust(3 * power, "0")[: 3 * power])
    raise ConfigError(
        f"is {text!r}; allowed is an integer, such as 4096, or one with a unit: k, m, g for powers of 1000 (32k is 32000), K,"
        " M, G for powers of 1024 (32K is 32768)."
    )
