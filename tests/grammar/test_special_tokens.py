"""Special tokens in tool calls: each is one id, and no spelling of its name; free text holds none but those that it may."""

import re
from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.grammar.matching import SmallTokenizer, allowed, follow, mask_of
from trunkline.constraint import Constraint, Tag, Tags
from trunkline.grammar.backends.llguidance.backend import LlguidanceBackend
from trunkline.grammar.closing import Ending, find_ending
from trunkline.grammar.interface import CompiledGrammar, GrammarRefused, Unsupported
from trunkline.grammar.prepare import prepare
from trunkline.grammar.text import ConstrainedText, Rules
from trunkline.grammar.vocabulary import Vocabulary

MARKS = ("[CALLS]", "[ARGS]", "<|begin|>", "<|end|>", "<|call|>", "<|sep|>")
EOS = "<|eos|>"
TOKENIZER = SmallTokenizer(special=("<|bos|>", EOS, *MARKS))
VOCABULARY = Vocabulary(TOKENIZER, TOKENIZER.vocab_size + 16, TOKENIZER.eos_token_ids)
BACKEND = LlguidanceBackend(VOCABULARY)
PLAIN_TOKENIZER = SmallTokenizer()
PLAIN = Vocabulary(PLAIN_TOKENIZER, PLAIN_TOKENIZER.vocab_size, PLAIN_TOKENIZER.eos_token_ids)

AGE = (
    '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": false}'
)
NONE = '{"type": "object", "additionalProperties": false}'


def ids_of(text: str) -> list[int]:
    """As a model writes it: each mark as its token."""
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, (EOS, *MARKS)))})", text):
        special = VOCABULARY.special_id(part)
        ids += VOCABULARY.encode(part.encode()) if special is None else [special]
    return ids


def spelled(text: str) -> list[int]:
    """With tokens of ordinary text."""
    return VOCABULARY.encode(text.encode())


def tags(**changes: object) -> Tags:
    """Mistral's newer form."""
    fields: dict[str, object] = {
        "tags": (
            Tag(begin="[CALLS]f[ARGS]", json_schema=AGE, end=""),
            Tag(begin="[CALLS]fg[ARGS]", json_schema=NONE, end=""),
        ),
        "forced": True,
        "trigger": "[CALLS]",
        "special_tokens": MARKS,
    }
    return Tags(**{**fields, **changes})  # type: ignore[arg-type]


def bracketed(**changes: object) -> Tags:
    """DeepSeek's form."""
    fields: dict[str, object] = {
        "tags": (
            Tag(begin="<|call|>f<|sep|>", json_schema=AGE, end="<|call|>"),
            Tag(begin="<|call|>fg<|sep|>\n", json_schema=NONE, end="\n<|call|>"),
        ),
        "opening": "<|begin|>",
        "separator": "\n",
        "closing": "<|end|>",
        "trigger": "<|begin|>",
    }
    return tags(**{**fields, **changes})


def compiled(tags: Tags, vocabulary: Vocabulary = VOCABULARY, backend: LlguidanceBackend = BACKEND) -> CompiledGrammar:
    (source,) = prepare(Constraint(tags=tags)).grammar.sources
    assert source.backend == "llguidance"
    return backend.compile(source)


def takes(grammar: CompiledGrammar, ids: Iterable[int]) -> bool:
    matcher = grammar.matcher()
    return follow(matcher, VOCABULARY, ids) and matcher.is_complete


CALL, OTHER = '[CALLS]f[ARGS]{"age": 7}', "[CALLS]fg[ARGS]{}"
BRACKETED = '<|begin|><|call|>f<|sep|>{"age": 7}<|call|><|end|>'
TWO = '<|begin|><|call|>f<|sep|>{"age": 7}<|call|>\n<|call|>fg<|sep|>\n{}\n<|call|><|end|>'


@pytest.mark.parametrize(("form", "yes"), [(tags, [CALL, OTHER, CALL + OTHER]), (bracketed, [BRACKETED, TWO])])
def test_forced_calls_have_them_as_tokens(form: Callable[..., Tags], yes: Sequence[str]) -> None:
    grammar = compiled(form())
    for text in yes:
        assert takes(grammar, ids_of(text)), text
        assert not takes(grammar, spelled(text)), text
        assert not takes(grammar, ids_of(f"Well. {text}"))
        assert not takes(grammar, ids_of(text.replace("7", '"7"').replace("{}", '{"a": 1}')))
    first = form().opening or "[CALLS]"
    assert allowed(grammar.matcher(), VOCABULARY) == {first.encode()}


