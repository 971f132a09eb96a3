"""From what a caller asks for to what the engine compiles: the gates in between, the order of backends, the refusals.

    Constraint ─► meta.check ─► normalize ─► canonicalize ─► Forms ─► an emitter per backend ─► Grammar(sources)

Pure Python, milliseconds, no tokens and no backend libraries: this runs in the API process.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trunkline.constraint import Constraint, Grammar, GrammarSource, Tag
from trunkline.errors import shown
from trunkline.grammar.backends.llguidance import emitter as llguidance_emitter
from trunkline.grammar.backends.outlines import emitter as outlines_emitter
from trunkline.grammar.backends.xgrammar import emitter as xgrammar_emitter
from trunkline.grammar.backends.xgrammar import structural_tag
from trunkline.grammar.interface import Finding, GrammarRefused, InvalidSchema, Unsupported
from trunkline.grammar.reading import Reading, read
from trunkline.grammar.refusal import refusal
from trunkline.grammar.regex.automaton import BudgetExceeded, all_within
from trunkline.grammar.schema.forms import Forms
from trunkline.grammar.schema.widen import ANY_OBJECT, ANYTHING, only_objects, widen

Emit = Callable[..., GrammarSource]
Read = Callable[..., Reading]

# Kind -> who can be asked to take it, best first.
#   JSON            llguidance forces tokens exactly where its mask is a single token, and compiles in milliseconds
#   regex, choice   outlines-core's masks are table look-ups, where its automaton is small
EMITTERS: dict[str, dict[str, Emit]] = {
    "json_schema": {
        "llguidance": llguidance_emitter.emit,
        "xgrammar": xgrammar_emitter.emit,
        "outlines": outlines_emitter.emit,
    },
    "tags": {"llguidance": llguidance_emitter.emit_tags, "xgrammar": xgrammar_emitter.emit_tags},
    "regex": {
        "outlines": outlines_emitter.emit_regex,
        "llguidance": llguidance_emitter.emit_regex,
        "xgrammar": xgrammar_emitter.emit_regex,
    },
    "choice": {
        "outlines": outlines_emitter.emit_choice,
        "llguidance": llguidance_emitter.emit_choice,
        "xgrammar": xgrammar_emitter.emit_choice,
    },
    "ebnf": {"xgrammar": xgrammar_emitter.emit_ebnf, "llguidance": llguidance_emitter.emit_ebnf},
    "lark": {"llguidance": llguidance_emitter.emit_lark},
    "structural_tag": {"xgrammar": structural_tag.emit},
}
EMITTERS["json_object"] = EMITTERS["json_schema"]
SCHEMA_KINDS = ("json_schema", "tags")  # where the caller gave one
JSON_KINDS = (*SCHEMA_KINDS, "json_object")
BACKENDS = ("llguidance", "xgrammar", "outlines")
ANY_ORDER_BACKENDS = ("llguidance",)  # that write the keys of JSON objects in any order
NUM_SOURCES = 2  # the second is for what the first one's library turns out to refuse, or to need too long for

MAX_WORK = 2_000_000  # for questions about regular expressions, all in all (see automaton.py): about two seconds,
MAX_SECONDS = 4.0  # and for all of a constraint, in CPU time: the next in turn waits for it
MAX_CHARACTERS = 2**20  # of one constraint that is no schema (those have limits of their own)
MAX_CHOICES = 50_000
MAX_WIDENED = 32  # places of a schema that "validate" leaves out one by one, before it leaves out all of it

NO_OBJECT = Finding("", "type", "arguments of a function are an object, and it allows none")
TOO_MUCH_WORK = Finding("", "pattern", "its regular expressions take too much work to tell apart")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A constraint that can be followed.

    grammar    for the engine
    findings   what "validate" left out of it; () if every text that it allows follows the constraint
    backends   backend -> why it does not take the constraint exactly, or None if it does; only those that were asked
    checks     (where in the request, JSON schema as it was sent): the finished text, or the arguments of a finished
               tool call, must be valid under it
    """

    grammar: Grammar
    findings: tuple[Finding, ...] = ()
    backends: dict[str, Finding | None]
    checks: tuple[tuple[str, Any], ...] = ()

    @property
    def is_exact(self) -> bool:
        return not self.findings


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One JSON schema of a constraint: what messages call it, where it stands in the request, and its meaning.

    `findings` are what its forms leave out; of a strict part, nothing may be. `widest` is what is left if all is left out.
    """

    what: str
    where: str
    schema: Any
    forms: Forms
    findings: tuple[Finding, ...]
    strict: bool = False
    widest: Forms = ANYTHING


@dataclass(frozen=True, slots=True)
class _No:
    """A backend's answer: what it cannot enforce, and in which part; None: in what stands around them."""

    finding: Finding
    part: int | None = 0


