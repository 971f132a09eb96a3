"""Texts that tokenizers find hard."""

from hypothesis import strategies as st

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind the fox.",
    "A cache keeps what it has read: the keys and values of every token of every prompt.",
    "def add(left, right):\n    return left + right  # 4 spaces",
    "Numbers such as 3.14159, 2,718 and 42 are split into their digits.",
    "Le café où nous étions hier était fermé, dit-elle; nous irons demain.",
]
TEXTS = [
    *LINES,
    "Hello world",
    "  two  spaces ",
    "tab\tand\r\nlines\n\n",
    "naïve 日本 😀",
    "it's 42!",
    "a <|im_end|>",
    "",
    " ",
    "▁",
]

any_text = st.text(st.characters(codec="utf-8"), max_size=40)
