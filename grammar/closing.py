"""The shortest legal end of a text that is found: which tokens bring it from here to where it may end.

    find_ending(matcher, vocabulary, most=64)     {"name": "Al  ─►  [`","`, `age`, `":`, `0`, `}`]

    ending = Ending(matcher, vocabulary)          keeps one up to date, cheaply, token by token
    ending.length                                 5: so many tokens must be left
    ending.propose(token_id)                      6: after that token it would be so many; None: none was found
    ending.commit()                               that token it is

Backends don't tell such a thing, so it is searched: through masks alone, the same way for all of them, and the same tokens
every time. A greedy walk takes what closes; where it has not ended soon, a narrow beam looks for what it missed. Then
the ending found is shortened: by detours that come back to it, and by spelling the same text in fewer tokens. What is
found is legal; that it is the shortest is likely and not certain.
"""

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trunkline.grammar.interface import Matcher, MatcherFailed
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.step import Bits, mask_bits

LONGEST = 4096  # tokens of an ending
FIRST_WALK = 24  # masks of a greedy walk before a beam is tried
BEAM_WIDTH = 8
BEAM_DEPTH = 16
CHOICES = 8  # tokens that are looked at in one place,
LOOKED_AT = 2  # and those of them that may be the last, where an ending is known that the text may come back to
FIRST_MASKS = 2048  # that are filled for an ending, where none is known
NEXT_MASKS = 512  # and after one more token
DETOUR_TOKENS = 6
DETOUR_MASKS = 400
DETOUR_WORK = 40_000  # masks times the tokens of the ending, all of which are tried again each time
SUFFIXES = 8  # of a known ending, that are tried where a text comes back to it
LONGEST_RESPELLED = 2048  # bytes

OPENERS = b":[,{"
WHITESPACE = b" \t\n\r"
TEXT_PROBES = (b"a", b"q", b"Z", b" ", b",", b"}")  # where all of these may come, a string is open


class Table(NamedTuple):
    """What closing needs to know of a vocabulary.

    by_value   ids in the order in which they are tried where a value begins,
    elsewhere  and where none does
    quotes     ids that close an open string, in the order in which they are tried
    longest    ids by the characters they add, most first
    singles    ids of printable ASCII characters, those first that patterns want most often
    probes     ids of TEXT_PROBES
    letters    ids of letters that begin no JSON value
    ids        of each text, the lowest
    longest_token  bytes
    """

    by_value: npt.NDArray[np.int32]
    elsewhere: npt.NDArray[np.int32]
    quotes: npt.NDArray[np.int32]
    longest: npt.NDArray[np.int32]
    singles: npt.NDArray[np.int32]
    probes: npt.NDArray[np.int32]
    letters: npt.NDArray[np.int32]
    ids: dict[bytes, int]
    longest_token: int


_tables: "weakref.WeakKeyDictionary[Vocabulary, Table]" = weakref.WeakKeyDictionary()


def find_ending(matcher: Matcher, vocabulary: Vocabulary, *, most: int = LONGEST) -> list[int] | None:
    """Tokens that bring the text to where it may end, without an end-of-text id; [] if it may end here.

    None if none of at most `most` tokens was found. The matcher stays as it is. Raises MatcherFailed.
    """
    # It may be too long before it is shortened.
    search = Search(vocabulary, most=2 * most + BEAM_DEPTH, masks=FIRST_MASKS)
    ending = search.find(matcher, last=b":")
    ending = None if ending is None else search.shorten(matcher, ending)
    return None if ending is None or len(ending) > most else ending


class Ending:
    """An ending of one text, kept up to date.

    matcher  the text's own; its owner may put another in the same state here. It is never moved
    tokens   the ending, [] if the text may end; None: none was found
    """

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary, tokens: Sequence[int] | None = None) -> None:
        """`tokens`, if an ending of the text is known already."""
        self.matcher = matcher
        self.tokens = find_ending(matcher, vocabulary) if tokens is None else list(tokens)
        self._vocabulary = vocabulary
        self._proposed: list[int] | None = None

    @property
    def length(self) -> int | None:
        """In tokens."""
        return None if self.tokens is None else len(self.tokens)

    def propose(self, token_id: int) -> int | None:
        """How long the ending would be after this token; None: it may not come, or no ending was found then.

        Nothing changes until `commit`. Does not raise what a matcher does: where one fails, no ending is found.
        """
        self._proposed = None
        if self.tokens and token_id == self.tokens[0]:
            self._proposed = self.tokens[1:]
            return len(self._proposed)
        try:
            ahead = self.matcher.fork()
            if not ahead.accept(token_id):
                return None
            self._proposed = self._find(ahead, token_id)
        except MatcherFailed:
            return None
        return None if self._proposed is None else len(self._proposed)

    def commit(self) -> None:
        """The token that was proposed last has come. Its ending is the text's."""
        self.tokens, self._proposed = self._proposed, None

    def accept(self, token_id: int) -> None:
        """The matcher has accepted a token. (`propose` and `commit` in one, where there was no choice.)"""
        if self.tokens and token_id == self.tokens[0]:
            self.tokens = self.tokens[1:]
            return
        try:
            self.tokens = self._find(self.matcher, token_id)
        except MatcherFailed:
            self.tokens = None

    def _find(self, matcher: Matcher, token_id: int) -> list[int] | None:
        if matcher.is_complete:
            return []
        search = Search(self._vocabulary, most=LONGEST, masks=NEXT_MASKS, known=self.tokens or ())
        return search.find(matcher, last=self._vocabulary.tokens[token_id])


