"""RAG users: many people, a few applications. Each application opens all its prompts with the same long system text.

    locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 --users 16 --spawn-rate 4 --run-time 60s

Beside Locust's own table, which counts a streamed request as done when its first byte arrives, every answer reports

    TTFT     milliseconds to the first chunk that carries text
    answer   milliseconds to the last one

and at the end one line says how many prompt tokens the server had cached. The API key, if there is one, is read from the
environment variable OPENAI_API_KEY. Knows no engine: any OpenAI-compatible server can be put under this load.
"""

import itertools
import json
import os
import random
import time
from argparse import ArgumentParser
from collections import Counter
from typing import Any

from locust import HttpUser, between, events, task
from locust.env import Environment

from trunkline.bench.client import EventParser
from trunkline.bench.texts import words

SYSTEM_WORDS = 400
DOCUMENT_WORDS = 100
NUM_DOCUMENTS = 8  # of each application
QUESTION_WORDS = 15

tokens: Counter[str] = Counter()  # prompt, cached and output tokens of all answers
_numbers = itertools.count()


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="the model's name (default: the first that /v1/models lists)")
    parser.add_argument("--applications", type=int, default=4, help="different system prompts (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer (%(default)s)")


@events.quitting.add_listener
def report(environment: Environment, **_: Any) -> None:
    share = 100 * tokens["cached"] / max(1, tokens["prompt"])
    print(
        f"{tokens['prompt']:,} prompt tokens, {tokens['cached']:,} of them cached ({share:.1f} %);"
        f" {tokens['output']:,} output tokens"
    )


def text(name: str, length: int) -> str:
    """`length` words; the same name gives the same text."""
    return " ".join(random.Random(name).choices(words(), k=length)).capitalize() + "."


class RagUser(HttpUser):
    """Asks one application after another about one of its documents, and now and then asks on."""

    wait_time = between(0.1, 1.0)

    def on_start(self) -> None:
        self.number = next(_numbers)
        self.rng = random.Random(self.number)
        self.options = self.environment.parsed_options
        if key := os.environ.get("OPENAI_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"
        self.model = self.options.model or self.client.get("/v1/models").json()["data"][0]["id"]
        self.asked = 0

    @task(4)
    def ask(self) -> None:
        self.converse(turns=1)

    @task(1)
    def ask_twice(self) -> None:
        self.converse(turns=2)

    def converse(self, turns: int) -> None:
        application = self.rng.randrange(self.options.applications)
        document = text(f"document {application}.{self.rng.randrange(NUM_DOCUMENTS)}", DOCUMENT_WORDS)
        messages = [{"role": "system", "content": text(f"system {application}", SYSTEM_WORDS)}]
        for turn in range(turns):
            self.asked += 1
            question = text(f"question {self.number}.{self.asked}", QUESTION_WORDS)
            content = f"{document}\n\n{question}" if turn == 0 else question
            messages.append({"role": "user", "content": content})
            answer = self.answer(messages)
            if answer is None:
                return
            messages.append({"role": "assistant", "content": answer})

    def answer(self, messages: list[dict[str, str]]) -> str | None:
        """Stream one answer and report its times. Returns its text, or None if the request failed."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.options.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        said: list[str] = []
        usage: dict[str, Any] = {}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {response.text[:200]}")
                return None
            stream = EventParser()
            for received in response.iter_content(chunk_size=None):
                for data in stream.feed(received):
                    if data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        response.failure(f"error in the stream: {chunk['error']}")
                        return None
                    for choice in chunk.get("choices", ()):
                        if content := choice["delta"].get("content"):
                            if not said:
                                self.measured("TTFT", start)
                            said.append(content)
                    usage = chunk.get("usage") or usage
            if not usage:
                response.failure("the stream ended without usage")
                return None
            response.success()
        self.measured("answer", start)
        tokens["prompt"] += usage["prompt_tokens"]
        tokens["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        tokens["output"] += usage["completion_tokens"]
        return "".join(said)

    def measured(self, name: str, start: float) -> None:
        self.environment.events.request.fire(
            request_type="stream",
            name=name,
            response_time=1000 * (time.perf_counter() - start),
            response_length=0,
            exception=None,
            context={},
        )
