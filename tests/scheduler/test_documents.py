"""Order-free documents through the engine: its call, and what requests that arrive together share."""

import random
from typing import Any

import numpy as np
import pytest

from tests.scheduler.factories import Driver, generate, make_engine
from tests.stub import VOCAB_SIZE
from trunkline.messages import Call, Reply
from trunkline.scheduler.engine import Engine

HEAD = [1, 2, 3, 4, 5]


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def choose(engine: Engine, documents: list[list[int]], **args: Any) -> list[int]:
    fields = {"tenant": "", "salt": "", "head": packed(HEAD), "documents": list(map(packed, documents)), "glue": []}
    (reply,) = engine.handle(Call(call_id=1, method="order_documents", args={**fields, **args}))
    assert isinstance(reply, Reply)
    assert reply.error is None
    return list(reply.result)


def library(seed: int, num_documents: int = 14) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(11, 23))] for _ in range(num_documents)]


def retrievals(num: int, num_documents: int, seed: int) -> list[list[int]]:
    """Five documents a request; their popularity falls as Zipf's."""
    rng = random.Random(seed)
    ranked = rng.sample(range(num_documents), num_documents)
    weights = [1 / (rank + 1) for rank in range(num_documents)]
    found = []
    for _ in range(num):
        top: list[int] = []
        while len(top) < 5:
            (document,) = rng.choices(ranked, weights)
            if document not in top:
                top.append(document)
        found.append(rng.sample(top, 5))
    return found


def hit_rate(
    documents: list[list[int]], requests: list[list[int]], *, free: bool, at_once: int, num_pages: int
) -> float:
    """Cached of all prompt tokens, `at_once` requests after the other waiting for none of their answers."""
    engine = make_engine(num_pages=num_pages, max_num_batched_tokens=64)
    driver = Driver(engine)
    num_cached = num_tokens = 0
    for start in range(0, len(requests), at_once):
        messages = []
        for number, found in enumerate(requests[start : start + at_once], start):
            order = choose(engine, [documents[index] for index in found]) if free else range(5)
            prompt = [*HEAD, *(token for index in order for token in documents[found[index]]), number % VOCAB_SIZE]
            num_tokens += len(prompt)
            messages.append(generate(f"{number}", prompt, max_tokens=2))
        driver.send(*messages)
        driver.drain()
    num_cached = sum(outcome.cached_tokens for outcome in driver.outcomes.values())
    return num_cached / num_tokens


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("num_pages", [4000, 250])
def test_free_orders_find_almost_twice_as_much(at_once: int, num_pages: int) -> None:
    """With room for everything or for some eight prompts only, one after the other or in bursts."""
    documents, requests = library(seed=3), retrievals(48, 14, seed=4)
    sent = hit_rate(documents, requests, free=False, at_once=at_once, num_pages=num_pages)
    free = hit_rate(documents, requests, free=True, at_once=at_once, num_pages=num_pages)
    assert free >= 1.8 * sent, (free, sent)


def test_the_chain_is_that_of_the_requests_tenant_and_salt() -> None:
    engine = make_engine()
    documents = library(seed=0, num_documents=3)
    fresh = choose(make_engine(), documents)
    other = fresh[::-1]
    prompt = [*HEAD, *(token for index in other for token in documents[index]), 0]
    Driver(engine).send(generate("a", prompt, salt="pepper"))
    while engine.has_work:
        engine.step()
    assert choose(engine, documents, salt="pepper") == other
    assert choose(engine, documents, salt="pepper", tenant="acme") == fresh
    assert choose(engine, documents) == fresh


def test_an_order_without_a_cache() -> None:
    engine = make_engine(caching=False)
    documents = library(seed=0, num_documents=4)
    assert sorted(choose(engine, documents)) == [0, 1, 2, 3]
    assert choose(engine, documents[:1]) == [0]
    assert choose(engine, []) == []
