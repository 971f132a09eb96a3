"""Tensor parallelism: a model whose parts are held by several processes, each with a device of its own.

    worker = load_group(config)       # starts the other ranks; this process is rank 0
    handle = worker.submit(plan)      # the plan goes to all ranks, and all compute it
    result = worker.wait(handle)      # tokens are chosen here
    worker.close()                    # ends them all

    engine process: rank 0                                rank 1 … n-1: python -m trunkline.workers.rank
    scheduler ─ plan ─┬─ LocalWorker ─ its part           ┌─ LocalWorker ─ its part
                      └─ socket pair, msgpack ───────────►┘
                                   └──── collectives (NCCL, gloo): sums in every layer ────┘

Who is gone is seen by the socket pair, which the system closes with a process: a rank that reads its end there ends itself, even in
the middle of a step, so that none outlives this process; and a thread here tells of a rank that has ended. One that hangs is told of by a
step that does not end. What is left of such a group cannot go on: its engine must be started again.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_any
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline import child
from trunkline.config import EngineConfig
from trunkline.errors import ConfigError, EngineDead, StartupError
from trunkline.kernels.collectives import ALONE, CollectiveError, Collectives, connect
from trunkline.kernels.interface import make_batch
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.tokenizer import Tokenizer
from trunkline.step import Plan, StepResult, UInt8
from trunkline.workers.plan_message import encode_plan
from trunkline.workers.rank import Broken, FromRank, Hello, Loaded, Start
from trunkline.workers.runner import check_copy
from trunkline.workers.worker import LocalWorker, check_rows, device_of, load_part

if TYPE_CHECKING:
    from trunkline.workers.gpu_worker import GpuWorker

logger = logging.getLogger("trunkline.engine")

END_SECONDS = 5.0  # for a rank to end once its connection is closed
STEP_SECONDS = 300.0  # for a step: far more than the longest takes, also where kernels are compiled for it first
LAST_WORDS_SECONDS = 2.0  # between a broken connection to a rank and what is heard of why


def load_group(
    config: EngineConfig,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    on_lost: Callable[[str], None] | None = None,
) -> "GroupWorker":
    """Start the ranks of `config.worker.tensor_parallel_size`, and load every part; see worker.load_worker."""
    size = config.worker.tensor_parallel_size
    if config.cache.disk_cache_dir is not None:
        raise ConfigError(
            f"--disk-cache-dir is given, but with --tensor-parallel-size {size} no process holds whole pages to write there;"
            " leave one of them out."
        )
    open_checkpoint(config.model).check_ranks(size)  # before any process is started
    device_of(config.worker, 0)
    logger.info("Starting %d ranks: this process and %d more.", size, size - 1)
    group = RankGroup(config, size)
    try:
        ranks = group.meet()
        worker = load_part(config, ranks, on_progress, tokenizer=tokenizer)
        group.wait_loaded(on_lost)
    except CollectiveError as error:
        why = group.why_lost(LAST_WORDS_SECONDS) or str(error)
        group.close()
        raise StartupError(why) from error
    except BaseException:
        group.close()
        raise
    logger.info("All %d ranks have loaded their parts.", size)
    return GroupWorker(worker, group, ranks)


class RankGroup:
    """The processes of ranks 1 … size-1, and the connections to them.

    lost   done once one of them has ended, or can't go on: its result says why
    """

    def __init__(self, config: EngineConfig, size: int) -> None:
        self.lost: Future[str] = Future()
        self._config = config
        self._size = size
        self._is_closing = False
        self._losing = threading.Lock()
        self._on_lost: Callable[[str], None] | None = None
        self._ranks: Collectives = ALONE  # until they have met
        self._folder = Path(tempfile.mkdtemp(prefix="trunkline-ranks-"))  # mode 0700
        self._others: list[_Rank] = []
        try:
            for rank in range(1, size):
                start = Start(config=config, rank=rank, size=size, folder=str(self._folder))
                self._others.append(_Rank(start, self.lose))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the other ranks' processes."""
        return [other.process.pid for other in self._others]

    def meet(self) -> Collectives:
        """Wait until the others have come, and connect to them. Raises StartupError if one never does."""
        for other in self._others:  # importing the libraries takes seconds, and much longer on a busy machine
            self._wait(other.hello)
        device = device_of(self._config.worker, 0)
        met: Future[Collectives] = Future()

        def connect_here() -> None:
            try:
                ranks = connect(self._folder, rank=0, size=self._size, device=device)
            except CollectiveError as error:
                met.set_exception(error)
                return
            if device.type == "cpu":  # NCCL looks there later, too
                shutil.rmtree(self._folder, ignore_errors=True)
            met.set_result(ranks)

        # On a thread, since it would wait long for one that ends right now.
        threading.Thread(target=connect_here, name="meet ranks", daemon=True).start()
        ranks: Collectives = self._wait(met)
        with self._losing:
            self._ranks = ranks
            if not self.lost.done():
                return ranks
        raise StartupError(self.lost.result())

    def wait_loaded(self, on_lost: Callable[[str], None] | None = None) -> None:
        """Wait until the others take plans. Raises StartupError if one never does.

        on_lost  is told from then on why the group is lost, before anybody who waits for it
        """
        for other in self._others:
            self._wait(other.loaded)
        with self._losing:
            if not self.lost.done():
                self._on_lost = on_lost
                return
        raise StartupError(self.lost.result())

    def send(self, frame: bytes) -> None:
        """To all others. One that is gone is told of by `lost`."""
        for other in self._others:
            with contextlib.suppress(OSError):
                other.connection.send_bytes(frame)

    def lose(self, why: str) -> None:
        """Say that the group can't go on. Of several reasons the first counts."""
        with self._losing:
            if self._is_closing or self.lost.done():
                return
            if self._on_lost is not None:
                self._on_lost(why)
            self.lost.set_result(why)
            self._ranks.abort()  # a step of this process, or the loading of its part, waits for the one that is gone

    def why_lost(self, seconds: float) -> str | None:
        """Why a rank was lost, if that is heard within so many seconds."""
        with contextlib.suppress(TimeoutError):
            return self.lost.result(seconds)
        return None

    def close(self) -> None:
        """End all processes: each ends itself when its connection is closed. Idempotent."""
        self._is_closing = True
        for other in self._others:
            other.hang_up()
        for other in self._others:
            other.end()
        self._others = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, future: Future[Any]) -> Any:
        wait_for_any([future, self.lost], return_when=FIRST_COMPLETED)
        if not future.done():
            raise StartupError(self.lost.result())
        return future.result()