class Search:
    """For an ending, within bounds.

    most   tokens it may have
    masks  that may be filled for it
    known  an ending that was legal a moment ago: where the text comes back to the rest of it, that is taken
    """

    def __init__(self, vocabulary: Vocabulary, *, most: int, masks: int, known: Sequence[int] = ()) -> None:
        self.vocabulary = vocabulary
        self.table = _table(vocabulary)
        self.most = most
        self.masks_left = masks
        self.known = _suffixes(known)
        self._row = np.zeros(vocabulary.num_words, np.int32)
        self._changing: dict[bytes, list[int]] = {}  # by mask: a token after which another mask comes, if any does

    def find(self, matcher: Matcher, *, last: bytes) -> list[int] | None:
        """`last`: what came just before; where it opens something, a value begins."""
        found = self._walk(matcher, last, self.most, FIRST_WALK)
        if found is None:
            found = self._beam(matcher, last)
        if found is None:
            found = self._walk(matcher, last, self.most, self.masks_left)
        return found

    def shorten(self, matcher: Matcher, ending: list[int]) -> list[int]:
        """The same ending, or one with fewer tokens."""
        if not ending:
            return ending
        return self._respell(matcher, self._detour(matcher, ending))

    # ---------------------------------------------------------------- finding one

    def _walk(self, matcher: Matcher, last: bytes, most: int, masks: int) -> list[int] | None:
        """Take the token that closes most, again and again."""
        ahead, taken, before = matcher.fork(), list[int](), b""
        while len(taken) <= most:
            if ahead.is_complete:
                return taken
            tokens = ahead.forced()
            rest = self._known_rest(ahead, tokens)
            if rest is not None:
                return taken + rest if len(taken) + len(rest) <= most else None
            if not tokens:
                if masks <= 0:
                    return None
                masks -= 1
                bits = self._fill(ahead)
                if bits is None:
                    return None
                mask = self._row.tobytes()
                tokens = self._step(ahead, bits, last, mask, led_nowhere=mask == before)
                before = mask
            for token in tokens:
                if not ahead.accept(token):
                    return None
                taken.append(token)
            if not tokens:
                return None
            last = self.vocabulary.tokens[taken[-1]]
        return None

    def _step(self, matcher: Matcher, bits: Bits, last: bytes, mask: bytes, *, led_nowhere: bool) -> list[int]:
        """One token, or none.

        led_nowhere  the same tokens may come as before the last one: a pattern wants another character, or only more of
                     the same. As where a string is open that may not close yet, a token is wanted that changes the mask
        """
        choices = self._choose(bits, last)
        looked_at = choices[: LOOKED_AT if self.known else CHOICES]
        ending = next((token for token in looked_at if self._ends(matcher, [token])), None)
        if ending is not None:
            return [ending]
        if led_nowhere or (self._is_open(bits) and not bits[self.table.quotes].any()):
            if mask not in self._changing:
                self._changing[mask] = self._find_changing(matcher, bits, mask)
            return self._changing[mask] or choices[:1]
        return choices[:1]

    def _find_changing(self, matcher: Matcher, bits: Bits, mask: bytes) -> list[int]:
        for token in self.table.singles[bits[self.table.singles]].tolist():
            ahead = matcher.fork()
            if ahead.accept(token) and self._fill(ahead) is not None and self._row.tobytes() != mask:
                return [token]
        return []

    def _beam(self, matcher: Matcher, last: bytes) -> list[int] | None:
        """Follow the first choices of the first choices, all of one length at a time."""
        level = [Place(matcher, last, [])]
        for _ in range(BEAM_DEPTH):
            found: list[tuple[int, Place]] = []
            for index, place in enumerate(level):
                choices = place.matcher.forced()[:1] or self._choices(place.matcher, place.last)
                for rank, token in enumerate(choices):
                    ahead = place.matcher.fork()
                    if not ahead.accept(token):
                        continue
                    taken = [*place.taken, token]
                    rest = [] if ahead.is_complete else self._known_rest(ahead, ahead.forced())
                    if rest is not None and len(taken) + len(rest) <= self.most:
                        return taken + rest
                    found.append((CHOICES // 2 * rank + index, Place(ahead, self.vocabulary.tokens[token], taken)))
            level = [place for _, place in sorted(found, key=lambda entry: entry[0])[:BEAM_WIDTH]]
        return None

    def _known_rest(self, matcher: Matcher, forced: list[int]) -> list[int] | None:
        """The shortest rest of the known ending that ends the text from here, where `forced` must come next."""
        for rest in self.known:
            if rest[: len(forced)] == forced[: len(rest)] and self._ends(matcher, rest):
                return rest
        return None

    def _ends(self, matcher: Matcher, tokens: list[int]) -> bool:
        """With these the text may end."""
        ahead = matcher.fork()
        return all(ahead.accept(token) for token in tokens) and ahead.is_complete

    def _choices(self, matcher: Matcher, last: bytes) -> list[int]:
        """Some of the tokens that may come next, those first that are likely to end the text soon."""
        bits = self._fill(matcher)
        return [] if bits is None else self._choose(bits, last)

    def _choose(self, bits: Bits, last: bytes) -> list[int]:
        table = self.table
        if self._is_open(bits):
            return _first(table.quotes, bits) or _first(table.longest, bits)
        begins = last[-1:] in OPENERS and not bits[table.letters].any()
        return _first(table.by_value if begins else table.elsewhere, bits)

    def _is_open(self, bits: Bits) -> bool:
        """A string is, of which almost all may be the rest."""
        return bool(len(self.table.probes) and bits[self.table.probes].all())

    def _fill(self, matcher: Matcher) -> Bits | None:
        """Which tokens may come next, bool [32 W]; None: that is one mask too many."""
        if self.masks_left <= 0:
            return None
        self.masks_left -= 1
        matcher.fill(self._row)
        return mask_bits(self._row)

    # ---------------------------------------------------------------- shortening it

    def _detour(self, matcher: Matcher, ending: list[int]) -> list[int]:
        """Take another choice somewhere, and come back to the ending further on."""
        self.masks_left = min(DETOUR_MASKS, DETOUR_WORK // len(ending))
        ahead, last, at = matcher.fork(), b":", 0
        while at < len(ending) and self.masks_left > 0:
            better = None if ahead.forced() else self._detour_at(ahead, last, ending[at:])
            if better is not None:
                ending = ending[:at] + better
            ahead.accept(ending[at])
            last = self.vocabulary.tokens[ending[at]]
            at += 1
        return ending

    def _detour_at(self, matcher: Matcher, last: bytes, ending: list[int]) -> list[int] | None:
        """An ending that begins with another token, if it is shorter."""
        best: list[int] | None = None
        self.known = _suffixes(ending[1:])
        for token in self._choices(matcher, last):
            ahead = matcher.fork()
            if token == ending[0] or not ahead.accept(token):
                continue
            most = len(best or ending) - 2
            rest = self._walk(ahead, self.vocabulary.tokens[token], most, DETOUR_TOKENS)
            if rest is not None:
                best = [token, *rest]
        return best

    def _respell(self, matcher: Matcher, ending: list[int]) -> list[int]:
        """The same bytes in as few tokens as the vocabulary allows, if the grammar takes them so."""
        text = b"".join(self.vocabulary.tokens[token] for token in ending)
        if len(text) > LONGEST_RESPELLED or not self.vocabulary.special_ids.isdisjoint(ending):
            return ending
        ids, longest = self.table.ids, self.table.longest_token
        fewest = [0] * (len(text) + 1)  # tokens for text[at:]
        spelled = [-1] * len(text)  # and the first of them
        for at in reversed(range(len(text))):
            fewest[at] = len(text) + 1
            for end in range(at + 1, min(len(text), at + longest) + 1):
                token = ids.get(text[at:end])
                if token is not None and fewest[end] < fewest[at]:
                    fewest[at], spelled[at] = fewest[end] + 1, token
        if fewest[0] >= len(ending):
            return ending
        tokens, at = list[int](), 0
        while at < len(text):
            tokens.append(spelled[at])
            at += len(self.vocabulary.tokens[spelled[at]])
        return tokens if self._ends(matcher, tokens) else ending


class Place(NamedTuple):
    """Somewhere in a text: a matcher, what came last, and the tokens that led there."""

    matcher: Matcher
    last: bytes
    taken: list[int]


def _suffixes(ending: Sequence[int]) -> list[list[int]]:
    """Its last parts, shortest first, but none that leaves out more than SUFFIXES tokens."""
    return [list(ending[start:]) for start in reversed(range(min(SUFFIXES, len(ending))))]


def _first(order: npt.NDArray[np.int32], bits: Bits) -> list[int]:
    """The first CHOICES ids that are allowed."""
    found: list[int] = []
    for start, end in ((0, 2048), (2048, len(order))):
        part = order[start:end]
        found += part[bits[part]][: CHOICES - len(found)].tolist()
        if len(found) == CHOICES:
            break
    return found


# -------------------------------------------------------------------- what is known of a vocabulary

CLOSERS = re.compile(rb"[}\]][}\]\s]*")
QUOTE_CLOSERS = re.compile(rb'"\s*[}\]][}\]\s]*')
VALUE = re.compile(rb'(?:null|true|false|[01]|""|\[\]|\{\})[}\]\s]*')
COLON = re.compile(rb'"?:\s*"?\Z|",')  # not `":-`, which only makes a number longer
STARTS = frozenset(bytes([byte]) for byte in b'"}],:0123456789ntf')  # of what is more than text
UNCOUNTED = WHITESPACE + bytes(range(0x80, 0xC0))  # bytes that add no character, or none that counts
SINGLES = [bytes([byte]) for byte in b"a0A-./:_@ +,#"]
SINGLES += [bytes([byte]) for byte in range(0x21, 0x7F) if bytes([byte]) not in SINGLES]

# In which order the kinds are tried. In an unfinished number more digits don't help; where a value begins, one digit is one.
VALUE_ORDER = ("close", "value", "quote and close", "quote", "comma", "colon", "text", "open", "space")
OTHER_ORDER = ("close", "quote and close", "comma", "colon", "quote", "value", "text", "open", "space")


def _table(vocabulary: Vocabulary) -> Table:
    """Built once for each."""
    if vocabulary not in _tables:
        _tables[vocabulary] = _build(vocabulary)
    return _tables[vocabulary]


def _build(vocabulary: Vocabulary) -> Table:
    ids: dict[bytes, int] = {}
    used: list[int] = []
    for token_id, token in enumerate(vocabulary.tokens):
        if token and token_id not in vocabulary.eos_token_ids:
            used.append(token_id)
            if token_id not in vocabulary.special_ids:
                ids.setdefault(token, token_id)
    tokens = [vocabulary.tokens[token_id] for token_id in used]
    numbers = np.array(used, np.int32)
    gains = np.array([len(token.translate(None, UNCOUNTED)) for token in tokens], np.int64)
    kinds = [_kind(token) for token in tokens]

    def ordered(order: tuple[str, ...], which: Bits | None = None) -> npt.NDArray[np.int32]:
        """By kind, then those that add most, then by id."""
        ranks = np.array([order.index(kind) for kind in kinds], np.int64)
        found: npt.NDArray[np.int32] = numbers[np.lexsort((numbers, -gains, ranks))]
        return found if which is None else found[which[found]]

    is_quote = np.zeros(vocabulary.num_logits, np.bool_)
    is_quote[[token_id for token_id, token in zip(used, tokens, strict=True) if token[:1] == b'"']] = True
    return Table(
        by_value=ordered(VALUE_ORDER),
        elsewhere=ordered(OTHER_ORDER),
        quotes=ordered(OTHER_ORDER, is_quote),
        longest=numbers[np.lexsort((numbers, -gains))],
        singles=_known(SINGLES, ids),
        probes=_known(TEXT_PROBES, ids),
        letters=_known((b"a", b"q", b"A"), ids),
        ids=ids,
        longest_token=max(map(len, ids), default=0),
    )


def _known(texts: Iterable[bytes], ids: Mapping[bytes, int]) -> npt.NDArray[np.int32]:
    return np.array([ids[text] for text in texts if text in ids], np.int32)


def _kind(token: bytes) -> str:
    text = token.strip(WHITESPACE)
    if not text:
        return "space"
    if b"{" not in text and b"[" not in text:
        if text[:1] not in STARTS:
            return "text"
        if text[:1] == b",":
            return "comma"
        if COLON.match(text):
            return "colon"
    if CLOSERS.fullmatch(text):
        return "close"
    if QUOTE_CLOSERS.fullmatch(text):
        return "quote and close"
    if VALUE.fullmatch(text):
        return "value"
    if text == b'"':
        return "quote"
    return "open" if b"{" in text or b"[" in text else "text"
