"""What all users share: they ask a server for streamed chats, and every answer is measured and checked.

A user of its own is a class with a `kind`, the name of its rows in the statistics, and tasks that call `ask`. The API key, if there is
one, is read from the environment variable OPENAI_API_KEY. Knows no engine: any OpenAI-compatible server can be put under such load.
"""

import itertools
import os
import random
import time
from collections.abc import Callable
from typing import Any

import requests
from locust import HttpUser, between

from loadtests import hooks  # noqa: F401  # Locust is told on import
from loadtests.answer import Answer, BrokenAnswerError, read_answer
from loadtests.measures import record, record_valid
from trunkline.bench.texts import words

Check = Callable[[Answer], str | None]  # why an answer does not follow its schema, or None

_numbers = itertools.count()


def text(name: str, length: int) -> str:
    """`length` words; the same name gives the same text."""
    return " ".join(random.Random(name).choices(words(), k=length)).capitalize() + "."


class ModelUser(HttpUser):
    """One person, who waits for an answer, thinks, and goes on."""

    abstract = True
    kind = ""
    wait_time = between(0.1, 1.0)

    def on_start(self) -> None:
        self.number = f"{self.environment.runner.worker_index}.{next(_numbers)}"  # no two users ask the same
        self.rng = random.Random(self.number)
        self.options = self.environment.parsed_options
        if key := os.environ.get("OPENAI_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"
        self.model = self.options.model or self.client.get("/v1/models").json()["data"][0]["id"]
        self.asked = 0

    def application(self) -> int:
        """One of the applications; each opens all its prompts with its own text."""
        return self.rng.randrange(self.options.applications)

    def question(self, length: int) -> str:
        """Words that nobody has asked before."""
        self.asked += 1
        return text(f"question {self.number}.{self.asked}", length)

    def ask(self, messages: list[dict[str, Any]], *, check: Check | None = None, **fields: Any) -> Answer | None:
        """Stream one answer. Returns None, and reports a failure, if there was none or `check` objects.

        The time of Locust's row is that of the whole answer, to its last byte.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.options.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        started = time.perf_counter()
        request = self.client.post("/v1/chat/completions", json=body, name=self.kind, stream=True, catch_response=True)
        with request as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {response.error or response.text[:200]}")
                return None
            try:
                answer = read_answer(response.iter_content(chunk_size=None), started)
            except (BrokenAnswerError, requests.RequestException) as error:
                response.failure(str(error))
                return None
            response.request_meta["response_time"] = 1000 * (time.perf_counter() - started)
            response.request_meta["response_length"] = len(answer.text.encode())
            record(self.environment.stats, self.kind, answer)
            objection = check(answer) if check else None
            if check:
                record_valid(self.environment.stats, self.kind, objection is None)
            if objection:
                response.failure(objection)
                return None
            response.success()
        return answer
