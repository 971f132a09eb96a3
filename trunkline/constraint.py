"""What a text must follow: `Constraint`, which callers make, and `Grammar`, which the engine gets. No grammar is read here.

SamplingParams(constraint=Constraint(json_schema={"type": "object", "properties": {"age": {"type": "integer"}}}))
SamplingParams(constraint=Constraint(choice=("yes", "no")))
SamplingParams(constraint=Constraint(regex="[0-9]{3}"))
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trunkline.config import GRAMMAR_BACKENDS, UNSUPPORTED_POLICIES
from trunkline.errors import InvalidParameter

KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag", "tags")


class Tag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`begin`, then JSON that follows `json_schema`, then `end`. Written as they stand: text, not special tokens."""

    begin: str
    json_schema: str  # JSON text; keys in the order in which they are to be written
    end: str
    where: str = ""  # of the schema in the request, for errors: "tools[0].function.parameters"


class Tags(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tool calls in a text: opening, tags, closing.

    forced    opening tag (separator tag)* closing, and nothing else
    else      free text; whenever it holds `trigger`, that is the beginning of opening, tags and closing (which begin
              with `trigger`), and free text may follow again
    """

    tags: tuple[Tag, ...]
    forced: bool
    trigger: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    at_most: int | None = None  # tags in all; None: any number


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text must follow. Exactly one kind is given, the first eight fields.

    json_schema       JSON that is valid under this schema (draft 4 to 2020-12): a mapping, true or false, or its JSON text;
                      kept as JSON text. Keys are written in the order in which `properties` names them
    json_object       any JSON object
    regex             the whole text matches (ECMA-262 syntax, no lookaround, no backreferences)
    choice            the text is one of these strings
    ebnf              a context-free grammar in GBNF, as llama.cpp and XGrammar write it; starts with `root`
    lark              a context-free grammar in Lark's syntax, as llguidance reads it; starts with `start`
    structural_tag    XGrammar's structural tag, JSON text
    tags              tool calls
    backend           one of GRAMMAR_BACKENDS; "auto": the first that is sure to be true to it
    unsupported       what to do with a keyword that cannot be enforced: one of UNSUPPORTED_POLICIES. "error" refuses the
                      request; "validate" leaves it out and checks the finished text. None: as the server says
    strict            "error" whatever the server says
    compact           JSON without any whitespace; else at most two characters of it between two tokens of JSON
    close_on_length   end the text in time: when as many tokens are left as the shortest known legal ending has, only
                      that ending is allowed
    after             the text begins to follow once this has been written, e.g. "</think>"; "": at once
    where             the parameter, for errors: "response_format"

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
    close_on_length: bool = False
    after: str = ""
    where: str = "constraint"

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

    def _to_json(self, kind: str, value: Any) -> str:
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
        for name in ("strict", "compact", "close_on_length"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter.of(name, getattr(self, name), "true or false")


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """What one backend compiles.

    backend   "llguidance", "xgrammar" or "outlines"
    kind      llguidance: "grammar" (its own JSON, that holds JSON schema and Lark); xgrammar: "json_schema", "ebnf", "regex",
              "structural_tag"; outlines: "regex"
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
