"""How true each backend is to schemas, and what it costs: writes benchmarks/grammar.md.

    python -m benchmarks.grammar --data ../shared/data/grammar            # all of it: some twenty minutes
    python -m benchmarks.grammar --data … --backend auto --no-walks --output -   # only auto, to the terminal

What is put to each backend: the JSONSchemaBench sample and the keyword probes with their instances, the official JSON
Schema Test Suite, and texts made by chance under the mask (random walks), which find what no list of
instances holds. Exit status 1 if any invalid text was accepted.
"""

import argparse
import collections
import contextlib
import json
import platform
import random
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from benchmarks.grammar_corpus import WAYS, Case, Outcome, Tester, Way, corpora, figures
from trunkline.bench.grammar import Choice, Walk
from trunkline.bench.tables import align
from trunkline.config import GRAMMAR_BACKENDS
from trunkline.errors import RequestError
from trunkline.grammar.interface import CompiledGrammar
from trunkline.grammar.postcheck import PostCheck
from trunkline.models.checkpoint import builtin_model

PAGE = Path(__file__).with_name("grammar.md")
WALKED_SCHEMAS, WALK_TOKENS = 200, 600
WALKS_EACH = {"auto": 10}  # texts of a schema
FEWER_WALKS = 2  # of the other backends


def share(part: int, whole: int) -> str:
    return f"{part}/{whole}" + (f" = {100 * part / whole:.1f} %" if whole else "")


def percentiles(seconds: Sequence[float], unit: float, ranks: Sequence[float]) -> str:
    """The values at these ranks (0 to 1), and the largest."""
    if not seconds:
        return "–"
    ordered = sorted(seconds)
    values = [ordered[min(len(ordered) - 1, int(rank * len(ordered)))] for rank in ranks] + [ordered[-1]]
    return " / ".join(f"{value / unit:,.3g}" for value in values)


def corpus_row(title: str, outcomes: list[Outcome]) -> list[str]:
    """One line of a table of outcomes."""
    compiled = [outcome for outcome in outcomes if outcome.refused is None]
    counted = figures(outcomes)
    return [
        title,
        share(counted["compiled"], counted["schemas"]),
        share(counted["accepted_valid"], counted["valid"]),
        share(counted["refused_invalid"], counted["invalid"]),
        str(counted["over_permissive"]),
        percentiles([o.prepare_seconds for o in compiled], 1e-3, (0.5, 0.95)),
        percentiles([o.compile_seconds for o in compiled], 1e-3, (0.5, 0.95)),
        percentiles([s for o in compiled for s in o.mask_seconds], 1e-6, (0.5, 0.95, 0.99)),
    ]


HEAD = [
    "",
    "compiled",
    "valid accepted",
    "invalid refused",
    "over-permissive",
    "checks and rewriting, ms p50 / p95 / max",
    "compile, ms p50 / p95 / max",
    "mask, µs p50 / p95 / p99 / max",
]


def reasons(outcomes: list[Outcome], most: int = 12) -> str:
    """Why schemas were refused, most frequent first."""
    counts = collections.Counter(_reason(outcome.refused) for outcome in outcomes if outcome.refused is not None)
    return "\n".join(f"- {count} × {reason}" for reason, count in counts.most_common(most))


def _reason(message: str) -> str:
    """The keyword and what is said of it, without what differs from schema to schema."""
    return message.partition("In context=")[2].partition("), ")[2].partition(" (")[0][:160] or message[:160]