def prepare(
    constraint: Constraint, *, unsupported: str = "error", all_backends: bool = False, read: Read = read
) -> Prepared:
    """What the engine gets for a constraint, and what to check afterwards.

    `unsupported` is the server's policy, for a constraint that has none: "error", or "validate", under which a keyword
    that cannot be enforced is left out of the grammar and listed in `findings`. `all_backends` asks those too that are
    not needed. `read` may know schemas already. Raises GrammarRefused, in OpenAI's words, for a constraint that is wrong,
    that nothing satisfies, or that no backend of those it may go to is sure to be true to.
    """
    with all_within(MAX_WORK, MAX_SECONDS):
        return _prepare(constraint, unsupported, all_backends, read)


def _prepare(constraint: Constraint, unsupported: str, all_backends: bool, read: Read) -> Prepared:
    emitters = EMITTERS[constraint.kind]
    wanted = tuple(emitters) if constraint.backend == "auto" else (constraint.backend,)
    asked = dict.fromkeys((*wanted, *emitters) if all_backends else wanted)
    is_lenient = (constraint.unsupported or unsupported) == "validate" and not constraint.strict
    _check_text(constraint)
    _check_order(constraint)
    parts = _read_parts(constraint, is_lenient, read)

    answers: dict[str, GrammarSource | _No] = {}
    sources: list[GrammarSource] = []
    for backend in asked:
        if not all_backends and _is_enough(sources, constraint.kind):
            break
        answer = _ask(backend, constraint, parts)
        answers[backend] = answer
        if isinstance(answer, GrammarSource) and backend in wanted and len(sources) < NUM_SOURCES:
            sources.append(answer)

    findings = tuple(finding for part in parts for finding in part.findings)
    if not sources:
        noes = {backend: answer for backend in wanted if isinstance(answer := answers[backend], _No)}
        no = noes[wanted[0]]
        if not (is_lenient and parts and no.part is not None and not parts[no.part].strict):
            no = _clearest(noes.values())
            part = parts[no.part] if constraint.kind in SCHEMA_KINDS and no.part is not None else None
            raise refusal(constraint, part, no.finding, is_valid=True)
        source, left_out = _widen_until_taken(wanted[0], constraint, parts, no)
        sources.append(source)
        findings += left_out
    return Prepared(
        grammar=Grammar(
            sources=tuple(sources),
            close_on_length=constraint.close_on_length,
            after=constraint.after,
            where=constraint.where,
        ),
        findings=findings,
        backends={
            backend: answer.finding if isinstance(answer, _No) else next(iter(findings), None) if parts else None
            for backend, answer in answers.items()
        },
        checks=tuple((part.where, part.schema) for part in parts),
    )


def _is_enough(sources: list[GrammarSource], kind: str) -> bool:
    """Whether nobody else needs to be asked.

    What we write ourselves, the library does take unless it is large: then another source would take longer to write
    than everything else, for nothing.
    """
    return len(sources) == NUM_SOURCES or (kind in JSON_KINDS and any(not source.is_risky for source in sources))


def _ask(backend: str, constraint: Constraint, parts: list[_Part]) -> GrammarSource | _No:
    """What a backend makes of it."""
    kind = constraint.kind
    emit = EMITTERS[kind].get(backend)
    if emit is None:
        return _No(Finding("", kind, f"only {' and '.join(EMITTERS[kind])} can follow it"))
    if constraint.key_order == "any" and parts and backend not in ANY_ORDER_BACKENDS:
        return _No(Finding("", "", "it writes keys in the order of the schema, and key_order is 'any'"))
    options: dict[str, Any] = {"compact": constraint.compact}
    if backend in ANY_ORDER_BACKENDS:
        options["key_order"] = constraint.key_order
    try:
        if kind == "tags":
            return emit(constraint.tags, [part.forms for part in parts], **options)
        if parts:
            return emit(parts[0].forms, **options)
        if kind == "structural_tag":
            return emit(constraint.structural_tag, compact=constraint.compact)
        return emit(getattr(constraint, kind))
    except Unsupported as error:
        return _No(error.finding, _part_of(backend, parts) if kind == "tags" else 0)
    except BudgetExceeded:
        return _No(TOO_MUCH_WORK)
    except InvalidSchema as error:
        # Of a regular expression or a grammar; or nothing satisfies a schema, as comes out only now.
        index = _part_of(backend, parts) if kind == "tags" else 0
        part = parts[index] if kind in SCHEMA_KINDS and index is not None else None
        raise refusal(constraint, part, error.finding, is_valid=False) from None


def _clearest(noes: Iterable[_No]) -> _No:
    """The first answer that names a keyword, else the first."""
    noes = list(noes)
    return next((no for no in noes if no.finding.keyword), noes[0])


def _part_of(backend: str, parts: list[_Part]) -> int | None:
    """The first part that a backend refuses by itself; None: it takes them all."""
    emit = EMITTERS["json_schema"][backend]
    for index, part in enumerate(parts):
        try:
            emit(part.forms, compact=False)
        except (Unsupported, InvalidSchema):
            return index
    return None


