"""The words in which a constraint is refused: what stands in the way, where, and what can be done. Decides nothing."""

from typing import Protocol

from trunkline.constraint import Constraint
from trunkline.grammar.interface import Finding, GrammarRefused

MAX_REASON = 400  # characters of a reason in a message
MAX_POINTER = 200  # and of a pointer, whose middle is left out then
FROM_PYTHON = "constraint"  # the parameter of a Constraint that no request has sent


class Part(Protocol):
    """One JSON schema of a constraint: what messages call it, where it stands in the request, whether it is strict."""

    @property
    def what(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def strict(self) -> bool: ...


def refusal(constraint: Constraint, part: Part | None, finding: Finding, *, is_valid: bool) -> GrammarRefused:
    """`part` None: it is no schema. `is_valid`: it could be followed by something, only not by what we have."""
    reason = _cut(finding.reason.rstrip("."))
    if part is None:
        place = f" at {cut_middle(finding.pointer)}" if finding.pointer else ""
        verb = f"cannot be followed{_by(constraint)}" if is_valid else "is wrong"
        what = "the form of these calls" if constraint.kind == "tags" else f"this {constraint.kind}"
        message = f"'{constraint.where}': {what} {verb}{place}: {reason}."
        where = constraint.where
    else:
        context = tuple(key.replace("~1", "/").replace("~0", "~") for key in finding.pointer.split("/")[1:])
        keyword = f"'{finding.keyword}'" if finding.keyword else "this schema"
        verdict = "is not permitted" if is_valid else "is not valid"
        message = (
            f"Invalid schema for {part.what or part.where}: In context={cut_middle(repr(context))}, {keyword} {verdict}."
            f" At {cut_middle(finding.pointer) or 'the root'}{_by(constraint) if is_valid else ''}: {reason}."
        )
        where = part.where
        if is_valid:
            message += f" {_advice(constraint, part)}"
    refused = GrammarRefused(message, param=where, findings=(finding,))
    if not is_valid:
        refused.code = "invalid_function_parameters" if constraint.kind == "tags" else None
    return refused


def _by(constraint: Constraint) -> str:
    name = "backend" if constraint.where == FROM_PYTHON else "grammar_backend"
    return "" if constraint.backend == "auto" else f" by {name} '{constraint.backend}'"


def _advice(constraint: Constraint, part: Part) -> str:
    """In the words of whoever asks: fields of a Constraint, or of a request. Nothing that is so already."""
    in_python = constraint.where == FROM_PYTHON
    is_lenient = constraint.unsupported == "validate"
    to_validate = "unsupported to 'validate'" if in_python else "grammar_unsupported to 'validate'"
    validate = 'Constraint(unsupported="validate")' if in_python else "grammar_unsupported 'validate'"
    if part.strict:
        loose = "set strict to false" if is_lenient else f"set strict to false and {to_validate}"
        advice = f"Leave it out, or {loose}."
    elif is_lenient:
        advice = "Leave it out."
    else:
        place = "" if in_python else " in the request, --grammar-unsupported validate for the server"
        advice = f"Leave it out, or have it checked after generation instead of enforced: {validate}{place}."
    if constraint.backend != "auto":
        auto = 'Constraint(backend="auto")' if in_python else "grammar_backend 'auto'"
        advice += f" {auto} may find another backend for it."
    return advice


def _cut(text: str) -> str:
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 3] + "..."


def cut_middle(text: str) -> str:
    """Of a pointer, both ends tell where it leads."""
    half = (MAX_POINTER - 3) // 2
    return text if len(text) <= MAX_POINTER else f"{text[:half]}...{text[-half:]}"
