"""What a request says its answer must follow, in every spelling, as one `Constraint`.

    OpenAI    response_format
    vLLM      structured_outputs, guided_json, guided_json_object, guided_regex, guided_choice, guided_grammar, structural_tag,
              guided_decoding_backend
    SGLang    json_schema, regex, ebnf        llama.cpp   json_schema, grammar; response_format {"type": "json_object", "schema": …}
    ours      grammar_backend, grammar_unsupported, close_on_length, compact_json, key_order

One of them at a time. Types are checked here; what a schema or grammar means is checked by `grammar.prepare`. Knows no engine.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trunkline.api.tools import NAME, NAME_ALLOWED, ToolUse, read_tools
from trunkline.config import GRAMMAR_BACKEND_ALIASES, GRAMMAR_BACKENDS, ApiConfig
from trunkline.constraint import Constraint
from trunkline.errors import LONGEST_SHOWN, InvalidParameter, shown

MAX_CHOICES = 10_000  # strings in `choice`

_RULE = re.compile(r"\s*[?!]*[A-Za-z_][\w-]*(?:\.\d+|\{[^}]*\}|\[[^\]]*\]|::_)*\s*(::=|:)")  # the beginning of one


def _one_sentence(kind: str, allowed: str) -> WrapValidator:
    """Pydantic would tell of each alternative of a union, or of a pattern, in words of its own."""

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            raise PydanticCustomError(kind, "Input should be {allowed}", {"allowed": allowed}) from None

    return WrapValidator(check)


Schema = Annotated[dict[str, Any] | bool, _one_sentence("schema", "a JSON schema: an object, true or false")]
SchemaOrText = Annotated[
    dict[str, Any] | bool | str, _one_sentence("schema", "a JSON schema: an object, true, false, or its JSON text")
]
TagOrText = Annotated[
    dict[str, Any] | str, _one_sentence("structural_tag", "a structural tag: an object, or its JSON text")
]


def _counted(noun: str) -> WrapValidator:
    """How many there may be, in one sentence. What is wrong with one of them is told as ever."""

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)[0]
            match found["type"]:
                case "too_short":
                    allowed = f"a list of at least {found['ctx']['min_length']} {noun}"
                case "too_long":
                    allowed = f"a list of at most {found['ctx']['max_length']} {noun}s"
                case _:
                    raise
            raise PydanticCustomError("count", "Input should be {allowed}", {"allowed": allowed}) from None

    return WrapValidator(check)


Choice = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), _counted("string")]

UNKNOWN_NAME = "unknown_name"  # pydantic's type of the error below


class Closed(BaseModel):
    """Knows all its names: a typo in an optional one would free the text. It is told before anything that is missing for it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in value:
                if name not in known:
                    raise PydanticCustomError(
                        UNKNOWN_NAME, "there are {known}", {"name": name, "known": ", ".join(known)}
                    )
        return value


class JsonSchemaFormat(Closed):
    """A schema by its name, as OpenAI has it. `description` changes nothing: what the model is to know stands in the messages."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$"), _one_sentence("name", NAME_ALLOWED)]
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class TagStructure(Closed):
    """Of vLLM's first spelling of structural tags: JSON that follows `schema`, between two texts."""

    begin: str
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    end: str


