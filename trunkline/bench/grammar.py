"""What a schema costs on this machine, by backend: preparing it, compiling it, and each mask of a text made by chance under it.

    compiler = Compiler(model)                      # of a checkpoint only the tokenizer is read
    cost = measure(compiler, schema, "llguidance", walks=3, most=200, seed=0)
    cost.refused or (cost.compile_seconds, cost.mask_seconds)

Times are CPU time of this process. `benchmarks/grammar.py` asks whether backends are right; here is only what they cost.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from trunkline.config import GrammarConfig
from trunkline.constraint import Constraint
from trunkline.errors import ConfigError, RequestError
from trunkline.grammar.closing import find_ending
from trunkline.grammar.interface import CompiledGrammar
from trunkline.grammar.prepare import prepare
from trunkline.grammar.service import CompileService
from trunkline.grammar.text import ConstrainedText, Rules
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.models.tokenizer import Tokenizer, load_tokenizer

SUFFIXES = (".json", ".jsonl")

# How a walk chooses among the tokens of a mask:
#
#   uniform   all alike. One token in 250 ends a string, so few texts end soon
#   hastened  every other token, by chance, is one of those that hold a delimiter of JSON or end the text, if there are any
#   closing   all alike, in a text that closes (close_on_length)
Choice = Literal["uniform", "hastened", "closing"]


class Walk(NamedTuple):
    """A text made by chance under the mask.

    stopped  it ended by itself, or was closed in time
    """

    text: str
    num_tokens: int
    stopped: bool


class Compiler:
    """Compiles grammars for one model's vocabulary, and writes texts by chance under them.

    model  a checkpoint's path; only its tokenizer is read
    """

    def __init__(self, model: str, *, compile_seconds: float = GrammarConfig().compile_seconds) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(model)
        vocabulary = Vocabulary(self.tokenizer, self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        self.vocabulary = vocabulary
        self.service = CompileService(lambda: vocabulary, GrammarConfig(compile_seconds=compile_seconds))
        self._row = np.zeros(vocabulary.num_words, np.int32)
        self._delimits = np.zeros(32 * vocabulary.num_words, bool)
        for token_id in range(self.tokenizer.vocab_size):
            self._delimits[token_id] = any(byte in b'",:{}[]' for byte in self.tokenizer.token_bytes(token_id))
        self._delimits[list(vocabulary.eos_token_ids)] = True

    def close(self) -> None:
        self.service.close()

    def compile_timed(self, source: Callable[[], Constraint], cost: "CompileCost") -> CompiledGrammar | None:
        """The grammar of what `source` makes; what it took is noted in `cost`. None if it is refused, which is noted as well."""
        begin = time.process_time()
        try:
            constraint = source()
            prepare(constraint)
            cost.prepare_seconds = time.process_time() - begin
            begin = time.process_time()
            compiled = self.compile(constraint)
            compiled.matcher()
        except RequestError as error:
            cost.refused = error.message
            return None
        cost.compile_seconds = time.process_time() - begin
        cost.backend = compiled.backend
        return compiled

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises RequestError if the constraint is refused."""
        compilation = self.service.submit(prepare(constraint).grammar)
        while not compilation.done:
            self.service.wait(1.0)
        return compilation.result()

    def walk(
        self,
        compiled: CompiledGrammar,
        rng: random.Random,
        most: int,
        choice: Choice,
        mask_seconds: list[float] | None = None,
    ) -> Walk:
        """Choose among the tokens of the mask, until an end-of-text token is chosen or there are `most`.

        mask_seconds  is added the CPU time of each mask
        """
        text, token_ids = self._text(compiled, most, closes=choice == "closing"), list[int]()
        while not text.is_over:
            if len(token_ids) == most:
                return self._walked(token_ids, stopped=choice == "closing" and text.is_complete)
            token_id = text.settle(self._choose(text, rng, mask_seconds, hastens=choice == "hastened"))
            if token_id is None or text.ends_with(token_id):
                break
            assert text.take(token_id), f"{token_id} is in the mask, and was not accepted"
            token_ids.append(token_id)
        return self._walked(token_ids, stopped=True)

    def _text(self, compiled: CompiledGrammar, most: int, *, closes: bool) -> ConstrainedText:
        """A text that closes if there is an ending to know from the start; one without such an ending may be cut."""
        ending = find_ending(compiled.matcher(), self.vocabulary, most=most) if closes else None
        if ending is None:
            return ConstrainedText(compiled, self.vocabulary, Rules())
        return ConstrainedText(compiled, self.vocabulary, Rules(), most=most, ending=ending)

    def _choose(
        self, text: ConstrainedText, rng: random.Random, mask_seconds: list[float] | None, *, hastens: bool
    ) -> int:
        begin = time.process_time()
        text.fill(self._row)
        if mask_seconds is not None:
            mask_seconds.append(time.process_time() - begin)
        allowed = np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))
        if hastens and rng.random() < 0.5:
            delimiting = allowed[self._delimits[allowed]]
            allowed = delimiting if len(delimiting) else allowed
        return int(allowed[rng.randrange(len(allowed))])

    def _walked(self, token_ids: list[int], *, stopped: bool) -> Walk:
        data = b"".join(self.tokenizer.token_bytes(token_id) for token_id in token_ids)
        return Walk(data.decode("utf-8", "surrogateescape"), len(token_ids), stopped)


@dataclass(kw_only=True)
class CompileCost:
    """What a grammar costs: CPU times.

    refused          why, as a caller would be told; None: it was compiled
    backend          that compiled it: of auto, the one that was chosen
    prepare_seconds  of the checks and rewriting
    compile_seconds  of the backend
    mask_seconds     of each mask
    """

    refused: str | None = None
    backend: str = ""
    prepare_seconds: float = 0.0
    compile_seconds: float = 0.0
    mask_seconds: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class Cost(CompileCost):
    """What one schema costs with one backend."""

    schema: str
    asked: str


class Schema(NamedTuple):
    """A JSON schema and where it stands: a file, with its line or id if that holds several."""

    name: str
    schema: Any


def read_schemas(path: str | Path) -> Iterator[Schema]:
    """Of a .json file, which is a schema; a .jsonl file with {"schema": …}, maybe with "id", on each line; or a folder of these.

    Raises ConfigError for what cannot be read so.
    """
    path = Path(path)
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"The folder {path} holds no file that ends in {' or '.join(SUFFIXES)}.")
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"The schema {file} cannot be read: {reason}.") from None
        if file.suffix != ".jsonl":
            yield Schema(file.name, _parsed(text, file.name))
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                where = f"{file.name}, line {number}"
                row = _parsed(line, where)
                if not isinstance(row, dict) or "schema" not in row:
                    raise ConfigError(f'{where} has no schema; write {{"schema": …}}.')
                yield Schema(f"{file.name}: {row.get('id', number)}", row["schema"])


def measure(compiler: Compiler, schema: Schema, backend: str, *, walks: int, most: int, seed: int) -> Cost:
    """Compile a schema by one backend, and walk through it: `walks` texts of at most `most` tokens.

    A schema that was compiled before by the same backend is found compiled, and costs nothing.
    """
    cost = Cost(schema=schema.name, asked=backend)
    compiled = compiler.compile_timed(
        lambda: Constraint(json_schema=json.dumps(schema.schema, ensure_ascii=False), backend=backend), cost
    )
    if compiled is None:
        return cost
    for number in range(walks):
        rng = random.Random(f"{seed}/{schema.name}/{number}")
        compiler.walk(compiled, rng, most, "hastened", cost.mask_seconds)
    return cost


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from None
