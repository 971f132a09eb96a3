"""One server with the built-in model, and a key, for the clients of others."""

from collections.abc import Iterator

import pytest

from benchmarks.server import serve

KEY = "integration-key"  # each client has its own way to send one


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # where the secret of keys is kept
        with serve("--api-key", KEY, "--kv-cache-memory", "512MiB") as url:
            yield url