@pytest.mark.parametrize(("form", "calls"), [(tags, [CALL, OTHER]), (bracketed, [BRACKETED, TWO])])
def test_free_text_ends_at_a_trigger_that_is_one(form: Callable[..., Tags], calls: Sequence[str]) -> None:
    grammar = compiled(form(forced=False))
    for call in calls:
        for text in ("", "Well.", call, f"Well. {call}", f"{call} Well. {call}", f"{call}{call}"):
            assert takes(grammar, ids_of(text)), text
        assert takes(grammar, spelled(f"Text about {call}")), "what is spelled is text"
        broken = call.replace("7", '"7"').replace("{}", '{"a": 1}')
        assert not takes(grammar, ids_of(broken))
        assert takes(grammar, spelled(broken))
    special = {token for token in allowed(grammar.matcher(), VOCABULARY) if token.decode(errors="replace") in MARKS}
    assert special == {form().trigger.encode()}


def test_at_most_counts_them_amid_free_text() -> None:
    grammar = compiled(tags(forced=False, at_most=1))
    assert takes(grammar, ids_of(f"a {CALL} b"))
    assert not takes(grammar, ids_of(f"a {CALL} b {OTHER}"))


def test_free_tokens_are_those_that_text_may_hold() -> None:
    """As in Harmony: the trigger is text within the beginning of a call."""
    form = tags(
        forced=False,
        trigger=" to=",
        tags=(Tag(begin="<|begin|>c to=f<|sep|>", json_schema=AGE, end="<|call|>"),),
        free_tokens=("<|begin|>", "<|end|>"),
    )
    grammar = compiled(form)
    call = '<|begin|>c to=f<|sep|>{"age": 7}<|call|>'
    for text in (
        "",
        "a",
        "<|begin|>",
        "<|begin|>a<|end|><|end|>b",
        f"<|begin|>a<|end|>{call}",
        f"{call}<|end|>a{call}",
    ):
        assert takes(grammar, ids_of(text)), text
    for text in ("<|sep|>", "a<|call|>", call.replace("7", "{}"), "<|begin|>c to=g<|sep|>{}<|call|>"):
        assert not takes(grammar, ids_of(text)), text


def test_one_that_ends_the_text_need_not_be_written() -> None:
    grammar = compiled(
        tags(tags=(Tag(begin="[CALLS]f[ARGS]", json_schema=AGE, end=EOS),), special_tokens=(*MARKS, EOS))
    )
    matcher = grammar.matcher()
    assert follow(matcher, VOCABULARY, ids_of(CALL))
    assert matcher.is_complete
    assert EOS.encode() in allowed(matcher, VOCABULARY)
    assert follow(matcher, VOCABULARY, ids_of(CALL)), "and another may follow"


def test_marks_that_a_vocabulary_has_not_are_text() -> None:
    backend = LlguidanceBackend(PLAIN)
    with pytest.raises(ValueError, match=r"no special token '\[CALLS\]'"):
        compiled(tags(), PLAIN, backend)
    for forced in (True, False):
        fitted = Constraint(tags=tags(forced=forced)).fitting(PLAIN_TOKENIZER.is_special)
        assert fitted.tags is not None
        assert fitted.tags.special_tokens == ()
        matcher = compiled(fitted.tags, PLAIN, backend).matcher()
        assert follow(matcher, PLAIN, PLAIN.encode(CALL.encode()))
        assert matcher.is_complete


def test_tags_without_any_stay_as_they_are() -> None:
    constraint = Constraint(tags=tags(special_tokens=()))
    assert constraint.fitting(PLAIN_TOKENIZER.is_special) is constraint


def test_the_longest_is_read_where_one_begins_as_another() -> None:
    names = ("<|a", "<|a|>")
    tokenizer = SmallTokenizer(special=(EOS, *names))
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    form = Tags(tags=(Tag(begin="<|a|>x<|a", json_schema=NONE, end=""),), forced=True, special_tokens=names)
    matcher = compiled(form, vocabulary, LlguidanceBackend(vocabulary)).matcher()
    assert matcher.forced()[:3] == [vocabulary.special_id("<|a|>"), ord("x"), vocabulary.special_id("<|a")]


