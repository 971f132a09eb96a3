"""XGrammar's structural tags: free text, and tags in it whose contents follow schemas, expressions and grammars.

    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<a>"], "tags": [
        {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": {…}}, "end": "</a>"}]}}

The library's own reading of schemas and regular expressions drops what it does not know. So each of them is read as all
others are, and replaced by the grammar that xgrammar_emitter writes for it. Formats that are not listed here are
refused, as are tokens by number or name: a text is what is constrained, whatever the vocabulary. The older spelling,
`structures` and `triggers`, is turned into the present one, and tags in a list of tags need no `type`.
"""

import json
from collections.abc import Callable
from typing import Any

from trunkline.constraint import GrammarSource
from trunkline.grammar.algebra import canonical
from trunkline.grammar.backends.xgrammar import emitter as xgrammar_emitter
from trunkline.grammar.interface import InvalidSchema, Unsupported
from trunkline.grammar.schema import meta, normalize

DEEPEST = 32
KEYWORD = "structural_tag"

# Format -> its fields, and what each holds: "text", "texts", "format", "formats", "tags", "flag", "count".
FORMATS: dict[str, dict[str, str]] = {
    "const_string": {"value": "text"},
    "any_text": {"excludes": "texts", "max_tokens": "count", "max_chars": "count"},
    "json_schema": {"json_schema": "schema", "style": "style", "max_whitespace_cnt": "count"},
    "regex": {"pattern": "text"},
    "grammar": {"grammar": "text", "syntax": "text"},
    "sequence": {"elements": "formats"},
    "or": {"elements": "formats"},
    "optional": {"content": "format"},
    "plus": {"content": "format"},
    "star": {"content": "format"},
    "repeat": {"content": "format", "min": "count", "max": "count"},
    "tag": {"begin": "text", "content": "format", "end": "text or texts"},
    "triggered_tags": {
        "triggers": "texts",
        "tags": "tags",
        "at_least_one": "flag",
        "stop_after_first": "flag",
        "excludes": "texts",
    },
    "tags_with_separator": {"tags": "tags", "separator": "text", "at_least_one": "flag", "stop_after_first": "flag"},
}


def emit(text: str, *, compact: bool = False) -> GrammarSource:
    """A structural tag, as JSON text; `compact`: all JSON in it. Raises InvalidSchema, and Unsupported for what the library might not be true
    to."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSchema("", KEYWORD, f"it is no JSON: {error}") from None
    if not isinstance(tag, dict):
        raise InvalidSchema("", KEYWORD, "it is no object")
    if "structures" in tag:
        tag = _from_legacy(tag)
    if "format" not in tag:
        raise InvalidSchema("", "format", "'format' is missing")
    sound = {"type": "structural_tag", "format": _sound(tag["format"], "/format", 0, compact)}
    return GrammarSource("xgrammar", "structural_tag", json.dumps(sound, ensure_ascii=False), is_risky=True)


def _from_legacy(tag: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(one, dict) for one in structures):
        raise InvalidSchema("/structures", "structures", "it is no list of objects")
    tags = [
        {
            "type": "tag",
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
            "end": one.get("end"),
        }
        for one in structures
    ]
    return {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


def _sound(one: Any, pointer: str, depth: int, compact: bool) -> dict[str, Any]:
    """The format with every schema and expression replaced."""
    if depth > DEEPEST:
        raise InvalidSchema(pointer, KEYWORD, f"it is nested more than {DEEPEST} deep")
    if not isinstance(one, dict):
        raise InvalidSchema(pointer, KEYWORD, "a format is an object")
    kind = one.get("type")
    known = FORMATS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise Unsupported(pointer, "type", f"formats that are known to be followed exactly are {', '.join(FORMATS)}")
    made: dict[str, Any] = {"type": kind}
    for field, value in one.items():
        if field == "type":
            continue
        if field not in known:
            raise Unsupported(pointer, field, f"a {kind} has {', '.join(known)}")
        made[field] = _field(known[field], value, f"{pointer}/{field}", field, depth, compact)
    replace = REPLACED.get(str(kind))
    return replace(made, pointer, compact) if replace else made


def _field(what: str, value: Any, pointer: str, keyword: str, depth: int, compact: bool) -> Any:
    """A field's value, checked. Raises InvalidSchema."""
    if what == "format":
        return _sound(value, pointer, depth + 1, compact)
    if what in ("formats", "tags"):
        if not isinstance(value, list) or not value:
            raise InvalidSchema(pointer, keyword, f"it is no list of {what}")
        if what == "tags":  # where nothing else may stand, the library does not need to be told what it is
            value = [{"type": "tag", **one} if isinstance(one, dict) else one for one in value]
        return [_sound(one, f"{pointer}/{index}", depth + 1, compact) for index, one in enumerate(value)]
    is_texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
    fits = {
        "schema": isinstance(value, dict | bool),
        "style": value == "json",
        "text": isinstance(value, str),
        "texts": is_texts,
        "text or texts": isinstance(value, str) or is_texts,
        "flag": isinstance(value, bool),
        "count": value is None or (isinstance(value, int) and not isinstance(value, bool)),
    }
    if what == "style" and not fits[what]:
        raise Unsupported(pointer, keyword, "only JSON is enforced exactly")
    if not fits[what]:
        raise InvalidSchema(pointer, keyword, f"it is no {what}")
    return value


def _schema(made: dict[str, Any], pointer: str, compact: bool) -> dict[str, Any]:
    if "json_schema" not in made:
        raise InvalidSchema(pointer, "json_schema", "'json_schema' is missing")
    place = f"{pointer}/json_schema"
    blanks = made.get("max_whitespace_cnt")
    try:
        schema = meta.check(made["json_schema"])
        forms = canonical.canonicalize(normalize.normalize(schema)).forms
        source = xgrammar_emitter.emit(forms, compact=compact or (blanks is not None and blanks < 1))
    except (Unsupported, InvalidSchema) as error:
        inner, keyword, reason = error.finding
        raise type(error)(place + inner, keyword, reason) from None
    return {"type": "grammar", "grammar": source.text}


def _regex(made: dict[str, Any], pointer: str, compact: bool) -> dict[str, Any]:
    if "pattern" not in made:
        raise InvalidSchema(pointer, "pattern", "'pattern' is missing")
    try:
        source = xgrammar_emitter.emit_regex(made["pattern"])
    except (Unsupported, InvalidSchema) as error:
        raise type(error)(f"{pointer}/pattern", "pattern", error.finding.reason) from None
    return {"type": "grammar", "grammar": source.text}


def _grammar(made: dict[str, Any], pointer: str, compact: bool) -> dict[str, Any]:
    if made.get("syntax", "ebnf") != "ebnf":
        raise Unsupported(f"{pointer}/syntax", "syntax", "only ebnf is taken inside a structural tag")
    return made


# Formats that another one stands in for.
REPLACED: dict[str, Callable[[dict[str, Any], str, bool], dict[str, Any]]] = {
    "json_schema": _schema,
    "regex": _regex,
    "grammar": _grammar,
}
