"""The child in which sources are tried out: `python -m trunkline.grammar.sandbox_child`, started by sandbox.Sandbox.

    stdin    frames: Start once, then Vet after Vet; its end means that the engine is gone
    stdout   frames: Loaded, then a Verdict, for each Vet
    exit     0 stdin ended, or nothing came for a while

Each source is compiled in a process forked for it, which has limits and may die. This one has a single thread, allocates
little and compiles nothing: it lives on.
"""

import os
import resource
import select
import signal
import sys
import time

import msgspec

from trunkline.constraint import GrammarSource
from trunkline.grammar.backends import registry
from trunkline.grammar.interface import Backend, MatcherFailed
from trunkline.grammar.measure import measure_masks
from trunkline.grammar.sandbox import Channel, Loaded, Start, Verdict, Vet, shorten
from trunkline.grammar.vocabulary import Vocabulary
from trunkline.models.tokenizer import Tokenizer

STDIN, STDOUT, STDERR = 0, 1, 2
MOST_GROWN = 512 * 2**20  # bytes of resident memory: what compiles here is then compiled in the engine
CPU_PER_SECOND = 4  # CPU seconds that a source may use per second that it takes: libraries compile on several threads


class SentTokenizer(Tokenizer):
    """The tokens that the engine sent. Reads a text greedily: near enough to what its own tokenizer does to time it."""

    def __init__(self, start: Start) -> None:
        super().__init__(
            vocab_size=len(start.tokens),
            special_ids=start.special_ids,
            bos_token_id=None,
            eos_token_ids=start.eos_token_ids,
            special_tokens={},
            chat_template=None,
            strips_leading_space=False,
        )
        self._tokens = start.tokens
        self._ids = {
            token: index for index, token in enumerate(start.tokens) if index not in self.special_ids and token
        }
        self._longest = max(map(len, self._ids), default=0)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else b""

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        data, at, ids = text.encode(), 0, list[int]()
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                return ids
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


class Child:
    """Answers one Vet after the other."""

    def __init__(self, channel: Channel, start: Start) -> None:
        self.channel = channel
        self.start = start
        self.vocabulary = Vocabulary(SentTokenizer(start), start.num_logits, start.eos_token_ids)
        self.backends: dict[str, Backend] = {}

    def run(self) -> None:
        """Until stdin ends, or nothing came for a while."""
        while True:
            try:
                vet = self.channel.receive(self.start.idle_seconds)
            except TimeoutError:
                return
            if vet is None:
                return
            try:
                backend = self._backend(vet.source.backend)
            except Exception as error:  # noqa: BLE001 - whatever a library does on import, it is the answer
                self.channel.send(Loaded())
                self.channel.send(Verdict(ok=False, reason=f"cannot be loaded: {shorten(error)}"))
                continue
            self.channel.send(Loaded())
            verdict = self._vet(backend, vet)
            if verdict is None:
                return
            self.channel.send(verdict)

    def _backend(self, name: str) -> Backend:
        if name not in self.backends:
            self.backends[name] = registry.make(name, self.vocabulary)
        return self.backends[name]

    def _vet(self, backend: Backend, vet: Vet) -> Verdict | None:
        """None: stdin has ended meanwhile."""
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._try(backend, vet, write_fd)
        os.close(write_fd)
        try:
            ready = _wait(read_fd, self.channel.read_fd, vet.seconds)
            answer = os.read(read_fd, 2**16) if read_fd in ready else b""
        finally:
            os.close(read_fd)
            os.kill(pid, signal.SIGKILL)  # it may have ended: then it waits for us to look
            _, status = os.waitpid(pid, 0)
        if answer:
            return msgspec.msgpack.decode(answer, type=Verdict)
        if read_fd in ready:
            return self._verdict_of(status, vet)
        return None if ready else _too_slow(vet)

    def _verdict_of(self, status: int, vet: Vet) -> Verdict:
        """It ended without a word."""
        if not os.WIFSIGNALED(status):
            return Verdict(ok=False, reason="ended the process that tried it out")
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return _too_slow(vet)
        most = self.start.most_bytes / 2**20
        name = signal.Signals(number).name
        return Verdict(
            ok=False,
            reason=f"crashed the process that tried it out ({name}), which may use {most:,.0f} MiB more memory",
        )

    def _try(self, backend: Backend, vet: Vet, write_fd: int) -> None:
        """In the process forked for this source. Does not return."""
        try:
            before = resident_bytes()
            if has := address_space():
                _limit("RLIMIT_AS", has + self.start.most_bytes)
            _limit("RLIMIT_CPU", int(vet.seconds * CPU_PER_SECOND) + 1)
            _limit("RLIMIT_CORE", 0)
            verdict = try_source(backend, self.vocabulary, vet.source, self.start.slowest_mask)
            grown = max(0, peak_bytes() - before)
            if verdict.ok and grown > MOST_GROWN:
                reason = f"needs {grown / 2**20:,.0f} MiB to compile; at most {MOST_GROWN / 2**20:,.0f} are allowed"
                verdict = msgspec.structs.replace(verdict, ok=False, reason=reason)
            os.write(write_fd, msgspec.msgpack.encode(msgspec.structs.replace(verdict, grown_bytes=grown)))
        finally:
            os._exit(0)  # whatever happened: nothing here may run on as a second parent


