"""Tries sources out in a child process, which may be killed, before the engine compiles them itself. The engine's side.

    verdict = sandbox.vet(source, seconds=2.5)     # blocks; for a thread
    verdict.ok                                     # else `reason`, half a sentence

    engine                         child, loads a backend once          one more child a source, forked from it
    vet ── source ──►  stdin       waits at most `seconds`, ──fork──►   memory and CPU limits; compiles; fills some masks
                       stdout ──►  kills it, says what came of it ◄──   Verdict, or a signal

So a backend is imported once, and each source begins with the same memory. Only the verdict comes back: sending a
compiled grammar takes longer than compiling it. The child starts with the first source, ends by itself when nothing came
for `idle_seconds`, and when its stdin ends: it never outlives the engine. Its own side is sandbox_child.py.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from trunkline.constraint import GrammarSource
from trunkline.grammar.vocabulary import Vocabulary

MOST_BYTES = 2 * 2**30  # of address space that one source may add
SLOWEST_MASK = 0.005  # seconds; every text of the batch waits for it, token after token
IDLE_SECONDS = 300.0
LOADING_SECONDS = 120.0  # to start Python and import a backend; some import torch
GRACE_SECONDS = 5.0  # beyond what a source may take, until the child itself is held to be stuck
LONGEST_REASON = 200  # characters
HEADER_BYTES = 4  # little-endian length of the MessagePack that follows


class Start(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """The first message to the child: the vocabulary, and its limits."""

    tokens: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]
    num_logits: int
    most_bytes: int
    slowest_mask: float
    idle_seconds: float


class Vet(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """Try this source. The child answers Loaded, then a Verdict."""

    source: GrammarSource
    seconds: float


class Loaded(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """The backend is there; from now on time counts."""


class Verdict(msgspec.Struct, tag=True, tag_field="kind", frozen=True, kw_only=True):
    """What came of a source.

    reason           half a sentence: why not
    timed_out        it took too long
    compile_seconds  wall time
    mask_seconds     wall time of one mask, see measure.MaskCost.usual
    num_bytes        as the backend tells
    grown_bytes      by how much resident memory grew at its peak
    """

    ok: bool
    reason: str = ""
    timed_out: bool = False
    compile_seconds: float = 0.0
    mask_seconds: float = 0.0
    num_bytes: int = 0
    grown_bytes: int = 0


class SandboxFailed(Exception):
    """No child could be started, or the sandbox is closed: nothing is known about the source."""


def shorten(error: BaseException) -> str:
    """An error's own words, on one line, cut if long: libraries repeat what they were given."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


