"""What a parser makes of a text, however the text is cut."""

from collections.abc import Iterable
from typing import NamedTuple

from trunkline.api.tool_parsers.base import Arguments, CallEnd, CallStart, Content, Event, ToolNames, ToolParser


class Call(NamedTuple):
    """A call as a client puts it together."""

    name: str
    arguments: str
    is_complete: bool = True


class Reading(NamedTuple):
    """All that came out."""

    content: str
    calls: list[Call]


def together(events: Iterable[Event]) -> Reading:
    """Put events together; asserts their order: calls one after the other, numbered from 0, each with an id of its own."""
    content = ""
    calls: list[Call] = []
    ids: set[str] = set()
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case CallStart(index, call_id, name):
                assert index == len(calls)
                ids.add(call_id)
                calls.append(Call(name, "", False))
            case Arguments(index, fragment):
                assert index == len(calls) - 1
                assert not calls[-1].is_complete
                assert fragment
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + fragment)
            case CallEnd(index):
                assert index == len(calls) - 1
                calls[-1] = calls[-1]._replace(is_complete=True)
    assert len(ids) == len(calls)
    return Reading(content, calls)


def read(parser: type[ToolParser], *pieces: str, names: ToolNames = ToolNames()) -> Reading:  # noqa: B008
    reader = parser(names)
    return together([event for piece in pieces for event in reader.push(piece)] + reader.finish())


def read_in_all_splits(parser: type[ToolParser], text: str, names: ToolNames = ToolNames()) -> Reading:  # noqa: B008
    """Read at once; asserts that every split into two, and single characters, give the same."""
    whole = read(parser, text, names=names)
    for at in range(len(text) + 1):
        assert read(parser, text[:at], text[at:], names=names) == whole, (text[:at], text[at:])
    assert read(parser, *text, names=names) == whole
    return whole
