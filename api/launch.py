"""`trunkline serve`, from checked flags to the exit code.

1  bind the port               taken: one sentence, exit 1
2  find the model              a name on the hub: downloaded, by a process for that, if it isn't here; why not: one sentence, exit 1
3  look at the checkpoint      missing, truncated, unsupported, or not made for these flags: one sentence, exit 1.
                               Nothing heavy is imported yet
4  start the engine process    it imports torch and reads the weights, the longest part of a start, while we do what follows; if it
                               cannot start: its own words, exit 1
5  serve HTTP                  /health and the rest answer 503 until the engine is ready
6  print what a user needs     log what may disappoint (advice.py), one line about the chat template (template_lint.py),
                               one about tool calls (dialect.py); last the address
7  wait for a signal           SIGINT, SIGTERM: requests under way get an error, the engine is ended, "Stopped.", exit 0
   or for the engine's end     requests under way get an error, one sentence, exit 1; but if it has lost a rank of the model, back to 4
"""

import asyncio
import collections
import contextlib
import errno
import gc
import ipaddress
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from trunkline import __version__, logs
from trunkline.api.advice import advise
from trunkline.config import ApiConfig, EngineConfig, ServeConfig
from trunkline.errors import ConfigError, shown
from trunkline.messages import RANK_LOST, Loading, Ready
from trunkline.models.checkpoint import Checkpoint, open_checkpoint
from trunkline.models.hub import with_files

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from trunkline.api.engine_process import EngineProcess
    from trunkline.api.service import Service
    from trunkline.async_llm import AsyncLLM

logger = logging.getLogger("trunkline.api")

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 60  # longer than common clients keep an idle connection in their pools
MAX_RESTARTS = 3  # of the engine, within RESTART_SECONDS: where ranks are lost again and again, somebody must look
RESTART_SECONDS = 600.0
GRACE_SECONDS = 5  # for the last bytes of answers that have been ended


def serve(config: ServeConfig, *, verbose: bool = False) -> int:
    """Serve until told to stop; returns the exit code.

    Raises StartupError, a sentence for the user, if the port, the checkpoint or a flag cannot be used.
    """
    logs.configure("api", config.api.log_format)
    logging.getLogger("uvicorn").setLevel(logging.INFO if verbose else logging.WARNING)
    with bind(config.api.host, config.api.port) as listener:
        config = msgspec.structs.replace(config, engine=with_files(config.engine))
        checkpoint = open_checkpoint(config.engine.model)
        checkpoint.check_ranks(config.engine.worker.tensor_parallel_size)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            exit_code = runner.run(_serve(config, listener, checkpoint, verbose))
    if exit_code == 0:
        _say("Stopped.", config.api)
    return exit_code


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its backlog until HTTP is served. Port 0 takes any that is free.

    Raises ConfigError, naming host and port, if they cannot be had.
    """
    if not host:  # which the system would take for every address there is
        raise ConfigError("--host is ''; name an address of this machine, or 0.0.0.0 for all of them.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, which is no address of this machine: {error.strerror}.") from None
    except UnicodeError:  # too long, or half a surrogate pair
        raise ConfigError(f"--host is {shown(host)}, which cannot be the name of a machine.") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        is_host = error.errno == errno.EADDRNOTAVAIL
        advice = "Choose a --host of this machine" if is_host else "Stop what uses it, or choose another --port"
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}. {advice}.") from None
    return listener


def base_url(config: ApiConfig, listener: socket.socket) -> str:
    """Where the server is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def exposure(config: ApiConfig, address: str) -> str | None:
    """What to say to whoever opens a server to other machines without keys; None if nothing."""
    if config.has_keys or ipaddress.ip_address(address).is_loopback:
        return None
    return f"Without --api-key, whoever reaches {address} can use this server, and can read at /v1/cache what others have sent."


def summary(config: EngineConfig, name: str, ready: Ready) -> str:
    """What a user needs to know once, of a server that is ready."""
    num_tokens = ready.num_pages * ready.page_size
    stored = "" if config.cache.kv_cache_dtype == "auto" else f", stored as {config.cache.kv_cache_dtype}"
    pages = f"{ready.num_pages:,} pages of {ready.page_size}{stored}"
    caching = "on" if config.cache.enable_prefix_caching else "off"
    in_a_step = f"{ready.max_num_seqs} sequences and {ready.max_num_batched_tokens} tokens in a step"
    return "\n".join(
        (
            f"Trunkline {__version__}: {name}, {ready.dtype}, on {ready.device}",
            f"KV cache size: {num_tokens:,} tokens ({pages}), prefix caching {caching}",
            *(f"Behind it, {tier}" for tier in ready.tiers),
            f"Maximum concurrency for {ready.max_model_len:,} tokens per request: {num_tokens / ready.max_model_len:.2f}x",
            f"At most {in_a_step}, scheduling policy {config.scheduler.policy}",
        )
    )


def where(url: str, *, dashboard: bool) -> str:
    """The last line of the start: what to open. dashboard: there is one."""
    pages_to_open = (f"dashboard: {url}/, " if dashboard else "") + f"docs: {url}/docs, metrics: {url}/metrics"
    return f"Ready: {url}/v1 ({pages_to_open})"