class _Rank:
    """One other rank: its process, and a thread that hears what it says.

    hello, loaded   done when it has said so
    """

    def __init__(self, start: Start, on_lost: Callable[[str], None]) -> None:
        self.hello: Future[None] = Future()
        self.loaded: Future[None] = Future()
        self._name = f"Rank {start.rank} of {start.size}"
        self._on_lost = on_lost
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*child.command("trunkline.workers.rank"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=child.environment(),
                start_new_session=True,  # Ctrl-C reaches rank 0 only, which then ends the others
            )
        self.connection = Connection(os.dup(self._socket.fileno()))
        with contextlib.suppress(OSError):  # it died at once: the thread will tell
            self.connection.send_bytes(msgspec.msgpack.encode(start))
        self._thread = threading.Thread(target=self._listen, name=self._name, daemon=True)
        self._thread.start()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """After `hang_up`: see to it that the process ends."""
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._thread.join()
        self.connection.close()
        self._socket.close()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                match msgspec.msgpack.decode(self.connection.recv_bytes(), type=FromRank):
                    case Hello():
                        self.hello.set_result(None)
                    case Loaded():
                        self.loaded.set_result(None)
                    case Broken(why, is_startup):
                        self._on_lost(f"{self._name}: {why}" if is_startup else f"{self._name} can't go on: {why}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self._on_lost(f"{self._name} (process {self.process.pid}) has ended, {_how(self.process.returncode)}.")


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "and does not answer"
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        hint = ": the system may have been short of memory" if exit_code == -signal.SIGKILL else ""
        return f"by signal {signal.Signals(-exit_code).name}{hint}"
    return f"by signal {-exit_code}"


class GroupWorker:
    """A Worker (see trunkline/step.py) whose steps all ranks of a group compute; the attributes are those of worker.LocalWorker.

    Tokens are chosen by rank 0 alone, on the host's time: the next plan names them, so `depth` is 0. `page_bytes` and `host_pages` are
    rank 0's slice of each page; the other ranks have theirs in memory of their own.
    """

    depth = 0

    def __init__(self, worker: "LocalWorker | GpuWorker", group: RankGroup, ranks: Collectives) -> None:
        self.num_pages: int = worker.num_pages
        self.page_size: int = worker.page_size
        self.page_bytes: int = worker.page_bytes
        self.host_pages: UInt8 = worker.host_pages
        self.fingerprint: str = worker.fingerprint
        self.dtype: str = worker.dtype
        self.device = f"{ranks.size} × {worker.device}"
        self.vocab_size: int = worker.vocab_size
        self.eos_token_ids: tuple[int, ...] = worker.eos_token_ids
        self.max_model_len: int = worker.max_model_len
        self.tokenizer: Tokenizer | None = worker.tokenizer
        self.group = group
        self._worker: Any = worker
        self._ranks = ranks
        self._num_sent = 0

    def submit(self, plan: Plan) -> Future[Any]:
        """Start the step on all ranks.

        Raises ValueError, before any rank has heard of it, for a plan that contradicts itself or leaves the KV storage, and EngineDead
        if a rank is gone.
        """
        if self.group.lost.done():
            raise EngineDead(self.group.lost.result())
        self._check(plan)
        frame = encode_plan(plan, self._num_sent)
        handle = self._worker.submit(plan)
        self._num_sent += 1
        self.group.send(frame)
        return handle

    def wait(self, handle: Future[Any]) -> StepResult:
        """The result; a wait that is interrupted may be repeated.

        Raises EngineDead if a rank is gone, if the step failed on this one alone (the ranks have lost step then), or if it does not end.
        """
        done, _ = wait_for_any([handle, self.group.lost], STEP_SECONDS, FIRST_COMPLETED)
        if not done:
            pids = ", ".join(map(str, self.group.pids))
            self.group.lose(
                f"A step has not ended within {STEP_SECONDS:g} seconds: a rank hangs (the processes of the others are {pids})."
            )
        if not self.group.lost.done():
            try:
                return self._worker.wait(handle)
            except Exception as error:
                self.group.why_lost(LAST_WORDS_SECONDS)  # most likely that is the cause, and not the error here
                self.group.lose(f"Rank 0 of {self._ranks.size} can't go on: {error}")
                raise EngineDead(self.group.lost.result()) from error
        raise EngineDead(self.group.lost.result())

    def close(self) -> None:
        """Let the step that runs end, and end the other ranks. Idempotent."""
        if not self.group.lost.done():
            self._worker.close()
        self.group.close()  # a step that waits for ranks that are gone ends by this
        self._worker.close()
        self._ranks.close()

    def _check(self, plan: Plan) -> None:
        """All that the ranks would refuse, each by itself."""
        for copy in plan.copies:
            check_copy(copy, num_pages=self.num_pages, num_slots=len(self.host_pages))
        check_rows(plan)
        if not plan.num_tokens:
            return
        if plan.token_ids.min() < 0 or plan.token_ids.max() >= self.vocab_size:
            raise ValueError(
                f"Token ids reach from {plan.token_ids.min()} to {plan.token_ids.max()}; the vocabulary is {self.vocab_size}."
            )
        make_batch(
            positions=plan.positions,
            query_start=plan.query_start,
            context_len=plan.context_len,
            page_table=plan.page_table,
            shared=plan.shared,
            page_size=self.page_size,
            num_pages=self.num_pages,
        )
