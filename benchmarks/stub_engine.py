"""A server whose engine computes nothing: what is left of its cost is the API process's.

    python -m benchmarks.stub_engine serve --port 0 …     # `trunkline serve` with the engine process replaced
    python -m benchmarks.stub_engine                      # that engine process: Startup on stdin, as the real one

It speaks the engine's messages (trunkline/messages.py) over the same socket, in the same frames: a step gives every
request one token, and all that a step has to say goes out in one frame. The tokens are those of an English text, over
and over. A first token comes at once, with what a real one tells of cache and times; steps are STEP_SECONDS apart.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import zmq

from trunkline.bench import texts
from trunkline.messages import (
    Abort,
    CacheReport,
    Call,
    Finished,
    FromEngine,
    Generate,
    Ready,
    Reply,
    Startup,
    ToEngine,
    Tokens,
    decode_to_engine,
    encode,
)
from trunkline.models.tokenizer import Tokenizer, load_tokenizer

STEP_SECONDS = 0.02  # 50 tokens a second for each stream, however many there are
NUM_WORDS = 500
MAX_MODEL_LEN = 32_768
PAGE_SIZE = 16
STDIN = 0


@dataclass(slots=True)
class Running:
    """A request that has more tokens to come."""

    request: Generate
    text: Iterator[int]
    num_tokens: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_tokens >= (self.request.sampling.max_tokens or 1)

    def next(self) -> list[FromEngine]:
        """One token, and after the last one the end."""
        request_id, num_prompt = self.request.request_id, len(self.request.prompt) // 4
        cached, is_first = (num_prompt - 1) // PAGE_SIZE * PAGE_SIZE, self.num_tokens == 0
        self.num_tokens += 1
        report = CacheReport(prompt_tokens=num_prompt, cached_tokens=cached, cached_by_tier={"device": cached})
        tokens = Tokens(
            request_id=request_id,
            token_ids=[next(self.text)],
            cached_tokens=cached,
            cache_report=report if is_first else None,
            queue_seconds=0.0 if is_first else None,
            prefill_seconds=0.001 if is_first else None,
        )
        if not self.is_done:
            return [tokens]
        finished = Finished(
            request_id=request_id,
            reason="length",
            prompt_tokens=num_prompt,
            cached_tokens=cached,
            completion_tokens=self.num_tokens,
        )
        return [tokens, finished]


class StubEngine:
    """Answers every request with the same text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ready = Ready(
            max_model_len=MAX_MODEL_LEN,
            num_pages=MAX_MODEL_LEN,
            page_size=PAGE_SIZE,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            dtype="none",
            device="stub",
            max_num_seqs=1024,
            max_num_batched_tokens=2048,
        )
        words = "".join(f" {word}" for word in texts.words()[:NUM_WORDS])
        self._text = tokenizer.encode(words, add_special_tokens=False)
        self._running: dict[str, Running] = {}

    @property
    def is_working(self) -> bool:
        return bool(self._running)

    def handle(self, message: ToEngine) -> list[FromEngine]:
        """What is said at once."""
        match message:
            case Call(method="hello"):
                return [self.ready]
            case Call():
                return [Reply(call_id=message.call_id, error="The stub engine knows no calls.")]
            case Abort():
                self._running.pop(message.request_id, None)
                return []
            case Generate():
                self._running[message.request_id] = Running(message, itertools.cycle(self._text))
                return self._advance([message.request_id])

    def step(self) -> list[FromEngine]:
        """A token for every request."""
        return self._advance(list(self._running))

    def _advance(self, request_ids: Iterable[str]) -> list[FromEngine]:
        messages = []
        for request_id in request_ids:
            messages += self._running[request_id].next()
            if self._running[request_id].is_done:
                del self._running[request_id]
        return messages


def run(startup: Startup) -> int:
    """Until the parent is gone. One client: it is a benchmark's."""
    engine = StubEngine(load_tokenizer(startup.config.model.path))
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.bind(startup.socket)
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(STDIN, zmq.POLLIN)
    client, next_step = b"", time.monotonic()
    while True:
        wait = max(0.0, next_step - time.monotonic()) if engine.is_working else None
        events = dict(poller.poll(None if wait is None else round(1000 * wait)))
        if STDIN in events and not os.read(STDIN, 4096):
            return 0
        was_working = engine.is_working
        messages: list[FromEngine] = []
        while socket in events and socket.poll(0):
            client, frame = socket.recv_multipart()
            for message in decode_to_engine(frame):
                messages += engine.handle(message)
        now = time.monotonic()
        if not was_working:
            next_step = now + STEP_SECONDS
        elif now >= next_step:
            messages += engine.step()
            next_step = max(now, next_step + STEP_SECONDS)
        if messages:
            socket.send_multipart([client, encode(messages)])


def serve(arguments: list[str]) -> int:
    """`trunkline serve` with this engine."""
    from trunkline.api import engine_process
    from trunkline.cli import main

    engine_process.ENGINE = "benchmarks.stub_engine"
    return main(["serve", *arguments])


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[2:]))
    sys.exit(run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Startup)))