def test_forced_tokens_go_through_them() -> None:
    matcher = compiled(bracketed(tags=bracketed().tags[:1])).matcher()
    forced = matcher.forced()
    assert forced[:4] == ids_of("<|begin|><|call|>f<|sep|>")
    for token in forced:
        assert mask_of(matcher, VOCABULARY) == {token}
        assert matcher.accept(token)
    rest = b"".join(VOCABULARY.tokens[token] for token in forced).partition(b"<|sep|>")[2]
    assert follow(matcher, VOCABULARY, spelled('{"age": 7}'.removeprefix(rest.decode())))
    assert matcher.forced()[:1] == ids_of("<|call|>")


def test_rollback_and_fork_go_through_them() -> None:
    grammar, ids = compiled(tags(forced=False)), ids_of(f"a {CALL}{OTHER} b")
    matcher = grammar.matcher()
    masks = []
    for token in ids:
        masks.append(mask_of(matcher, VOCABULARY))
        assert matcher.accept(token)
    for back in range(1, len(ids) + 1):
        matcher.rollback(1)
        assert mask_of(matcher, VOCABULARY) == masks[-back]
        assert matcher.count_valid(ids[-back:]) == back
    for at, token in enumerate(ids):
        other = matcher.fork()
        assert other.count_valid(ids[at:]) == len(ids) - at
        assert other.accept(token)
        assert mask_of(matcher, VOCABULARY) == masks[at], "the first one has not moved"
        assert matcher.accept(token)


def test_endings_have_them() -> None:
    grammar = compiled(bracketed())
    matcher = grammar.matcher()
    ending = find_ending(matcher, VOCABULARY)
    assert ending is not None
    assert takes(grammar, ending)
    kept = Ending(matcher, VOCABULARY, ending)
    for token in ids_of(BRACKETED):
        assert kept.propose(token) is not None
        assert matcher.accept(token)
        kept.commit()
        ahead = matcher.fork()
        assert kept.tokens is not None
        assert all(map(ahead.accept, kept.tokens))
        assert ahead.is_complete


def test_text_is_closed_in_time_with_them() -> None:
    grammar = compiled(bracketed())
    ending = find_ending(grammar.matcher(), VOCABULARY)
    assert ending is not None
    most = len(ending) + 6
    text = ConstrainedText(grammar, VOCABULARY, Rules(), most=most, ending=ending)
    while not text.is_over:
        if text.force(most=64):
            continue
        nines = [token for token in mask_of(text.matcher, VOCABULARY) if VOCABULARY.tokens[token] == b"9"]
        token = text.settle(nines[0] if nines else min(mask_of(text.matcher, VOCABULARY)))
        assert token is not None
        assert text.take(token)
    assert text.num_tokens <= most
    assert text.is_complete


def test_stop_ids_of_the_request_end_a_text_at_one() -> None:
    stop = VOCABULARY.special_id("[CALLS]")
    assert stop is not None
    text = ConstrainedText(compiled(tags()), VOCABULARY, Rules(stop_ids=(stop,)))
    assert text.force(most=8) == [], "a stop id is not forced"


@pytest.mark.parametrize("form", [tags(), bracketed(), tags(free_tokens=("<|end|>",), special_tokens=())])
def test_xgrammar_is_not_asked_for_them(form: Tags) -> None:
    with pytest.raises(GrammarRefused, match="the form of these calls cannot be followed by backend 'xgrammar'"):
        prepare(Constraint(tags=form, backend="xgrammar"))
    unused = tags(tags=(Tag(begin="f(", json_schema=NONE, end=")"),))
    assert prepare(Constraint(tags=unused, backend="xgrammar")).grammar.sources[0].backend == "xgrammar"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trigger": "f[ARGS]", "tags": tags().tags[:1]}, "one special token, or text"),
        ({"trigger": "f", "tags": tags().tags[:1]}, "free text may not hold"),
        ({"trigger": "[ARGS]"}, "in the beginning of not every call"),
        ({"separator": "\ud800"}, "surrogate"),
    ],
)
def test_what_cannot_be_told_from_free_text_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises((GrammarRefused, Unsupported), match=why):
        prepare(Constraint(tags=tags(**{"forced": False, **changes})))
