"""What order-free documents save: the same questions with `"documents_order": "fixed"` and `"free"`, in one run.

    python -m benchmarks.documents                  # about two minutes on two cores
    python -m benchmarks.documents --requests 8     # a smoke run

Each question comes with the five best of 16 documents, as a retriever finds them: popular ones more often (Zipf), in an
order that says nothing about the next question's. The two kinds take turns, under salts of their own, so a machine
which slows down slows both. Then some of the orders that the server chose are sent again, fixed and cold: the answers
must be the same.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.server import serve
from trunkline.bench.cli import make_texts
from trunkline.bench.report import platform_facts
from trunkline.bench.tables import align

NUM_DOCUMENTS = 16
TOP = 5
DOCUMENT_TOKENS = (64, 128)
QUESTION_TOKENS = 16
MAX_TOKENS = 8
CHECK_EVERY = 6  # of the free orders, that many-th is sent again, cold
ORDERS = ("fixed", "free")


class Question(NamedTuple):
    """One request, but for the order."""

    text: str
    documents: list[dict[str, str]]


class Answer(NamedTuple):
    """What the server said."""

    text: str
    documents_order: list[int]
    prompt_tokens: int
    cached_tokens: int
    seconds: float


def make_questions(num: int, seed: int) -> list[Question]:
    """The workload: equal for equal seeds."""
    texts, rng = make_texts(None), random.Random(f"{seed}/documents")
    library = [
        {"title": f"Note {number}", "text": texts.piece(rng.randint(*DOCUMENT_TOKENS), rng, first=True)}
        for number in range(NUM_DOCUMENTS)
    ]
    rng.shuffle(library)
    weights = [1 / (rank + 1) for rank in range(NUM_DOCUMENTS)]
    questions = []
    for _ in range(num):
        found: list[int] = []
        while len(found) < TOP:
            (index,) = rng.choices(range(NUM_DOCUMENTS), weights)
            if index not in found:
                found.append(index)
        rng.shuffle(found)
        questions.append(Question(texts.piece(QUESTION_TOKENS, rng, first=True), [library[index] for index in found]))
    return questions


async def ask(client: httpx.AsyncClient, question: Question, order: str, salt: str) -> Answer:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question.text}],
        "documents": question.documents,
        "documents_order": order,
        "cache_salt": salt,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    start = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer = response.json()
    usage = answer["usage"]
    return Answer(
        answer["choices"][0]["message"]["content"],
        answer["documents_order"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        time.perf_counter() - start,
    )


async def measure(url: str, questions: Sequence[Question]) -> dict[str, Any]:
    """Hit rate and seconds of both kinds, and how many answers differ from those of the same order sent cold."""
    answers: dict[str, list[Answer]] = {order: [] for order in ORDERS}
    num_checked = num_different = 0
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for number, question in enumerate(questions):
            for order in ORDERS if number % 2 else reversed(ORDERS):
                answers[order].append(await ask(client, question, order, order))
            if number % CHECK_EVERY == 0:
                free = answers["free"][-1]
                same = question._replace(documents=[question.documents[index] for index in free.documents_order])
                cold = await ask(client, same, "fixed", f"cold {number}")
                assert cold.cached_tokens == 0 and cold.prompt_tokens == free.prompt_tokens
                num_checked += 1
                num_different += cold.text != free.text
    results = {
        order: {
            "hit_rate": sum(answer.cached_tokens for answer in given) / sum(answer.prompt_tokens for answer in given),
            "computed_tokens": sum(answer.prompt_tokens - answer.cached_tokens for answer in given),
            "mean_seconds": sum(answer.seconds for answer in given) / len(given),
        }
        for order, given in answers.items()
    }
    ratio = results["free"]["hit_rate"] / results["fixed"]["hit_rate"] if results["fixed"]["hit_rate"] else None
    return {
        "requests": len(questions),
        "orders": results,
        "hit_rate_ratio": ratio,
        "checked": num_checked,
        "different": num_different,
    }


def table(result: dict[str, Any]) -> str:
    rows = [["order", "hit rate", "tokens computed", "mean s"]]
    for order, found in result["orders"].items():
        rows.append(
            [order, f"{found['hit_rate']:.3f}", f"{found['computed_tokens']:,}", f"{found['mean_seconds']:.2f}"]
        )
    return align(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.documents", description=__doc__)
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="questions (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the workload (%(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the numbers to this JSON file as well")
    args = parser.parse_args()
    with serve() as url:
        result = asyncio.run(measure(url, make_questions(args.requests, args.seed)))
    print(table(result))
    ratio = result["hit_rate_ratio"]
    shown = "–" if ratio is None else f"{ratio:.2f}×"
    print(
        f"hit rate: {shown}; {result['different']} of {result['checked']} answers differ from the same order sent cold"
    )
    if args.output:
        args.output.write_text(json.dumps({**platform_facts(), "seed": args.seed, **result}, indent=2))
    return 1 if result["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
