"""A request's constraint on its way: prepared before the engine gets it, and checked once a text has ended by itself.

    constrained = await Constrained.of(service, sampling.constraint)      # raises GrammarRefused
    llm.submit(…, grammar=constrained.grammar)
    verdict = await constrained.verdict(choice)                           # of a choice that has ended
    body |= constrained.fields(verdict)                                   # "valid", under the policy "validate"

Gate 4: what a grammar promised is compared with the schema as it was sent. Under the policy "error" a text that breaks it
is a bug of ours, and no answer. Under "validate" the answer says what was found, and nothing where nothing was checked.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trunkline.api.generation import OutputProcessor
from trunkline.constraint import Constraint, Grammar
from trunkline.errors import GenerationFailed
from trunkline.grammar.interface import GrammarRefused
from trunkline.grammar.postcheck import UNCHECKED, PostCheck, Verdict
from trunkline.grammar.prepare import Prepared

if TYPE_CHECKING:
    from trunkline.api.service import Service

logger = logging.getLogger("trunkline.api")

LONG_TEXT = 20_000  # characters of texts and schemas: more are compared in a thread, so that other streams keep flowing


class GrammarBroken(GenerationFailed):
    """A text does not follow its schema, though its grammar was to make sure of that."""

    code = "grammar_broken"


class Call(NamedTuple):
    """A tool call that was read from a text.

    where      the tool's schema in the request: Tag.where
    arguments  JSON text
    """

    where: str
    arguments: str


class Checks:
    """The schemas that finished texts are compared with: one of the whole text, or those of the arguments of tools."""

    def __init__(self, constraint: Constraint, prepared: Prepared) -> None:
        self._has_tags = constraint.tags is not None
        self._instead = constraint.tags.instead if constraint.tags is not None else None
        self._where = constraint.where
        self._by_place = {where: PostCheck(schema) for where, schema in prepared.checks}
        self._num_characters = len(constraint.json_schema or "")
        if constraint.tags is not None:
            self._num_characters = sum(len(tag.json_schema) for tag in constraint.tags.tags)

    def verdict(self, choice: OutputProcessor, *, text: str | None = None, calls: Sequence[Call] = ()) -> Verdict:
        """Of a choice that has ended. Nothing is found out about one that was cut.

        text   what was to follow the schema, if that is not all of the choice's text
        calls  that were read from it. Of several the first that is not valid counts, or else the first that is not checked
        """
        if not ended_by_itself(choice):
            return UNCHECKED
        whole = self._where if not self._has_tags else self._instead.where if self._instead and not calls else ""
        if whole in self._by_place:
            return self._by_place[whole].check(choice.text if text is None else text)
        found = [self._by_place[call.where].check(call.arguments) for call in calls if call.where in self._by_place]
        worst = sorted(found, key=lambda verdict: (verdict.valid is not False, verdict.valid is not None))
        return worst[0] if worst else UNCHECKED

    def is_slow(self, choice: OutputProcessor) -> bool:
        """Whether it may take long enough to hold up others."""
        return len(choice.token_ids) + self._num_characters > LONG_TEXT


class Constrained:
    """What one request's texts must follow; nothing, for most."""

    def __init__(self, service: "Service", constraint: Constraint | None, prepared: Prepared | None) -> None:
        self._service = service
        self._constraint = constraint
        self._checks = Checks(constraint, prepared) if constraint is not None and prepared is not None else None
        self.grammar: Grammar | None = prepared.grammar if prepared is not None else None
        # Whether an answer says what was found.
        self.tells = constraint is not None and constraint.unsupported == "validate" and not constraint.strict

    @classmethod
    async def of(cls, service: "Service", constraint: Constraint | None) -> "Constrained":
        """Raises GrammarRefused for what cannot be followed."""
        if constraint is None:
            return cls(service, None, None)
        try:
            return cls(service, constraint, await service.llm.prepare(constraint))
        except GrammarRefused:
            service.metrics.grammar_refused[constraint.backend] += 1
            raise

    async def verdict(self, choice: OutputProcessor, *, text: str | None = None, calls: Sequence[Call] = ()) -> Verdict:
        """What a choice that has ended is found to be, as `Checks.verdict`.

        Raises GrammarBroken if it breaks its schema, unless the answer says so.
        """
        if self._checks is None:
            return UNCHECKED
        if self._checks.is_slow(choice):
            verdict = await asyncio.to_thread(self._checks.verdict, choice, text=text, calls=calls)
        else:
            verdict = self._checks.verdict(choice, text=text, calls=calls)
        if verdict.valid is False and not self.tells:
            self._report(choice, verdict)
        return verdict

    def fields(self, verdict: Verdict) -> dict[str, Any]:
        """What a choice says of it."""
        if not self.tells:
            return {}
        told: dict[str, Any] = {"valid": verdict.valid}
        if verdict.error is not None:
            told["validation_error"] = verdict.error
        return told

    def _report(self, choice: OutputProcessor, verdict: Verdict) -> None:
        assert self._constraint is not None
        backend = choice.grammar_backend or self._constraint.backend
        self._service.metrics.grammar_postcheck_failures.labels(backend).inc()
        constraint = hashlib.sha256(repr(self._constraint).encode()).hexdigest()[:16]
        logger.error("A text by %s does not follow its constraint %s: %s", backend, constraint, verdict.error)
        raise GrammarBroken(
            f"The text does not follow '{self._constraint.where}', though the grammar was to make sure of it: {verdict.error}"
            " This is a bug of the server.",
            param=self._constraint.where,
        )


def ended_by_itself(choice: OutputProcessor) -> bool:
    """Whether a text is whole: the model ended it, or it was brought to an end in time (close_on_length)."""
    return choice.closed or (choice.finish_reason == "stop" and choice.stop_reason is None)
