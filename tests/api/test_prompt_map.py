"""From a token back to the message it stands in: all tokens of all kinds of chats, against what the template wrote."""

from functools import partial
from typing import Any

import pytest

from tests.tiny import CHAT_TEMPLATE
from trunkline.api.documents import lay_out
from trunkline.api.prompt import render
from trunkline.api.prompt_map import Place, ReadPrompt, Source, source_spans
from trunkline.api.protocol import ChatRequest
from trunkline.api.template import ChatTemplate
from trunkline.models.tokenizer import Tokenizer

STRIPPING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/]{% endfor %}"
SYSTEM_LAST = (
    "{% for m in messages if m.role != 'system' %}<{{ m.content }}>{% endfor %}"
    "{% for m in messages if m.role == 'system' %}[{{ m.content }}]{% endfor %}"
)
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
SHOUTING = "{% for m in messages %}{{ m.content | upper | length }}{{ m.content }}{% endfor %}"

PARTS = [{"type": "text", "text": "  two"}, {"type": "text", "text": "parts "}]


def read(tokenizer: Tokenizer, template: str, *contents: Any, roles: str = "sua") -> ReadPrompt:
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [
        {"role": names[role], "content": content}
        for role, content in zip(roles * len(contents), contents, strict=False)
    ]
    chat = ChatRequest.parse({"messages": messages})
    compiled = ChatTemplate(template, special_tokens={})
    text = render(compiled, chat)
    spans = partial(source_spans, chat, text, partial(render, compiled))
    return ReadPrompt(tokenizer.encode(text, add_special_tokens=False), tokenizer, text=text, spans=spans)


def by_message(prompt: ReadPrompt) -> dict[int | None, str]:
    """All text of each message, and of the template, put together from the places of the tokens."""
    found: dict[int | None, bytes] = {}
    for position, token_id in enumerate(prompt.token_ids):
        place = prompt.place(position)
        assert place is not None
        message = place.source.message if place.source else None
        found[message] = found.get(message, b"") + prompt.tokenizer.token_bytes(token_id)
    return {message: data.decode() for message, data in found.items()}


def test_every_token_of_a_chat(tokenizer: Tokenizer) -> None:
    prompt = read(tokenizer, CHAT_TEMPLATE, "Be kind. ☃", "hello world", "user\n", "hello world", roles="suau")
    assert by_message(prompt) == {
        None: "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n\n<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
        0: "Be kind. ☃",
        1: "hello world",
        2: "user",
        3: "hello world",
    }


def test_characters_are_those_of_the_message(tokenizer: Tokenizer) -> None:
    content = " \n ☃é the"
    prompt = read(tokenizer, STRIPPING, content, roles="u")
    for position, token_id in enumerate(prompt.token_ids):
        place = prompt.place(position)
        assert place is not None
        if place.source is not None:
            try:
                text = tokenizer.token_bytes(token_id).decode()
            except UnicodeDecodeError:  # one byte of several
                continue
            assert content[place.character :].startswith(text)
            assert place.words == f"character {place.character} of messages[0] (user)"
    assert by_message(prompt)[0] == "☃é the"


def test_parts_and_messages_without_text(tokenizer: Tokenizer) -> None:
    prompt = read(tokenizer, STRIPPING, PARTS, "", None, [{"type": "text", "text": " "}], "end", roles="suaua")
    found = by_message(prompt)
    assert found.keys() == {None, 0, 4}
    assert found[0] == "two\nparts"
    assert found[4] == "end"


def test_template_that_moves_messages(tokenizer: Tokenizer) -> None:
    prompt = read(tokenizer, SYSTEM_LAST, "system text", "question")
    assert by_message(prompt) == {None: "<>[]", 0: "system text", 1: "question"}


def test_system_messages_that_were_merged(tokenizer: Tokenizer) -> None:
    prompt = read(tokenizer, ONE_SYSTEM, "first", "question", "second", roles="sus")
    assert by_message(prompt) == {None: "system: \n\n\nuser: \n", 0: "first", 1: "question", 2: "second"}


def test_places_in_the_template(tokenizer: Tokenizer) -> None:
    prompt = read(tokenizer, STRIPPING, "a", "b")
    words = dict.fromkeys(place.words for i in range(len(prompt.token_ids)) if (place := prompt.place(i)))
    assert list(words) == [
        "the template's own text before messages[0]",
        "character 0 of messages[0] (system)",
        "the template's own text between messages[0] and messages[1]",
        "character 0 of messages[1] (user)",
        "the template's own text after messages[1]",
    ]


@pytest.mark.parametrize("template", [SHOUTING, "{% for m in messages %}{{ m.content[1:] }}{% endfor %}"])
def test_template_that_looks_into_the_text(tokenizer: Tokenizer, template: str) -> None:
    prompt = read(tokenizer, template, "hello", "world")
    assert prompt.place(0) is None
    assert prompt.num_tokens_until(0) == len(prompt.token_ids)


def test_text_with_our_marks_in_it(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, STRIPPING, "\ufdd1\ufde0\ufdd1x\ufdd2").place(3) is None


def test_no_messages_no_places(tokenizer: Tokenizer) -> None:
    assert ReadPrompt([1, 2, 3], tokenizer).place(1) is None


def test_tokens_that_do_not_spell_the_text(tokenizer: Tokenizer) -> None:
    assert ReadPrompt([1, 2, 3], tokenizer, text="other", spans=list).place(1) is None


