"""A server for one batch: the same as `trunkline serve`, in this process and on a port of its own, for as long as it takes.

    async with own_server(config) as url:
        ...

The engine is a process of its own, as always, and goes when this one goes, however it ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from trunkline import logs
from trunkline.api.app import create_app
from trunkline.api.launch import base_url, bind, make_http_server
from trunkline.api.service import Service, sampling_defaults
from trunkline.async_llm import AsyncLLM
from trunkline.config import ServeConfig
from trunkline.messages import Loading
from trunkline.models.checkpoint import open_checkpoint


@contextlib.asynccontextmanager
async def own_server(config: ServeConfig) -> AsyncIterator[str]:
    """The server's address, once it takes requests.

    Raises StartupError if the model cannot be served; if the engine does not start, EngineFailedToStart.
    """
    from tqdm import tqdm

    logs.configure("api", config.api.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with bind(config.api.host, config.api.port) as listener:
        checkpoint = open_checkpoint(config.engine.model)
        checkpoint.check_ranks(config.engine.worker.tensor_parallel_size)
        llm = AsyncLLM.of(config.engine, chat_template=config.api.chat_template, log_format=config.api.log_format)
        service = Service(config.api, llm)
        service.sampling_defaults = sampling_defaults(config.api.generation_config, checkpoint.generation_defaults)
        http = make_http_server(create_app(service), verbose=False)
        serving = asyncio.create_task(http.serve(sockets=[listener]), name="http")
        try:
            with tqdm(desc=f"Loading {checkpoint.name}", unit=" tensors", leave=False, disable=None) as bar:

                def show(loading: Loading) -> None:
                    bar.total = loading.total
                    bar.update(loading.done - bar.n)

                await llm.start(on_loading=show)
            yield base_url(config.api, listener)
        finally:
            service.stopping = True
            await llm.shutdown()
            http.should_exit = True
            await serving