class Channel:
    """Frames of MessagePack over two file descriptors."""

    def __init__(self, read_fd: int, write_fd: int, type_: Any) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._decoder = msgspec.msgpack.Decoder(type_)

    def send(self, message: msgspec.Struct, seconds: float = LOADING_SECONDS) -> None:
        """Raises BrokenPipeError if the other side has ended, and TimeoutError if it does not read."""
        deadline = time.monotonic() + seconds
        body = msgspec.msgpack.encode(message)
        frame = memoryview(len(body).to_bytes(HEADER_BYTES, "little") + body)
        poller = select.poll()
        poller.register(self.write_fd, select.POLLOUT)
        while frame:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            frame = frame[os.write(self.write_fd, frame[: select.PIPE_BUF]) :]  # more might block

    def receive(self, seconds: float) -> Any:
        """The next message; None if the other side has ended. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        header = self._read(HEADER_BYTES, deadline)
        body = self._read(int.from_bytes(header, "little"), deadline) if header else b""
        return self._decoder.decode(body) if body else None

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        """So many bytes, or none where they end too early."""
        chunks: list[bytes] = []
        poller = select.poll()
        poller.register(self.read_fd, select.POLLIN)
        while num_bytes:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self.read_fd, min(num_bytes, 2**16))
            if not chunk:
                return b""
            chunks.append(chunk)
            num_bytes -= len(chunk)
        return b"".join(chunks)


class Child:
    """One child process, and the channel to it."""

    def __init__(self, start: Start) -> None:
        """Raises OSError if it cannot be started."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trunkline.grammar.sandbox_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries print schemas there
            start_new_session=True,  # Ctrl-C is for the engine; and what it forks is killed with it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno(), Loaded | Verdict)
        self.loaded: set[str] = set()  # backends
        with contextlib.suppress(BrokenPipeError, TimeoutError):  # whoever asks first will see that it is gone
            self.channel.send(start)

    def kill(self) -> None:
        """End it and what it forked. Idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and free its pipes. Only for the thread that reads from it."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Sandbox:
    """Vets one source at a time.

    vocabulary    what grammars are compiled for; asked for when the child starts
    most_bytes    of address space that one source may add
    slowest_mask  seconds that the mask of one token may usually take
    idle_seconds  after which the child ends by itself
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        most_bytes: int = MOST_BYTES,
        slowest_mask: float = SLOWEST_MASK,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.num_started = 0
        self._vocabulary = vocabulary
        self._most_bytes = most_bytes
        self._slowest_mask = slowest_mask
        self._idle_seconds = idle_seconds
        self._turn = threading.Lock()  # whose source is tried
        self._state = threading.Lock()  # guards the two below; never held for long
        self._child: Child | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the child, if one was started and not found dead."""
        child = self._child
        return None if child is None else child.process.pid

    def vet(self, source: GrammarSource, *, seconds: float) -> Verdict:
        """Compile a source in the child, and fill some masks, all within so many seconds. Blocks.

        Raises SandboxFailed if there is no child to do it.
        """
        with self._turn:
            for _ in range(2):  # the child may have ended just now, having been idle
                child = self._start()
                verdict = self._ask(child, Vet(source=source, seconds=seconds))
                if verdict is not None:
                    return verdict
        raise SandboxFailed("The process that tries grammars out ended twice before it looked at this one.")

    def close(self) -> None:
        """End the child; whoever waits for it gets SandboxFailed. Idempotent."""
        with self._state:
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()
            with self._turn:  # its reader, if any, sees the end at once
                self._drop(child)

    def _start(self) -> Child:
        with self._state:
            if self._closed:
                raise SandboxFailed("The engine is shutting down.")
            if self._child is not None:
                return self._child
        vocabulary = self._vocabulary()
        start = Start(
            tokens=list(vocabulary.tokens),
            special_ids=sorted(vocabulary.special_ids),
            eos_token_ids=list(vocabulary.eos_token_ids),
            num_logits=vocabulary.num_logits,
            most_bytes=self._most_bytes,
            slowest_mask=self._slowest_mask,
            idle_seconds=self._idle_seconds,
        )
        try:
            child = Child(start)
        except OSError as error:
            raise SandboxFailed(f"The process that tries grammars out cannot be started: {error}.") from error
        self.num_started += 1
        with self._state:
            self._child = child
            closed = self._closed
        if closed:
            child.kill()
        return child

    def _drop(self, child: Child) -> None:
        """Only with the turn."""
        with self._state:
            if self._child is child:
                self._child = None
        child.close()

    def _ask(self, child: Child, vet: Vet) -> Verdict | None:
        """None: the child had ended before it began with this source, or did not answer."""
        began = False
        backend = vet.source.backend
        try:
            begins_within = GRACE_SECONDS if backend in child.loaded else LOADING_SECONDS
            child.channel.send(vet, begins_within)
            if child.channel.receive(begins_within) is not None:
                began = True
                child.loaded.add(backend)
                answer = child.channel.receive(vet.seconds + GRACE_SECONDS)
                if isinstance(answer, Verdict):
                    return answer
        except BrokenPipeError:
            pass
        except TimeoutError:
            self._drop(child)
            if not began:  # stuck, or stopped: not this source's fault
                return None
            return Verdict(ok=False, timed_out=True, reason=f"took more than {vet.seconds:g} seconds")
        self._drop(child)
        if began and not self._closed:  # whatever it was, it was this source
            return Verdict(ok=False, reason="ended the process that tried it out")
        return None