def try_source(backend: Backend, vocabulary: Vocabulary, source: GrammarSource, slowest_mask: float) -> Verdict:
    """Compile, and fill some masks."""
    started_at = time.perf_counter()
    try:
        compiled = backend.compile(source)
        seconds = time.perf_counter() - started_at
        cost = measure_masks(compiled, vocabulary, time.perf_counter)
    except MemoryError:
        return Verdict(ok=False, reason="needs more memory than is allowed")
    except MatcherFailed as error:
        return Verdict(ok=False, reason=f"fails on a text that it should allow: {shorten(error)}")
    except ValueError as error:
        return Verdict(ok=False, reason=shorten(error))
    found = Verdict(ok=True, compile_seconds=seconds, mask_seconds=cost.usual, num_bytes=compiled.num_bytes)
    if cost.usual <= slowest_mask:
        return found
    reason = (
        f"takes {cost.usual * 1000:.1f} ms to tell the allowed tokens, for every token of the text; at most"
        f" {slowest_mask * 1000:g} ms are allowed"
    )
    return msgspec.structs.replace(found, ok=False, reason=reason)


def address_space() -> int:
    """Bytes of address space this process has; 0 where the system does not say."""
    return _pages(0)


def resident_bytes() -> int:
    """Bytes of memory it holds; 0 where the system does not say."""
    return _pages(1)


def peak_bytes() -> int:
    """Most bytes of memory it ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _pages(field: int) -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[field]) * resource.getpagesize()
    except OSError:
        return 0


def _limit(name: str, most: int) -> None:
    """Where the system knows the limit, and ours is not looser than the one there is."""
    which = getattr(resource, name)
    _, hard = resource.getrlimit(which)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(which, (most, hard))


def _wait(answer_fd: int, stdin_fd: int, seconds: float) -> set[int]:
    """Which of the two can be read, or has ended, within so many seconds."""
    poller = select.poll()
    for fd in (answer_fd, stdin_fd):
        poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(seconds * 1000)}


def _too_slow(vet: Vet) -> Verdict:
    return Verdict(
        ok=False,
        timed_out=True,
        reason=f"took more than {vet.seconds:g} seconds to compile and to tell the first allowed tokens",
    )


def main() -> None:
    channel = Channel(os.dup(STDIN), os.dup(STDOUT), Start | Vet)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, STDIN)
    os.dup2(nothing, STDOUT)  # what libraries print must not end up in a frame
    start = channel.receive(60.0)
    if isinstance(start, Start):
        Child(channel, start).run()


if __name__ == "__main__":
    main()
