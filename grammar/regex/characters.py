"""Sets of characters as sorted ranges of code points, and the named sets that regular expressions know.

    DIGITS = ((48, 57),)          [0-9]
    complement(DIGITS)            everything else, surrogates left out

Surrogates are in no set: no text that can be encoded holds one. No regular expression is read here.

Where ECMA-262 and Python's `re` disagree about a named set (`\\d` is ASCII in one and Unicode in the other), there are two:
the narrow one holds what all agree on, the wide one what any of them takes.
"""

import unicodedata
from collections.abc import Callable, Iterable
from functools import cache

Ranges = tuple[tuple[int, int], ...]  # (first, last), both included; sorted, disjoint and not adjacent

LAST = 0x10FFFF
ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
NONE: Ranges = ()

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
# ECMA-262's WhiteSpace and LineTerminator, with what str.isspace adds (1c to 1f, 85).
WIDE_SPACE: Ranges = (
    *((0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
# ECMA-262's `.` leaves out all of these, Python's only \n.
NEWLINES: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))

# Nothing beyond is a digit, letter or cased: unassigned planes, tags, private use.
LAST_NAMED = 0x3FFFF


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Any order, overlaps allowed; surrogates are taken out."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(piece for ranges in sets for piece in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return without_surrogates(tuple(merged))


def without_surrogates(ranges: Ranges) -> Ranges:
    """The same, cut around U+D800 to U+DFFF."""
    if all(last < 0xD800 or first > 0xDFFF for first, last in ranges):
        return ranges
    cut = []
    for first, last in ranges:
        if first < 0xD800:
            cut.append((first, min(last, 0xD7FF)))
        if last > 0xDFFF:
            cut.append((max(first, 0xE000), last))
    return tuple(cut)


def complement(ranges: Ranges) -> Ranges:
    """All other characters."""
    gaps = []
    next_first = 0
    for first, last in ranges:
        if first > next_first:
            gaps.append((next_first, first - 1))
        next_first = last + 1
    if next_first <= LAST:
        gaps.append((next_first, LAST))
    return without_surrogates(tuple(gaps))


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Characters in both."""
    common = []
    i = j = 0
    while i < len(left) and j < len(right):
        first, last = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if first <= last:
            common.append((first, last))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common)


def difference(left: Ranges, right: Ranges) -> Ranges:
    """Characters of `left` that are not in `right`."""
    return intersection(left, complement(right))


def contains(ranges: Ranges, code: int) -> bool:
    """Whether a code point is in it."""
    low, high = 0, len(ranges)
    while low < high:
        middle = (low + high) // 2
        if ranges[middle][1] < code:
            low = middle + 1
        else:
            high = middle
    return low < len(ranges) and ranges[low][0] <= code


def count(ranges: Ranges) -> int:
    """How many characters."""
    return sum(last - first + 1 for first, last in ranges)


def of(characters: str) -> Ranges:
    """The characters of a string."""
    if len(characters) == 1 and not "\ud800" <= characters <= "\udfff":
        return ((ord(characters), ord(characters)),)
    return union((ord(character), ord(character)) for character in characters)


@cache
def digits(wide: bool) -> Ranges:
    """`\\d`. Wide: Unicode's decimal digits, as Python has it."""
    return _where(str.isdecimal) if wide else DIGITS


@cache
def word(wide: bool) -> Ranges:
    """`\\w`. Wide: what Python calls alphanumeric, and _."""
    return union(_where(str.isalnum), WORD) if wide else WORD


def space(wide: bool) -> Ranges:
    """`\\s`."""
    return WIDE_SPACE if wide else SPACE


def dot(wide: bool) -> Ranges:
    """`.`"""
    return complement(of("\n") if wide else NEWLINES)


def fold(ranges: Ranges, wide: bool) -> Ranges:
    """With the other cases of each letter. Narrow: only of letters that have one simple upper and one simple lower form."""
    others = _wide_cases() if wide else _cases()
    if count(ranges) < len(others):
        cased = [code for first, last in ranges for code in range(first, last + 1) if code in others]
    else:
        cased = [code for code in others if contains(ranges, code)]
    return union(ranges, ((other, other) for code in cased for other in others[code]))


# General categories by their long names, as \p{…} takes them (Unicode's PropertyValueAliases.txt).
LONG_CATEGORIES = """
    L letter, LC cased_letter, Lu uppercase_letter, Ll lowercase_letter, Lt titlecase_letter, Lm modifier_letter, Lo other_letter,
    M mark, M combining_mark, Mn nonspacing_mark, Mc spacing_mark, Me enclosing_mark, N number, Nd decimal_number, Nd digit,
    Nl letter_number, No other_number, S symbol, Sm math_symbol, Sc currency_symbol, Sk modifier_symbol, So other_symbol,
    P punctuation, P punct, Pc connector_punctuation, Pd dash_punctuation, Ps open_punctuation, Pe close_punctuation,
    Pi initial_punctuation, Pf final_punctuation, Po other_punctuation, Z separator, Zs space_separator, Zl line_separator,
    Zp paragraph_separator, Cc control, Cc cntrl, Cf format
"""
CATEGORIES = {name: short for short, name in (pair.split() for pair in LONG_CATEGORIES.split(","))}
SHORT_CATEGORIES = frozenset(CATEGORIES.values())


@cache
def named(name: str) -> Ranges | None:
    """`\\p{name}`: a general category, Any or ASCII; None if it is none of these.

    By the Unicode version of this Python. Unassigned, private and surrogate characters (C, Cn, Co, Cs) are not offered:
    what they hold depends on the version.
    """
    for prefix in ("General_Category=", "gc="):
        name = name.removeprefix(prefix)
    if name == "Any":
        return ALL
    if name == "ASCII":
        return ((0, 0x7F),)
    category = name if name in SHORT_CATEGORIES else CATEGORIES.get(name.lower())
    if category is None:
        return None
    members = ("Lu", "Ll", "Lt") if category == "LC" else (category,)
    return _where(lambda character: unicodedata.category(character).startswith(members), LAST)


def _where(test: Callable[[str], bool], last: int = LAST_NAMED) -> Ranges:
    found: list[tuple[int, int]] = []
    first = -1
    for code in range(last + 2):
        if code <= last and test(chr(code)):
            if first < 0:
                first = code
        elif first >= 0:
            found.append((first, code - 1))
            first = -1
    return without_surrogates(tuple(found))


@cache
def _cases() -> dict[int, list[int]]:
    """Letter -> its other case, where going there and back again leads to the same letter."""
    others: dict[int, list[int]] = {}
    for code in range(LAST_NAMED + 1):
        character = chr(code)
        upper, lower = character.upper(), character.lower()
        if len(upper) == 1 and upper != character and upper.lower() == character:
            others[code] = [ord(upper)]
        elif len(lower) == 1 and lower != character and lower.upper() == character:
            others[code] = [ord(lower)]
    return others


@cache
def _wide_cases() -> dict[int, list[int]]:
    """Letter -> all that some way of folding makes equal to it: k to K and the Kelvin sign, s to the long s, …"""
    classes: dict[str, list[int]] = {}
    for code in range(LAST_NAMED + 1):
        character = chr(code)
        if character.lower() != character or character.upper() != character or character.casefold() != character:
            for key in {character.casefold(), character.lower(), character.upper(), character.upper().lower()}:
                classes.setdefault(key, []).append(code)
    others: dict[int, set[int]] = {}
    for members in classes.values():
        for code in members:
            others.setdefault(code, set()).update(members)
    return {code: sorted(members - {code}) for code, members in others.items() if len(members) > 1}