async def _serve(config: ServeConfig, listener: socket.socket, checkpoint: Checkpoint, verbose: bool) -> int:
    from trunkline.api.engine_process import EngineProcess

    stopped = asyncio.create_task(_stop_signal(), name="stop signal")
    await asyncio.sleep(0)  # a signal is heeded from here on
    process = EngineProcess(config.engine, log_format=config.api.log_format)
    try:
        service = _make_service(config, checkpoint, process)
        http = _make_http_server(service, verbose=verbose)
    except BaseException:
        await process.stop(loading=True)
        raise
    llm = service.llm
    url = base_url(config.api, listener)
    serving = asyncio.create_task(http.serve(sockets=[listener]), name="http")
    _say(f"Listening on {url}, loading {checkpoint.name}; /health answers 503 until it is ready.", config.api)
    if warning := exposure(config.api, listener.getsockname()[0]):
        logger.warning("%s", warning)
    running = asyncio.create_task(_run_engine(service, checkpoint.name, url), name="engine")
    try:
        await asyncio.wait((stopped, serving, running), return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else 0
    finally:
        service.stopping = True
        for task in (stopped, running):
            task.cancel()
        await asyncio.wait((stopped, running))
        await llm.shutdown()
        http.should_exit = True
        await serving
        if service.tracing is not None:
            service.tracing.close()


def _make_service(config: ServeConfig, checkpoint: Checkpoint, process: "EngineProcess") -> "Service":
    from trunkline.api.service import Service, sampling_defaults
    from trunkline.async_llm import AsyncLLM

    llm = AsyncLLM.of(
        config.engine,
        chat_template=config.api.chat_template,
        log_format=config.api.log_format,
        process=process,
    )
    service = Service(config.api, llm)
    service.sampling_defaults = sampling_defaults(config.api.generation_config, checkpoint.generation_defaults)
    return service


def _make_http_server(service: "Service", *, verbose: bool) -> "uvicorn.Server":
    from trunkline.api.app import create_app

    return make_http_server(create_app(service), verbose=verbose)


async def _run_engine(service: "Service", name: str, url: str) -> int:
    """From the start of the engine to its unwanted end; returns the exit code."""
    restarts: collections.deque[float] = collections.deque(maxlen=MAX_RESTARTS)
    while await _start_engine(service, name):
        assert service.llm.ready is not None and service.llm.process is not None
        service.restarting = False
        _say(summary(service.llm.config, name, service.llm.ready), service.config)
        if not restarts:
            quantization = service.llm.checkpoint.config.quantization
            for level, sentence in advise(service.llm.config, service.llm.ready, quantization):
                logger.log(level, "%s", sentence)
            _log_template_lint(service.llm)
            _log_dialect(service)
        _say(where(url, dashboard=service.config.dashboard), service.config)
        gc.collect()
        gc.freeze()  # what is loaded stays: later collections, in which no stream moves, need not look at it
        dead, now = await service.llm.wait_dead(), time.monotonic()
        is_worn_out = len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_SECONDS
        if service.llm.process.exit_code != RANK_LOST or is_worn_out:
            _say(f"{dead} The server stops.", service.config, is_error=True)
            return 1
        restarts.append(now)
        service.restarting = True
        _say(f"{dead} It is started again.", service.config, is_error=True)
        await service.llm.shutdown()
        service.loading = Loading(done=0, total=0)
    return 1


async def _start_engine(service: "Service", name: str) -> bool:
    """True once it takes requests; False if it can't, and the user has been told why."""
    from trunkline.api.engine_process import EngineFailedToStart

    with _progress_bar(f"Loading {name}", is_shown=service.config.log_format == "text") as show:

        def on_loading(loading: Loading) -> None:
            service.loading = loading
            show(loading)

        try:
            await service.llm.start(on_loading=on_loading)
        except EngineFailedToStart as error:
            if not error.on_stderr:
                print(f"trunkline: error: {error}", file=sys.stderr)
            return False
    return True


def _log_template_lint(llm: "AsyncLLM") -> None:
    """One line about the chat template, if there is one. Whatever becomes of it, the server runs."""
    from trunkline.api.template_lint import lint

    if llm.template is None:
        return
    try:
        findings = lint(llm.template, llm.tokenizer)
    except Exception:
        logger.exception("Whether the chat template keeps the cache was not found out.")
        return
    logger.log(logging.WARNING if findings.is_costly else logging.INFO, findings.sentence)


def _log_dialect(service: "Service") -> None:
    """One line about tool calls, if there can be chats."""
    if service.llm.template is not None:
        logger.info("%s", service.dialect.sentence)


async def _stop_signal() -> None:
    """Return at the first SIGINT or SIGTERM. A second one has its ordinary effect, at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def make_http_server(app: "FastAPI", *, verbose: bool) -> "uvicorn.Server":
    import uvicorn

    from trunkline.api.http_protocol import HttpProtocol

    class HttpServer(uvicorn.Server):
        """Leaves signals to us: uvicorn would raise them again after a clean stop, and the exit code would not be 0."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    logging.getLogger("uvicorn.error").addFilter(_is_no_advice)
    return HttpServer(
        uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=verbose,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )


def _is_no_advice(record: logging.LogRecord) -> bool:
    """False for uvicorn's advice to install a WebSocket library, which would change nothing: there is no WebSocket here."""
    return not record.getMessage().startswith("No supported WebSocket library")


@contextlib.contextmanager
def _progress_bar(title: str, *, is_shown: bool) -> Iterator[Callable[[Loading], None]]:
    """On a terminal; elsewhere nothing is shown."""
    from tqdm import tqdm

    with tqdm(desc=title, unit=" tensors", leave=False, disable=None if is_shown else True) as bar:

        def show(loading: Loading) -> None:
            bar.total = loading.total
            bar.update(loading.done - bar.n)

        yield show


def _say(text: str, config: ApiConfig, *, is_error: bool = False) -> None:
    """To whoever has started the server; who wants JSON gets nothing else."""
    if config.log_format == "json":
        logger.log(logging.ERROR if is_error else logging.INFO, "%s", text)
    else:
        print(text, file=sys.stderr if is_error else sys.stdout, flush=True)
