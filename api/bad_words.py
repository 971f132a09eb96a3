"""From words that a text must not have to the tokens that spell them; which of them may come next is the engine's affair.

    bad_word_ids(tokenizer, ("bad", "very bad"))     # ((3284,), (4180,), (1036, 4180), …)

As in vLLM: a word is forbidden as it is spelled at the beginning of a text and after a space. Other spellings (another case, a word
that begins in the middle of a token) are others: a list of words is no filter for what they mean.
"""

from collections.abc import Iterable

from trunkline.errors import InvalidParameter
from trunkline.models.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The spellings of all words, each once. Raises InvalidParameter for a word that no token spells."""
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, f" {bare}"):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if bare else ()
            if not token_ids:
                raise InvalidParameter.of("bad_words", word, "words that are not made of whitespace alone")
            spellings[token_ids] = None
    return tuple(spellings)