class ResponseFormat(Closed):
    """What the answer is: any text, any JSON object, JSON that follows a schema, or text with tags in it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    format: dict[str, Any] | None = None
    structures: Annotated[list[TagStructure], Field(min_length=1), _counted("structure")] | None = None
    triggers: list[str] | None = None

    def constraint(self) -> dict[str, Any] | None:
        """Fields of a Constraint; None if any text will do. Raises InvalidParameter for a field that `type` does not have."""
        fields = _FIELDS_OF_FORMAT[self.type]
        for name in ("json_schema", "schema", "format", "structures", "triggers"):
            if name not in fields and getattr(self, "schema_" if name == "schema" else name) is not None:
                place = (
                    "has it in 'response_format.json_schema.schema', beside a 'name'"
                    if (self.type, name) == ("json_schema", "schema")
                    else "has no such field"
                )
                raise InvalidParameter(
                    f"'response_format.{name}' is given, but a response_format of type {self.type!r} {place}.",
                    param=f"response_format.{name}",
                )
        match self.type:
            case "text":
                return None
            case "json_object":
                return {"json_object": True} if self.schema_ is None else {"json_schema": self.schema_}
            case "json_schema":
                if self.json_schema is None:
                    raise _missing("response_format.json_schema")
                named = self.json_schema
                return {"json_schema": named.schema_, "strict": bool(named.strict), "name": named.name}
            case _:
                return {"structural_tag": self._structural_tag()}

    def _structural_tag(self) -> dict[str, Any]:
        if self.format is not None:
            if self.structures is not None or self.triggers is not None:
                raise InvalidParameter(
                    "'response_format.format' and 'response_format.structures' exclude each other.",
                    param="response_format.format",
                )
            return {"type": "structural_tag", "format": self.format}
        if self.structures is None:
            raise _missing("response_format.format")
        if not self.triggers:
            raise _missing("response_format.triggers")
        tags = [
            {
                "type": "tag",
                "begin": one.begin,
                "content": {"type": "json_schema", "json_schema": True if one.schema_ is None else one.schema_},
                "end": one.end,
            }
            for one in self.structures
        ]
        return {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": self.triggers, "tags": tags},
        }


_FIELDS_OF_FORMAT: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}


class StructuredOutputs(Closed):
    """vLLM's: one of the first six, and how JSON is written."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: TagOrText | None = None

    backend: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # a backend that is named has no fallback anyway
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: Literal[""] | None = None  # whitespace is bounded here; none at all is what can be chosen

    @property
    def is_compact(self) -> bool:
        return bool(self.disable_any_whitespace) or self.whitespace_pattern == ""

    def constraint(self) -> "Given":
        """Raises InvalidParameter unless exactly one kind is given."""
        kinds = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            seen = " and ".join(given) if given else "nothing"
            raise InvalidParameter(
                f"'structured_outputs' gives {seen}; it must give exactly one of {', '.join(kinds)}.",
                param="structured_outputs",
            )
        (name,) = given
        param = f"structured_outputs.{name}"
        if name == "grammar":
            return Given(param, grammar_fields(kinds[name], param))
        return Given(param, {"json_schema" if name == "json" else name: kinds[name]})


class Given(NamedTuple):
    """Something that the answer must follow: the parameter that says so, and fields of a Constraint."""

    param: str
    fields: dict[str, Any]


class GrammarDefaults(NamedTuple):
    """What requests that leave it open get (of ApiConfig)."""

    backend: str = "auto"
    unsupported: str = "error"
    close_on_length: bool = False

    @classmethod
    def of(cls, config: ApiConfig) -> "GrammarDefaults":
        return cls(config.grammar_backend, config.grammar_unsupported, config.close_on_length)


