"""The engine process: `python -m trunkline.scheduler.process`, started by the API process or by AsyncLLM.

    stdin    one line of JSON, messages.Startup; then kept open: its end means that the parent is gone
    socket   a zmq ROUTER bound here, in the parent's 0700 folder; frames are lists of messages (trunkline/messages.py)
    stderr   log lines; if the engine cannot start, one sentence
    exit     0 asked to stop, 1 cannot start, 2 the worker was lost, 3 (messages.RANK_LOST) another rank of the model was lost

A client says Call(0, "hello"); it is told Loading while weights are read, and Ready when requests are taken.
"""

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable

import msgspec
import zmq

from trunkline import logs
from trunkline.errors import StartupError
from trunkline.grammar.service import CompileService
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.messages import (
    RANK_LOST,
    Abort,
    Call,
    Failed,
    Finished,
    FromEngine,
    Generate,
    Loading,
    Ready,
    Reply,
    Startup,
    ToEngine,
    decode_to_engine,
    encode,
)
from trunkline.scheduler.engine import Engine
from trunkline.workers.ahead import begin

logger = logging.getLogger("trunkline.engine")

STDIN = 0


class Mailbox:
    """The socket side: who sent what, and who is told what."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.context = zmq.Context(io_threads=1)
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # a slow reader is the client's to bound; the engine never blocks on one
        self.socket.bind(address)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(STDIN, zmq.POLLIN)
        self.parent_gone = False
        self.clients: list[bytes] = []
        self.owner: dict[str, bytes] = {}  # request id -> client
        self.callers: dict[int, tuple[bytes, int]] = {}  # our number of a call -> client, and its own number
        self.num_calls = 0

    def receive(self, *, block: bool) -> list[tuple[bytes, ToEngine]]:
        """All messages that have arrived; waits for the first if `block`. A frame that can't be read is logged."""
        received: list[tuple[bytes, ToEngine]] = []
        events = dict(self.poller.poll(None if block else 0))
        if STDIN in events and not os.read(STDIN, 4096):
            self.parent_gone = True
        if self.socket in events:
            while True:
                try:
                    client, frame = self.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    received += [(client, message) for message in decode_to_engine(frame)]
                except (msgspec.DecodeError, msgspec.ValidationError) as error:
                    logger.error("A frame of %d bytes is not a list of messages and is dropped: %s", len(frame), error)
        return received

    def send(self, client: bytes, messages: list[FromEngine]) -> None:
        if messages:
            self.socket.send_multipart([client, encode(messages)])

    def numbered(self, client: bytes, call: Call) -> Call:
        """The call under a number that no other client's has: its answer may come later."""
        self.num_calls += 1
        self.callers[self.num_calls] = (client, call.call_id)
        return msgspec.structs.replace(call, call_id=self.num_calls)

    def deliver(self, messages: list[FromEngine]) -> None:
        """Send each message to the client that asked for it, one frame per client."""
        frames: dict[bytes, list[FromEngine]] = {}
        for message in messages:
            assert not isinstance(message, Loading | Ready)
            if isinstance(message, Reply):
                client, call_id = self.callers.pop(message.call_id)
                frames.setdefault(client, []).append(msgspec.structs.replace(message, call_id=call_id))
                continue
            if asker := self.owner.get(message.request_id):
                frames.setdefault(asker, []).append(message)
            if isinstance(message, Finished | Failed):  # the last word about it
                self.owner.pop(message.request_id, None)
        for client, batch in frames.items():
            self.send(client, batch)

    def close(self) -> None:
        """Free the socket, and remove its folder: a parent that was killed cannot do that."""
        self.socket.close(linger=1000)
        self.context.term()
        path = self.address.removeprefix("ipc://")
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(os.path.dirname(path))


