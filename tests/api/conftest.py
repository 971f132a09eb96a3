"""One server for all tests that only send requests."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.api.serving import CONTEXT, MODEL, Server
from tests.tiny import tiny_model
from trunkline.models.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session", autouse=True)
def own_secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keys become tenants by a secret in the home folder: not in that of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> Tokenizer:
    return load_tokenizer(str(tiny))


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    flags = ["--served-model-name", MODEL, "alias/of-tiny", "--kv-cache-memory", "16MiB", "--generation-config", "vllm"]
    with Server(tiny, *flags) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client