def test_tokens_before_the_text(tokenizer: Tokenizer) -> None:
    plain = read(tokenizer, STRIPPING, "hello", roles="u")
    begun = ReadPrompt([65, *plain.token_ids], tokenizer, text="[user]hello[/]", spans=plain._find_spans)
    for position in range(len(plain.token_ids)):
        assert begun.place(position + 1) == plain.place(position)


def test_tokens_until_the_end_of_a_message(tokenizer: Tokenizer) -> None:
    prompt = read(tokenizer, CHAT_TEMPLATE, "Be kind.", "hello world ", "", "bye", roles="suau")
    texts = [
        tokenizer.decode(prompt.token_ids[: prompt.num_tokens_until(i)], skip_special_tokens=False) for i in range(4)
    ]
    assert [text.rsplit("\n", 1)[1] for text in texts] == ["Be kind.", "hello world", "hello world", "bye"]


def test_looking_happens_once_and_only_if_asked(tokenizer: Tokenizer) -> None:
    looked = []
    prompt = ReadPrompt([104, 105], tokenizer, text="hi", spans=lambda: looked.append(1))
    assert not looked
    assert prompt.place(0) is prompt.place(1) is None
    assert len(looked) == 1


def test_ten_thousand_messages(tokenizer: Tokenizer) -> None:
    contents = ["hello"] * 10_000
    prompt = read(tokenizer, STRIPPING, *contents, roles="ua")
    last = prompt.place(len(prompt.token_ids) - 4)
    assert last is not None
    assert last.source == Source("messages[9999]", message=9999, role="assistant")


DOCUMENTS: list[Any] = [
    {"title": "Opening hours", "text": " from nine to five "},
    "closed on Sundays",
    {"text": "the third", "author": "unknown"},
]
KNOWS_DOCUMENTS = (
    "{% for d in documents %}<{{ d.title }}|{{ d.text }}>{% endfor %}"
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, KNOWS_DOCUMENTS, NO_SYSTEM, ONE_SYSTEM])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_documents_are_told_by_the_indices_they_were_sent_with(
    tokenizer: Tokenizer, template: str, order: list[int]
) -> None:
    chat = ChatRequest.parse({"messages": [{"role": "user", "content": "When?"}], "documents": DOCUMENTS})
    compiled = ChatTemplate(template, special_tokens={})
    layout = lay_out(partial(render, compiled), chat, template_knows_documents="documents" in template)
    text = layout.text(order)
    spans = partial(source_spans, chat, text, partial(layout.text, order))
    prompt = ReadPrompt(tokenizer.encode(text, add_special_tokens=False), tokenizer, text=text, spans=spans)
    found: dict[str, bytes] = {}
    for position, token_id in enumerate(prompt.token_ids):
        place = prompt.place(position)
        assert place is not None
        if place.source is not None:
            found[place.source.name] = found.get(place.source.name, b"") + tokenizer.token_bytes(token_id)
    assert {name: data.decode() for name, data in found.items()} == {
        "documents[0]": "from nine to five",
        "the title of documents[0]": "Opening hours",
        "documents[1]": "closed on Sundays",
        "documents[2]": "the third",
        "messages[0]": "When?",
    }
    nine = text.index("nine")
    at = next(
        i
        for i in range(len(prompt.token_ids))
        if len(tokenizer.decode(prompt.token_ids[:i], skip_special_tokens=False)) == nine
    )
    assert prompt.place(at) == Place(Source("documents[0]", document=0), 6, "character 6 of documents[0]"), (
        "the blank at its beginning counts"
    )


def test_places_between_documents(tokenizer: Tokenizer) -> None:
    chat = ChatRequest.parse({"messages": [{"role": "user", "content": "When?"}], "documents": ["a", "b"]})
    compiled = ChatTemplate(CHAT_TEMPLATE, special_tokens={})
    layout = lay_out(partial(render, compiled), chat, template_knows_documents=False)
    text = layout.text([1, 0])
    spans = partial(source_spans, chat, text, partial(layout.text, [1, 0]))
    prompt = ReadPrompt(tokenizer.encode(text, add_special_tokens=False), tokenizer, text=text, spans=spans)
    words = dict.fromkeys(place.words for i in range(len(prompt.token_ids)) if (place := prompt.place(i)))
    assert list(words) == [
        "the template's own text before documents[1]",
        "character 0 of documents[1]",
        "the template's own text between documents[1] and documents[0]",
        "character 0 of documents[0]",
        "the template's own text between documents[0] and messages[0]",
        *(f"character {i} of messages[0] (user)" for i in (0, 1, 3, 4)),
        "the template's own text after messages[0]",
    ]
    assert prompt.num_tokens_until(0) == len(
        tokenizer.encode(text[: text.index("When?") + 5], add_special_tokens=False)
    )


def test_places_in_a_prompt_without_its_beginning(tokenizer: Tokenizer) -> None:
    """What is left out shifts nothing: each token that is read stands where it stood."""
    whole = read(tokenizer, CHAT_TEMPLATE, "Be kind. ☃", "hello world", roles="su")
    places = [whole.place(at) for at in range(len(whole.token_ids))]
    ends = [whole.num_tokens_until(message) for message in range(2)]
    for longest in range(1, len(whole.token_ids) + 2):
        cut = ReadPrompt(whole.token_ids, tokenizer, text=whole.text, spans=whole._find_spans, longest=longest)
        assert cut.token_ids == whole.token_ids[-longest:]
        assert cut.num_cut == len(whole.token_ids) - len(cut.token_ids)
        assert [cut.place(at) for at in range(len(cut.token_ids))] == places[-longest:]
        assert [cut.num_tokens_until(message) for message in range(2)] == [max(0, end - cut.num_cut) for end in ends]
