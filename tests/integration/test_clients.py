"""Each client, as its file in clients/ uses it, against a live server with the built-in model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import KEY
from tests.integration.environment import NotInstallableError, openai2_python

CLIENTS = Path(__file__).parent / "clients"
SECONDS = 300  # only for what would otherwise hang

NEWEST = ("openai_client.py", "anthropic_client.py", "pydantic_ai_client.py")
OPENAI2 = ("openai_client.py", "langchain_client.py", "instructor_client.py", "litellm_client.py")
# Nothing but the server may be asked: whatever goes elsewhere goes to a proxy that isn't there. (Port 9 is "discard".)
NOWHERE = "http://127.0.0.1:9"
NO_INTERNET = {
    **{name: NOWHERE for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY")},
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def openai2() -> str:
    try:
        return openai2_python()
    except NotInstallableError as error:
        pytest.skip(f"the environment for openai 2 could not be installed: {error}")


def prompt_tokens(server: str) -> float:
    page = httpx.get(f"{server}/metrics").text
    return sum(float(n) for n in re.findall(r"^trunkline:prompt_tokens_total\S* (\S+)$", page, flags=re.MULTILINE))


def run(python: str, script: Path, server: str) -> str:
    """Run a script with the address in its environment; what it printed. It must have spoken to `server`."""
    pytest.importorskip("anthropic", reason="the clients are not installed: make integration")
    environment = {**os.environ, **NO_INTERNET, **QUIET, "BASE_URL": server, "API_KEY": KEY}
    before = prompt_tokens(server)
    done = subprocess.run(
        [python, str(script)], check=False, capture_output=True, text=True, timeout=SECONDS, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert prompt_tokens(server) > before, "it found an answer elsewhere"
    return done.stdout


@pytest.mark.parametrize("client", NEWEST)
def test_with_the_newest_openai(client: str, server: str) -> None:
    assert run(sys.executable, CLIENTS / client, server)


@pytest.mark.parametrize("client", OPENAI2)
def test_with_openai_2(client: str, server: str, openai2: str) -> None:
    assert run(openai2, CLIENTS / client, server)


def test_a_wrong_key_is_refused(server: str) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}, {"x-api-key": "another"}):
        assert httpx.get(f"{server}/v1/models", headers=headers).status_code == 401
