"""What a text must follow: `Constraint`, which callers make, and `Grammar`, which the engine gets. No grammar is read here.

SamplingParams(constraint=Constraint(json_schema={"type": "object", "properties": {"age": {"type": "integer"}}}))
SamplingParams(constraint=Constraint(choice=("yes", "no")))
SamplingParams(constraint=Constraint(regex="[0-9]{3}"))
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trunkline.config import GRAMMAR_BACKENDS, UNSUPPORTED_POLICIES
from trunkline.errors import InvalidParameter

KEY_ORDERS = ("schema", "any")
KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag", "tags")


class Tag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`begin`, then JSON that follows `json_schema`, then `end`. Text, but for `Tags.special_tokens` in it."""

    begin: str
    json_schema: str  # JSON text; its `properties` in the order in which they are to be written
    end: str
    where: str = ""  # of the schema in the request, for errors: "tools[0].function.parameters"
    name: str = ""  # of the function, for errors
    strict: bool = False  # what cannot be enforced is refused, whatever the constraint and the server say


class Tags(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tool calls in a text: opening, tags, closing.

    forced    opening tag (separator tag)* closing, and nothing else. With `instead`: either that, or JSON that follows
              its schema, and nothing else
    else      free text; whenever it holds `trigger`, that is in the beginning of opening, tags and closing: what comes
              after it there must follow, and free text may come again. (Every call's beginning holds the trigger, and has
              the same before it)

    special_tokens  where one of these stands in the texts of a call, it is that one token, and cannot be spelled with
                    others. Those that a model's vocabulary does not have as special tokens are text. One that ends a text
                    need not be written where the text ends
    free_tokens     special tokens that free text may hold: there are no others in it, but for the trigger
    """

    tags: tuple[Tag, ...]
    forced: bool
    trigger: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    at_most: int | None = None  # tags in all; None: any number
    instead: Tag | None = None  # only if forced; without begin and end
    special_tokens: tuple[str, ...] = ()
    free_tokens: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """All that is written around the JSON."""
        own = [self.opening, self.separator, self.closing]
        return own + [text for tag in self.tags for text in (tag.begin, tag.end)]


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text must follow. Exactly one kind is given, the first eight fields.

    json_schema       JSON that is valid under this schema (draft 4 to 2020-12): a mapping, true or false, its JSON text, or a
                      pydantic model; kept as JSON text
    json_object       any JSON object
    regex             the whole text matches (ECMA-262 syntax; most lookarounds, no backreferences)
    choice            the text is one of these strings
    ebnf              a context-free grammar in GBNF, as llama.cpp and XGrammar write it; starts with `root`
    lark              a context-free grammar in Lark's syntax, as llguidance reads it; starts with `start`
    structural_tag    XGrammar's structural tag, JSON text
    tags              tool calls
    backend           one of GRAMMAR_BACKENDS; "auto": the first that is sure to be true to it
    unsupported       what to do with a keyword that cannot be enforced: one of UNSUPPORTED_POLICIES. "error" refuses the
                      request; "validate" leaves it out and checks the finished text. None: as the server says
    strict            "error" whatever the server says
    compact           JSON without any whitespace; else the text chooses, once, between that and a space after each comma and colon
    key_order         one of KEY_ORDERS: in which order the keys of JSON objects are written. "schema": that of `properties`, and
                      then the others, so that a model can be made to reason before it answers; "any": the model's own
    close_on_length   end the text in time: when as many tokens are left as the shortest known legal ending has, only
                      that ending is allowed
    after             the text begins to follow once this has been written, e.g. "</think>"; "": at once
    where             the parameter, for errors: "response_format"
    name              what the caller calls the schema, for errors

    Raises InvalidParameter if not exactly one kind is given, or one has the wrong type.
    """

    json_schema: Any = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    ebnf: str | None = None
    lark: str | None = None
    structural_tag: Any = None
    tags: Tags | None = None

    backend: str = "auto"
    unsupported: str | None = None
    strict: bool = False
    compact: bool = False
    key_order: str = "schema"
    close_on_length: bool = False
    after: str = ""
    where: str = "constraint"
    name: str = ""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if self.json_schema is False:
            given.append("json_schema")
        if len(given) != 1:
            seen = " and ".join(given) if given else "nothing"
            raise InvalidParameter(
                f"'{self.where}' gives {seen}; it must give exactly one of {', '.join(KINDS)}.", param=self.where
            )
        for kind in ("json_schema", "structural_tag"):
            value = getattr(self, kind)
            if kind in given and not isinstance(value, str):
                msgspec.structs.force_setattr(self, kind, self._to_json(kind, value))
        for kind in ("regex", "ebnf", "lark"):
            if kind in given and not isinstance(getattr(self, kind), str):
                raise InvalidParameter.of(f"{self.where}.{kind}", getattr(self, kind), "a string")
        if "choice" in given:
            self._check_choice()
        self._check_options()

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False)

    def fitting(self, is_special: Callable[[str], bool]) -> "Constraint":
        """For one vocabulary: its tags with those special tokens that are such in it."""
        tags = self.tags
        if tags is None or not (tags.special_tokens or tags.free_tokens):
            return self
        special, free = (tuple(filter(is_special, texts)) for texts in (tags.special_tokens, tags.free_tokens))
        tags = msgspec.structs.replace(tags, special_tokens=special, free_tokens=free)
        return msgspec.structs.replace(self, tags=tags)

    def _to_json(self, kind: str, value: Any) -> str:
        if kind == "json_schema" and hasattr(value, "model_json_schema"):
            value = value.model_json_schema()
        if not isinstance(value, Mapping | bool):
            raise InvalidParameter.of(
                f"{self.where}.{kind}", value, "a JSON object" + (" or a boolean" * (kind == "json_schema"))
            )
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameter(f"'{self.where}.{kind}' is no JSON: {error}.", param=self.where) from None

    def _check_choice(self) -> None:
        choice: Any = self.choice
        if isinstance(choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(choice))
        if not isinstance(choice, Sequence) or isinstance(choice, str) or not choice:
            raise InvalidParameter.of(f"{self.where}.choice", choice, "a list of at least one string")
        for text in choice:
            if not isinstance(text, str):
                raise InvalidParameter.of(f"{self.where}.choice", text, "strings")

    def _check_options(self) -> None:
        if self.backend not in GRAMMAR_BACKENDS:
            raise InvalidParameter.of("grammar_backend", self.backend, f"one of {', '.join(GRAMMAR_BACKENDS)}")
        if self.unsupported is not None and self.unsupported not in UNSUPPORTED_POLICIES:
            raise InvalidParameter.of(
                "grammar_unsupported", self.unsupported, f"one of {', '.join(UNSUPPORTED_POLICIES)}"
            )
        if self.key_order not in KEY_ORDERS:
            raise InvalidParameter.of("key_order", self.key_order, f"one of {', '.join(KEY_ORDERS)}")
        for name in ("strict", "compact", "close_on_length"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter.of(name, getattr(self, name), "true or false")


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """What one backend compiles.

    backend   "llguidance", "xgrammar" or "outlines"
    kind      llguidance: "grammar" (its own JSON, that holds Lark) and "ebnf"; xgrammar: "ebnf" and "structural_tag";
              outlines: "regex"
    text      in that backend's own language
    is_risky  compiling it may take more time or memory than we would give: try it in a child process first
    """

    backend: str
    kind: str
    text: str
    is_risky: bool = False


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint as the engine gets it. Equal grammars compile to the same thing.

    sources          in order of preference; the next is tried if a backend refuses one
    close_on_length  as in Constraint
    after            as in Constraint
    where            as in Constraint
    """

    sources: tuple[GrammarSource, ...]
    close_on_length: bool = False
    after: str = ""
    where: str = "constraint"
