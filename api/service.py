"""What the routes share: the engine behind AsyncLLM, the names it is served under, defaults, metrics.

Knows requests and answers; the routes know their wire formats.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request

from trunkline.api.body import read_json
from trunkline.api.dialect import Dialect, check_parsers
from trunkline.api.metrics import Metrics
from trunkline.api.request_history import RequestHistory
from trunkline.api.request_log import LoggedRequest
from trunkline.api.response_format import GrammarDefaults
from trunkline.api.response_store import ResponseStore
from trunkline.api.running_requests import RunningRequests
from trunkline.api.tenants import Keys
from trunkline.api.tracing import Tracing
from trunkline.async_llm import AsyncLLM
from trunkline.config import ApiConfig
from trunkline.errors import ConfigError, EngineDead, InvalidParameter, ModelNotFound, Overloaded, RequestError, shown
from trunkline.messages import Loading
from trunkline.sampling import SamplingParams

# What of a generation_config.json becomes a default of requests; the rest is about other libraries' loops.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Service:
    """One served model.

    created     Unix time, seconds: when the server started, as /v1/models reports it
    loading     how far the weights are read, until the engine is ready
    restarting  it was ready once, has lost a rank of the model, and is not ready yet again
    looking     held by the one request that looks at the whole tree: a crowd of them would hold up every stream
    checking    held by the one whose grammar is checked, for the same reason
    """

    def __init__(self, config: ApiConfig, llm: AsyncLLM) -> None:
        self.config = config
        self.llm = llm
        self.created = int(time.time())
        self.loading = Loading(done=0, total=0)
        self.restarting = False
        self.sampling_defaults: dict[str, Any] = {}
        self.grammar_defaults = GrammarDefaults.of(config)
        check_parsers(config.tool_call_parser, config.reasoning_parser)
        _check_names(config.served_model_names)
        self._dialect: Dialect | None = None
        self.stopping = False
        self.metrics = Metrics(config.served_model_names[0])
        self.keys = Keys.of(config)
        self.tracing = Tracing.of(config)
        self.running = RunningRequests(RequestHistory())
        self.responses = ResponseStore(
            max_entries=config.max_stored_responses, max_bytes=config.stored_responses_memory
        )
        self.looking = asyncio.Lock()
        self.checking = asyncio.Lock()

    def check_ready(self) -> None:
        """Raises Overloaded while loading and while shutting down, EngineDead when the engine is gone."""
        if self.stopping:
            raise Overloaded("The server is shutting down.", code="shutting_down")
        if self.llm.client is not None and self.llm.client.dead is not None:
            raise EngineDead(str(self.llm.client.dead))
        if self.restarting:
            raise Overloaded(
                "The engine has lost a process that held a part of the model, and is being started again; try again in a moment."
            )
        if self.llm.ready is None:
            raise Overloaded("The model is still loading; try again in a moment.")

    @property
    def is_ready(self) -> bool:
        """Requests are taken."""
        try:
            self.check_ready()
        except (Overloaded, EngineDead):
            return False
        return True

    def served_model(self, name: str | None) -> str:
        """The name an answer carries: the request's, or the first served one if it has none, as llama.cpp and vLLM do.

        Raises ModelNotFound for a name that is not served.
        """
        if name is None:
            return self.config.served_model_names[0]
        if name not in self.config.served_model_names:
            served = ", ".join(repr(served) for served in self.config.served_model_names)
            raise ModelNotFound(f"The model {name[:200]!r} is not served here; served is {served}.", param="model")
        return name

    @property
    def dialect(self) -> Dialect:
        """How the model writes calls and thoughts. Only once the tokenizer is loaded."""
        if self._dialect is None:
            self._dialect = Dialect.of(
                self.llm.template,
                self.llm.tokenizer,
                tool_call_parser=self.config.tool_call_parser,
                reasoning_parser=self.config.reasoning_parser,
            )
        return self._dialect

    @property
    def page_size(self) -> int:
        """Tokens per page of the cache. Raises Overloaded while loading."""
        self.check_ready()
        assert self.llm.ready is not None
        return self.llm.ready.page_size

    def observe(self, request: Request, answer_id: str) -> LoggedRequest:
        """Metrics and log line of one request, which arrives now, and can be cancelled once it is on its way."""
        observer = self.running.observe(self.metrics, request.state.request_id, answer_id, request.state.caller)
        request.state.record.generates(observer)
        return observer

    def count_failure(self, error: RequestError) -> None:
        """A request was answered with an error."""
        self.metrics.request_failures.labels(error.code or str(error.status)).inc()


async def open_json(request: Request) -> tuple[Service, dict[str, Any]]:
    """The service, which takes requests, and the body of this one. Raises as Service.check_ready and read_json do."""
    service: Service = request.app.state.service
    service.check_ready()
    return service, await read_json(request, service.config.max_body_bytes)


def _check_names(names: tuple[str, ...]) -> None:
    """They go into every answer, the metrics and the log. Raises ConfigError for what cannot, such as half a surrogate pair."""
    for name in names:
        if not name or not name.isprintable():
            raise ConfigError(
                f"The model would be served as {shown(name)}; allowed is a name of visible characters. Give it one by"
                " --served-model-name."
            )


def sampling_defaults(generation_config: str, of_checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What requests that leave a sampling parameter open get.

    generation_config  "auto": what the checkpoint's generation_config.json says; "vllm": nothing, so SamplingParams'
                       own defaults; else the folder of another generation_config.json

    Raises ConfigError if that file is missing or holds values that no request may have.
    """
    if generation_config == "vllm":
        return {}
    found = of_checkpoint
    if generation_config != "auto":
        file = Path(generation_config) / "generation_config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--generation-config is {generation_config!r}, but {file} cannot be read: {error}. Allowed are auto, vllm, and a"
                " folder with that file."
            ) from None
        if not isinstance(found, dict):
            raise ConfigError(f"{file} does not hold a JSON object.")
    defaults = {name: found[name] for name in GENERATION_DEFAULTS if found.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidParameter as error:
        raise ConfigError(
            f"generation_config.json: {error} Serve with --generation-config vllm to ignore it."
        ) from None
    return defaults