class EngineServer:
    """Load, then serve until the parent goes away."""

    def __init__(self, startup: Startup) -> None:
        self.config = startup.config
        self.mailbox = Mailbox(startup.socket)
        self.early: list[tuple[bytes, ToEngine]] = []  # came while loading

    def run(self) -> int:
        try:
            self._serve(*self._load())
        finally:
            self.mailbox.close()
        return 0

    def _serve(self, engine: Engine, ready: Ready) -> None:
        gc.collect()
        gc.freeze()  # what is loaded stays: later collections need not look at it
        for client in self.mailbox.clients:
            self.mailbox.send(client, [ready])
        status = StatusLine(engine, self.config.log_stats_seconds)
        received, self.early = self.early, []
        while not self.mailbox.parent_gone:
            for client, message in received:
                self._take(engine, ready, client, message)
            self.mailbox.deliver(engine.step())
            status.update()
            if engine.has_work:
                received = self.mailbox.receive(block=False)
            else:
                idle_since = time.monotonic()
                received = self.mailbox.receive(block=True)
                status.skip(time.monotonic() - idle_since)
        engine.close()

    def _load(self) -> tuple[Engine, Ready]:
        begin(self.config.worker)
        gc.disable()  # of so many objects that all stay
        # Imports torch: late, so that the socket is bound before.
        from trunkline.workers.worker import load_worker

        gc.freeze()
        gc.enable()
        worker, config = load_worker(self.config, self._on_progress, on_lost=_end), self.config.scheduler
        tokenizer = worker.tokenizer
        assert tokenizer is not None, "load_worker reads it"
        engine = Engine(
            self.config,
            worker,
            eos_token_ids=worker.eos_token_ids,
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
            # Nothing is built, and no library imported, before the first grammar comes.
            grammars=CompileService(
                lambda: Vocabulary(tokenizer, worker.vocab_size, worker.eos_token_ids), self.config.grammar
            ),
        )
        ready = Ready(
            max_model_len=worker.max_model_len,
            num_pages=worker.num_pages,
            page_size=worker.page_size,
            vocab_size=worker.vocab_size,
            eos_token_ids=worker.eos_token_ids,
            dtype=worker.dtype,
            device=worker.device,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tiers=engine.tiers.descriptions if engine.tiers is not None else (),
        )
        return engine, ready

    def _on_progress(self, done: int, total: int) -> None:
        for client, message in self.mailbox.receive(block=False):
            if isinstance(message, Call) and message.method == "hello":
                self.mailbox.clients.append(client)
            else:
                self.early.append((client, message))
        for client in self.mailbox.clients:
            self.mailbox.send(client, [Loading(done=done, total=total)])
        if self.mailbox.parent_gone:
            sys.exit(0)

    def _take(self, engine: Engine, ready: Ready, client: bytes, message: ToEngine) -> None:
        if isinstance(message, Call) and message.method == "hello":
            self.mailbox.send(client, [ready])
            return
        if isinstance(message, Call):
            self.mailbox.deliver(engine.handle(self.mailbox.numbered(client, message)))
            return
        answers = engine.handle(message)
        self.mailbox.send(client, answers)
        if isinstance(message, Generate) and not answers:  # else it has ended already
            self.mailbox.owner[message.request_id] = client
        elif isinstance(message, Abort):
            self.mailbox.owner.pop(message.request_id, None)


class StatusLine:
    """One line in the log for every so many seconds of work; idle time does not count. One more, once, if prompts hold up texts."""

    def __init__(self, engine: Engine, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.seconds = seconds
        self.clock = clock
        self.before = engine.stats()
        self.at = clock()
        self._has_warned = engine.scheduler.config.target_token_seconds is not None  # who has set it, knows

    def skip(self, seconds: float) -> None:
        """The engine was idle for so long."""
        self.at += seconds

    def update(self) -> None:
        """Write the line if it is time."""
        now = self.clock()
        elapsed = now - self.at
        if not self.seconds or elapsed < self.seconds:
            return
        stats, before = self.engine.stats(), self.before
        self.before, self.at = stats, now

        def grown(name: str) -> float:
            return _total(stats[name]) - _total(before[name])

        if not (grown("prompt_tokens_computed_total") or grown("generation_tokens_total")):
            return
        queries = grown("prefix_cache_queries_total")
        logger.info(
            "Running: %d reqs, Waiting: %d reqs, prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, "
            "KV cache usage: %.1f%%%s, prefix cache hit rate: %.1f%%",
            stats["running"],
            stats["waiting"],
            grown("prompt_tokens_computed_total") / elapsed,
            grown("generation_tokens_total") / elapsed,
            100 * stats["kv_cache_usage"],
            "".join(
                f", {tier}: {100 * stats['tier_usage'][tier]:.1f}%" for tier in stats["tier_usage"] if tier != "device"
            ),
            100 * grown("prefix_cache_hits_total") / queries if queries else 0.0,
        )
        if self.engine.longest_hold_up and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Texts under way waited %.1f s for their next token while a prompt was read. If people read along, start with"
                " --target-token-seconds 0.1; prompts are then read in smaller pieces, and somewhat later.",
                self.engine.longest_hold_up,
            )


def _total(counter: float | dict[str, float]) -> float:
    """Of a counter, or of one that is kept by label."""
    return float(sum(counter.values()) if isinstance(counter, dict) else counter)


def _end(why: str) -> None:
    """The ranks of the model can't go on. This thread ends the process at once: the others may wait for a rank that is gone."""
    logger.error("%s The engine process ends.", why)
    os._exit(RANK_LOST)


def main() -> int:
    startup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Startup)
    logs.configure("engine", startup.log_format)
    try:
        return EngineServer(startup).run()
    except StartupError as error:
        print(f"trunkline: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except Exception:
        logger.exception("The engine cannot go on.")
        return 2


if __name__ == "__main__":
    sys.exit(main())