class Measurement:
    """All tables of one run."""

    def __init__(self, model: str, data: Path, ways: Sequence[Way], progress: Callable[[str], None]) -> None:
        self.tester = Tester(model)
        self.data = data
        self.ways = ways
        self.progress = progress
        self.num_wrong = 0
        self.figures: dict[str, dict[str, dict[str, int]]] = {}  # by way and corpus
        self.parts: list[str] = []

    def run(self, *, walks: bool) -> str:
        """The page."""
        self._corpora()
        if walks:
            self._walks()
        self.tester.close()
        return "\n\n".join([_opening(), *self.parts]) + "\n"

    def _corpora(self) -> None:
        for title, cases in corpora(self.data).items():
            rows, refused = [HEAD], ""
            for way in self.ways:
                outcomes = self._outcomes(title, cases, way)
                self.figures.setdefault(way.title, {})[title] = figures(outcomes)
                rows.append(corpus_row(way.title, outcomes))
                self.num_wrong += sum(outcome.is_over_permissive for outcome in outcomes)
                if way.title == "auto" and (why := reasons(outcomes)):
                    refused = f"\n\nWhat `auto` refuses:\n\n{why}"
            self.parts.append(f"## {title}\n\n{len(cases)} schemas.\n\n{align(rows)}{refused}")

    def _outcomes(self, title: str, cases: list[Case], way: Way) -> list[Outcome]:
        outcomes = []
        for number, case in enumerate(cases):
            self.progress(f"{title}, {way.title}: {number + 1} of {len(cases)}")
            outcome = self.tester.try_case(case, way)
            if outcome.is_over_permissive:
                print(f"\n{case.name} accepts {[i.text[:200] for i in outcome.wrong if not i.valid]}", file=sys.stderr)
            outcomes.append(outcome)
        return outcomes

    def _walks(self) -> None:
        sample = corpora(self.data)["JSONSchemaBench"]
        rows = [
            ["", "choice", "schemas", "texts", f"ended within {WALK_TOKENS} tokens", "of these JSON", "of these valid"]
        ]
        for way in self.ways:
            compiled = self._compiled(sample, way)
            num_each = WALKS_EACH.get(way.title, FEWER_WALKS)
            for choice in get_args(Choice):
                if choice == "closing" and way.title != "auto":
                    continue  # closing goes through masks alone, the same way for all
                rng, walks = random.Random(0), list[tuple[Case, Walk]]()
                for number, (case, grammar) in enumerate(compiled):
                    self.progress(f"Walks, {way.title}, {choice}: {number + 1} of {len(compiled)}")
                    for _ in range(num_each):
                        walks.append((case, self.tester.walk(grammar, rng, WALK_TOKENS, choice)))
                rows.append([way.title, choice, str(len(compiled)), *self._walk_figures(walks)])
        self.parts.append(f"## Random walks\n\n{align(rows)}")

    def _compiled(self, cases: list[Case], way: Way) -> list[tuple[Case, CompiledGrammar]]:
        """The first schemas that are taken."""
        found: list[tuple[Case, CompiledGrammar]] = []
        for case in cases:
            with contextlib.suppress(RequestError):
                found.append((case, self.tester.compile(way.constraint(case.schema))))
            if len(found) == WALKED_SCHEMAS:
                break
        return found

    def _walk_figures(self, walks: list[tuple[Case, Walk]]) -> list[str]:
        stopped = [(case, walk) for case, walk in walks if walk.stopped]
        parsed = [(case, walk) for case, walk in stopped if _is_json(walk.text)]
        valid = [walk for case, walk in parsed if PostCheck(case.schema).check(walk.text).valid]
        self.num_wrong += len(stopped) - len(valid)
        return [
            f"{len(walks):,}",
            share(len(stopped), len(walks)),
            share(len(parsed), len(stopped)),
            share(len(valid), len(stopped)),
        ]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def library_versions() -> dict[str, str]:
    """Of the libraries that compile."""
    return {name: version(name) for name in ("llguidance", "xgrammar", "outlines-core")}


def _opening() -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    return (
        "# How true to the schema\n\n"
        "Written by `python -m benchmarks.grammar`; [what the columns mean](README.md#grammars). CPU times, one thread, the"
        f" built-in model's tokenizer.\n\n{libraries}, Python {platform.python_version()}. `auto` takes, for each schema, the"
        " first backend that is sure to be true to it; an explicit backend refuses what it can't do exactly. Instances have"
        " their keys in the schema's order; with keys in any order, as they stand."
    )


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:<79}", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="has jsonschemabench_sample.jsonl …")
    parser.add_argument("--model", metavar="PATH", help="whose tokenizer (default: the built-in model's)")
    parser.add_argument("--backend", action="append", choices=GRAMMAR_BACKENDS, help="only this (may be repeated)")
    parser.add_argument("--walks", action=argparse.BooleanOptionalAction, default=True, help="random walks")
    parser.add_argument(
        "--baselines", type=Path, metavar="FILE", help="write the counts, which tests hold us to, as JSON"
    )
    parser.add_argument("--output", default=str(PAGE), metavar="FILE", help="- is the terminal (default: %(default)s)")
    flags = parser.parse_args(arguments)
    ways = [way for way in WAYS if not flags.backend or way.backend in flags.backend]
    measurement = Measurement(flags.model or builtin_model(), flags.data, ways, _show_progress)
    page = measurement.run(walks=flags.walks)
    if flags.output == "-":
        print(page)
    else:
        Path(flags.output).write_text(page, encoding="utf-8")
    if flags.baselines is not None:
        counts = {"libraries": library_versions(), "ways": measurement.figures}
        flags.baselines.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    return int(measurement.num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