class ConstraintFields(BaseModel):
    """The fields of a request that say what its answer must follow."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    response_format: ResponseFormat | None = None

    # vLLM's
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    structural_tag: TagOrText | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: Literal[""] | None = None

    # SGLang's and llama.cpp's
    json_schema: SchemaOrText | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None

    # Ours
    choice: Choice | None = None  # beside regex and json_schema it is what people write
    grammar_backend: str | None = None
    grammar_unsupported: Literal["error", "validate"] | None = None
    close_on_length: bool | None = None
    compact_json: bool | None = None
    key_order: Literal["schema", "any"] | None = None

    def constraint(self, defaults: GrammarDefaults) -> Constraint | None:
        """What the answer must follow; None: it is free. Raises InvalidParameter."""
        if self.model_fields_set.isdisjoint(ConstraintFields.model_fields):
            return None
        options = self.constraint_options(defaults)
        given = self.given_constraints()
        if not given:
            return None
        if len(given) > 1:
            names = " and ".join(f"'{one.param}'" for one in given)
            raise InvalidParameter(
                f"{names} each say what the answer must follow; a request may have one of them.", param=given[1].param
            )
        ((param, fields),) = given
        return Constraint(**{**options, **fields, "where": param})

    def constraint_options(self, defaults: GrammarDefaults) -> dict[str, Any]:
        """The fields of a Constraint that do not say what is to be followed, but how."""
        backend, is_compact = self._backend()
        outputs = self.structured_outputs
        return {
            "backend": defaults.backend if backend is None else backend,
            "unsupported": self.grammar_unsupported or defaults.unsupported,
            "close_on_length": defaults.close_on_length if self.close_on_length is None else self.close_on_length,
            "compact": bool(self.compact_json)
            or is_compact
            or self.guided_whitespace_pattern == ""
            or (outputs is not None and outputs.is_compact),
            "key_order": self.key_order or "schema",
        }

    def given_constraints(self) -> list[Given]:
        """All that the fields above ask for. Raises InvalidParameter for what is none by itself."""
        given = []
        if self.response_format is not None and (fields := self.response_format.constraint()) is not None:
            given.append(Given("response_format", fields))
        if self.structured_outputs is not None:
            given.append(self.structured_outputs.constraint())
        if self.guided_json_object:
            given.append(Given("guided_json_object", {"json_object": True}))
        for param, kind in _PLAIN_KINDS.items():
            if (value := getattr(self, param)) is not None:
                given.append(Given(param, {kind: value} if kind else grammar_fields(value, param)))
        return given

    def _backend(self) -> tuple[str | None, bool]:
        """The backend that is asked for, if one is, and whether JSON is to be compact."""
        outputs = self.structured_outputs.backend if self.structured_outputs is not None else None
        is_compact, found = False, {}
        for param, given in (
            ("grammar_backend", self.grammar_backend),
            ("guided_decoding_backend", self.guided_decoding_backend),
            ("structured_outputs.backend", outputs),
        ):
            if given is None:
                continue
            name, _, option_text = given.partition(":")  # as in vLLM: "xgrammar:no-fallback,disable-any-whitespace"
            options = set(option_text.split(",")) - {""}
            name = GRAMMAR_BACKEND_ALIASES.get(name, name)
            if name not in GRAMMAR_BACKENDS or options - {"no-fallback", "disable-any-whitespace"}:
                raise InvalidParameter.of(param, given, f"one of {', '.join(GRAMMAR_BACKENDS)}")
            is_compact |= "disable-any-whitespace" in options
            found[name] = param
        if len(found) > 1:
            names = " and ".join(f"'{param}'" for param in found.values())
            raise InvalidParameter(f"{names} name different backends.", param=next(reversed(found.values())))
        return next(iter(found), None), is_compact


class ToolFields(BaseModel):
    """The fields of a chat that say what its answer may call."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse | None:
        """What may and must be called; None: nothing. Raises InvalidParameter."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)


# Names that say what an answer must follow, and beginnings of names that would.
CONSTRAINT_NAMES = (*ConstraintFields.model_fields, *ToolFields.model_fields)
CONSTRAINT_BEGINNINGS = ("guided_", "structured_", "response_format", "grammar_", "tool_")
ALIKE = 0.8  # of difflib's 0 to 1
LONGEST_ALIKE = 40  # characters: no name here is near so long
MOST_COMPARED = 100  # names of one body: comparing takes time


def refuse_misspelt(body: Mapping[str, Any], unknown: Iterable[str]) -> None:
    """Raises InvalidParameter if a field that nobody knows seems to say what the answer must follow: ignored, it would free
    the text. null asks for nothing."""
    num_compared = 0
    for name in sorted(unknown):
        if body[name] is None or name in CONSTRAINT_NAMES:
            continue
        meant = None
        if name.startswith(CONSTRAINT_BEGINNINGS):
            meant = _nearest(name[:LONGEST_ALIKE], 0.0)
        elif len(name) <= LONGEST_ALIKE and num_compared < MOST_COMPARED:
            num_compared += 1
            meant = _nearest(name, ALIKE)
        if meant is not None:
            raise InvalidParameter(f"{shown(name)} is not known; did you mean '{meant}'?", param=name[:LONGEST_SHOWN])


@lru_cache(maxsize=1024)
def _nearest(name: str, cutoff: float) -> str | None:
    return next(iter(difflib.get_close_matches(name, CONSTRAINT_NAMES, n=1, cutoff=cutoff)), None)


# parameter -> the kind of Constraint that it gives; "": a grammar in one of two languages
_PLAIN_KINDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "choice": "choice",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
    "guided_grammar": "",
    "grammar": "",
}


def grammar_fields(text: Any, param: str) -> dict[str, Any]:
    """A grammar in whichever of two languages: GBNF writes its rules `name ::= …`, Lark `name: …`.

    Raises InvalidParameter for a text without any rule.
    """
    for line in text.splitlines():
        if rule := _RULE.match(line):
            return {"ebnf" if rule[1] == "::=" else "lark": text}
    raise InvalidParameter.of(
        param,
        text,
        "a grammar with rules: GBNF, such as 'root ::= \"yes\" | \"no\"', or Lark, such as 'start: /[0-9]+/'",
    )


def _missing(param: str) -> InvalidParameter:
    return InvalidParameter(f"'{param}' is missing; it is required.", param=param)
