"""Random regular expressions, and texts that they may find something in. For tests."""

from hypothesis import strategies as st

ATOMS = [
    "a",
    "b",
    "-",
    " ",
    "1",
    '"',
    "\\\\",
    "\\n",
    ".",
    "\\d",
    "\\w",
    "\\s",
    "\\D",
    "\\W",
    "\\S",
    "[ab]",
    "[^ab]",
    "[^\\d-]",
]
ATOMS += ["[a-c1]", "[\\w-]", "[^\\s\\S]", "é", "[é-í]", "\\.", "\\x41", "\\t", "[\\W_]"]
QUANTIFIERS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?"]
CHARACTERS = 'ab-1 A_."\\\n\té٣\u2028\u212a\x1f\x7f😀'

texts = st.text(alphabet=CHARACTERS, max_size=6)


def _joined(inner: st.SearchStrategy[str], extra: list[str]) -> st.SearchStrategy[str]:
    atom = st.one_of(
        st.sampled_from([*ATOMS, *extra]), inner.map(lambda text: f"(?:{text})"), inner.map(lambda text: f"({text})")
    )
    part = st.tuples(atom, st.sampled_from(QUANTIFIERS)).map("".join)
    bare = st.sampled_from(["", "^", "$", *extra])
    run = st.lists(part, max_size=3).map("".join)
    return st.lists(st.tuples(bare, run, bare).map("".join), min_size=1, max_size=2).map("|".join)


def sources(depth: int = 2) -> st.SearchStrategy[str]:
    """Expressions without lookarounds; `re` reads them too."""
    made = st.sampled_from(ATOMS)
    for _ in range(depth):
        made = _joined(made, [])
    return made


LOOKS = [
    "(?=a)",
    "(?!a)",
    "(?=.*b)",
    "(?!.*b)",
    "(?!ab)",
    "(?<!a)",
    "(?<=a)",
    "(?!-|$)",
    "(?<!-)",
    "\\b",
    "\\B",
    "(?!a$)",
]


def looking() -> st.SearchStrategy[str]:
    """Expressions with lookarounds; `re` reads them too, some are beyond us."""
    plain = st.sampled_from(["a", "b", "[ab-]", ".", "[ab]+", "-?", "b*", "(?:a|-)", "((?!-)[ab-])", "(?:a(?!b)|b)+"])
    part = st.one_of(plain, plain, st.sampled_from(LOOKS))
    ends = st.tuples(
        st.sampled_from(["", "^"]), st.lists(part, min_size=1, max_size=4).map("".join), st.sampled_from(["", "$"])
    )
    return st.one_of(ends.map("".join), st.just("^((?!ab)[ab-])*$"), st.just("^-((?!ab).){1,3}$"))
