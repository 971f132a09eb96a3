"""The engine as a child process: started, watched and ended here. Of messages it knows Startup only; no HTTP.

parent                                          child: python -m trunkline.scheduler.process
stdin  ──► one line of JSON, then kept open     end of file there means that the parent is gone: exit
stderr ◄── log lines, copied to our own         the last line says why it could not start
folder (mode 0700) with the ipc socket          removed by `stop`
"""

import asyncio
import collections
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import zmq

from trunkline import child
from trunkline.config import EngineConfig
from trunkline.errors import ConfigError, StartupError
from trunkline.messages import Startup

ENGINE = "trunkline.scheduler.process"  # the module that is run; a benchmark of this process alone runs another
STOP_SECONDS = 5.0  # for the engine to exit by itself once its stdin is closed, then again after SIGTERM
NUM_LAST_LINES = 20


class EngineFailedToStart(StartupError):
    """The engine process ended before it was ready.

    on_stderr  the message is its own, and was written there already
    """

    def __init__(self, message: str, *, on_stderr: bool = False) -> None:
        super().__init__(message)
        self.on_stderr = on_stderr


class EngineProcess:
    """One engine process.

    engine = EngineProcess(config)         # started; engine.address is where it will listen
    exit_code = await engine.wait()        # when it has ended
    await engine.stop()                    # idempotent

    Raises ConfigError if the folder for temporary files is too deep for a socket's path.
    """

    def __init__(self, config: EngineConfig, *, log_format: str = "text") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trunkline-")
        socket_path = str(Path(self._folder.name) / "engine.sock")
        if len(socket_path) > zmq.IPC_PATH_MAX_LEN:
            self._folder.cleanup()
            raise ConfigError(
                f"The socket path {socket_path} has {len(socket_path)} characters; the system allows"
                f" {zmq.IPC_PATH_MAX_LEN}. Set TMPDIR to a shorter folder."
            )
        self.address = f"ipc://{socket_path}"
        self._process = subprocess.Popen(
            child.command(ENGINE),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child.environment(),
            start_new_session=True,  # Ctrl-C reaches the parent only, which then ends the engine
        )
        self.pid = self._process.pid
        self.exit_code: int | None = None
        self._exited = asyncio.Event()
        self._last_lines: collections.deque[str] = collections.deque(maxlen=NUM_LAST_LINES)
        self._loop = asyncio.get_running_loop()
        self._copier = threading.Thread(target=self._copy_stderr, name="engine stderr", daemon=True)
        self._copier.start()
        threading.Thread(target=self._watch, name="engine exit", daemon=True).start()
        startup = Startup(config=config, socket=self.address, log_format=log_format)
        with contextlib.suppress(BrokenPipeError):  # it died at once: `wait` will tell
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(startup) + b"\n")
            self._process.stdin.flush()

    async def wait(self) -> int:
        """Exit code, once the process has ended: negative if a signal ended it."""
        await self._exited.wait()
        assert self.exit_code is not None
        return self.exit_code

    def start_error(self) -> EngineFailedToStart:
        """Why it was never ready. An engine that exits by itself says so last; one that was killed has said nothing
        about that."""
        if self.exit_code is None:
            return EngineFailedToStart("The engine was stopped before it was ready.")
        if self.exit_code > 0 and self._last_lines:
            return EngineFailedToStart(self._last_lines[-1].removeprefix("trunkline: error: "), on_stderr=True)
        hint = " The system may have been short of memory." if self.exit_code == -signal.SIGKILL else ""
        return EngineFailedToStart(f"The engine process ended ({self.describe_exit()}) before it was ready.{hint}")

    def describe_exit(self) -> str:
        """E.g. "exit code 1", "signal SIGKILL"."""
        assert self.exit_code is not None
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"signal {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"signal {-self.exit_code}"

    async def stop(self, *, loading: bool = False) -> None:
        """End the process and remove its folder: politely first, unless it is `loading` and has nothing to lose."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if loading:
            self._process.terminate()
        for insist in (self._process.terminate, self._process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), STOP_SECONDS)
                break
            insist()
        await self._exited.wait()
        self._folder.cleanup()

    def _copy_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode("utf-8", "replace")
                if text.strip():
                    self._last_lines.append(text.strip())
                sys.stderr.write(text)
                sys.stderr.flush()

    def _watch(self) -> None:
        exit_code = self._process.wait()
        self._copier.join(timeout=1.0)  # its last words; a grandchild may still hold the pipe open
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._on_exit, exit_code)

    def _on_exit(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self._exited.set()