def _widen_until_taken(
    backend: str, constraint: Constraint, parts: list[_Part], no: _No
) -> tuple[GrammarSource, tuple[Finding, ...]]:
    """The source after what a backend cannot enforce has been left out, and that.

    Each time, the forms at one place get wider. Raises GrammarRefused where it is no schema that is in the way.
    """
    parts = list(parts)
    left_out: list[Finding] = []
    while True:
        left_out.append(no.finding)
        part = None if no.part is None else parts[no.part]
        if part is None or no.part is None or part.strict:
            raise refusal(constraint, part, no.finding, is_valid=True)
        forms = widen(part.forms, no.finding) if len(left_out) < MAX_WIDENED else part.widest
        if forms == part.forms and forms != part.widest:
            forms = part.widest
        elif forms == part.forms:
            raise refusal(constraint, None, no.finding, is_valid=True)
        parts[no.part] = replace(part, forms=forms)
        answer = _ask(backend, constraint, parts)
        if isinstance(answer, GrammarSource):
            return answer, tuple(left_out)
        no = answer


# --- Reading.


def _check_text(constraint: Constraint) -> None:
    """Raise for what no backend should be given."""
    kind = constraint.kind
    value = getattr(constraint, kind)
    texts = value if kind == "choice" else (value,) if isinstance(value, str) else ()
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise GrammarRefused(
            f"'{constraint.where}' holds half of a surrogate pair, which no text can; send whole characters.",
            param=constraint.where,
        ) from None
    if kind == "choice" and len(value) > MAX_CHOICES:
        raise GrammarRefused(
            f"'{constraint.where}' has {len(value)} choices; at most {MAX_CHOICES} are allowed.", param=constraint.where
        )
    if kind != "json_schema" and size > MAX_CHARACTERS:
        raise GrammarRefused(
            f"'{constraint.where}' has {size} bytes; at most {MAX_CHARACTERS} are allowed.", param=constraint.where
        )


def _check_order(constraint: Constraint) -> None:
    """Raise if keys are to come in any order, and nobody who may be asked can do that: it is no matter of the schema."""
    is_json = constraint.kind in (*JSON_KINDS, "structural_tag")
    able = [name for name in ANY_ORDER_BACKENDS if name in EMITTERS[constraint.kind]]
    if constraint.key_order == "schema" or not is_json or (able and constraint.backend in ("auto", *able)):
        return
    if able:
        problem = f"grammar_backend {shown(constraint.backend)} writes keys in the order of the schema"
        advice = f"Leave one of them out, or choose grammar_backend {' or '.join(map(repr, ('auto', *able)))}"
    else:
        problem = f"the JSON in a {constraint.kind} has its keys in the order of the schema"
        advice = "Leave it out"
    raise GrammarRefused(f"'key_order' is 'any', but {problem}. {advice}.", param="key_order")


class _Sent(NamedTuple):
    """A schema of a constraint, as text. `is_call`: of a function's arguments, which are an object."""

    what: str
    where: str
    text: str
    strict: bool
    is_call: bool = False


def _read_parts(constraint: Constraint, is_lenient: bool, read: Read) -> list[_Part]:
    """The schemas of a constraint, each with its meaning. Raises GrammarRefused."""
    if constraint.kind == "json_object":
        return [_Part(what="", where=constraint.where, schema={"type": "object"}, forms=ANY_OBJECT, findings=())]
    return [_read_part(constraint, sent, is_lenient and not sent.strict, read) for sent in _schemas_of(constraint)]


def _schemas_of(constraint: Constraint) -> Iterator[_Sent]:
    """That of what may be written instead of tags is the last."""
    where, strict = constraint.where, constraint.strict
    if constraint.kind == "json_schema":
        yield _Sent(_named(where, constraint.name), where, constraint.json_schema, strict)
    elif constraint.tags is not None:
        for tag in constraint.tags.tags:
            yield _Sent(_what(tag), tag.where or where, tag.json_schema, tag.strict or strict, is_call=bool(tag.name))
        if (other := constraint.tags.instead) is not None:
            yield _Sent(_named(other.where, other.name), other.where, other.json_schema, other.strict or strict)


def _what(tag: Tag) -> str:
    return _named("function", tag.name) if tag.name else tag.where or "function"


def _named(what: str, name: str) -> str:
    return f"{what} {shown(name)}" if name else what


def _read_part(constraint: Constraint, sent: _Sent, is_lenient: bool, read: Read) -> _Part:
    part = _Part(what=sent.what, where=sent.where, schema=None, forms=ANYTHING, findings=(), strict=sent.strict)
    try:
        found = read(sent.text, lenient=is_lenient)
    except Unsupported as error:
        raise refusal(constraint, part, error.finding, is_valid=True) from None
    except BudgetExceeded:
        raise refusal(constraint, part, TOO_MUCH_WORK, is_valid=True) from None
    except InvalidSchema as error:
        raise refusal(constraint, part, error.finding, is_valid=False) from None
    part = replace(part, schema=found.schema, forms=found.forms, findings=found.findings)
    if sent.is_call:
        objects = only_objects(found.forms)
        if objects is None:
            raise refusal(constraint, part, NO_OBJECT, is_valid=False)
        part = replace(part, widest=ANY_OBJECT, forms=objects)
    return part
