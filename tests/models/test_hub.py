"""Models by their names on the hub: what is downloaded, what is refused, what is done without a network."""

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from huggingface_hub import close_session, constants

from tests import tiny
from tests.api.serving import Server
from tests.hub import COMMIT, TOKEN, Hub
from trunkline import child
from trunkline.config import ModelSource, engine_config
from trunkline.errors import ConfigError, ModelError
from trunkline.models import hub as module
from trunkline.models.checkpoint import open_checkpoint
from trunkline.models.hub import Choice, HubName, Note, Told, Wanted, choose, find_model, with_files
from trunkline.models.hub_download import Hub as Repository
from trunkline.models.hub_download import find, reason

READ = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{ }"}
NEWER = "f" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Whom the library asks; its cache is empty. In the environment for a process that is started, and in this one."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    with Hub() as hub:
        for name, value in (("HF_ENDPOINT", hub.url), ("HF_HOME", str(tmp_path / "hf")), ("NO_PROXY", "127.0.0.1")):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        yield hub
        close_session()


class Asked:
    """What the process that downloads does, in this one."""

    def __init__(self, name: str, revision: str | None = None, download_dir: Path | None = None) -> None:
        self.told: list[Told] = []
        hub_name = HubName.of(name)
        assert hub_name is not None
        wanted = Wanted(
            name=hub_name, revision=revision, download_dir=None if download_dir is None else str(download_dir)
        )
        self.path = find(wanted, self.told.append)

    def notes(self) -> list[str]:
        return [told.text for told in self.told if isinstance(told, Note)]


def refusal(name: str, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as refused:
        Asked(name, revision)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def sharded(folder: Path) -> Path:
    """A tiny model in two files of safetensors and an index."""
    tiny.tiny_model(folder)
    (folder / "model.safetensors").unlink()
    names = list(weights := tiny.Tiny().weights())
    files = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for file, part in files.items():
        tiny.write_safetensors(folder / file, {name: weights[name] for name in part}, "float32")
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName(repository="org/name")),
        ("Qwen/Qwen2.5-0.5B_x", HubName(repository="Qwen/Qwen2.5-0.5B_x")),
        ("org/name:Q4_K_M", HubName(repository="org/name", kind="Q4_K_M")),
        ("org/name/a.gguf", HubName(repository="org/name", file="a.gguf")),
        ("org/name/folder/a b.gguf", HubName(repository="org/name", file="folder/a b.gguf")),
        *(
            (text, None)
            for text in ("name", "/org/name", "./org/name", "../a/b", "~/org/name", "a/b/c", "a/b/", "a//b")
        ),
        *((text, None) for text in ("org/file.gguf", "a/b/../c.gguf", "a/b/.c.gguf", "", "a/b:", "a/b:c/d", "å/b")),
    ],
)
def test_names_and_paths(text: str, name: HubName | None) -> None:
    assert HubName.of(text) == name


def test_what_is_no_name_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ask", None)
    monkeypatch.setattr(module, "builtin_model", lambda: "/built/in.gguf")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_model("org/name") == "org/name", "a folder of that name comes first"
    assert find_model(None) == "/built/in.gguf"
    assert find_model("no/such/path") == "no/such/path"
    for name, words in ((None, "the built-in model has"), ("org/name", "'org/name', a path, has")):
        with pytest.raises(ConfigError, match=f"--revision is 'v1', but {words} no revisions; leave it out"):
            find_model(name, "v1")


# ---------------------------------------------------------------- which files


def test_files_that_are_read_here() -> None:
    read = [
        *("config.json", "generation_config.json", "tokenizer.model", "chat_template.jinja", "model.safetensors"),
        *("modules.json", "1_Pooling/config.json"),
    ]
    others = [
        *(
            "README.md",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "model.onnx",
            "modelling.py",
            "x.gguf",
            "1_Pooling/x.bin",
        ),
        *(
            "onnx/config.json/x",
            "original/params.json",
            "openvino/model.safetensors",
            "../config.json",
            "a/b/config.json",
        ),
    ]
    assert choose(HubName(repository="a/b"), [*read, *others], "a/b") == Choice(tuple(read), "")
    dense = ["config.json", "model.safetensors", "2_Dense/config.json"]
    assert choose(HubName(repository="a/b"), dense, "a/b").files == ("config.json", "model.safetensors")


@pytest.mark.parametrize(
    ("name", "files", "model"),
    [
        ("a/b", ["config.json", "only.gguf", "mmproj-F16.gguf", "b.imatrix.gguf"], "only.gguf"),
        ("a/b", ["folder/only.gguf"], "folder/only.gguf"),
        ("a/b:q4_k_m", ["x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "x-IQ4_K_M.gguf"], "x-Q4_K_M.gguf"),
        ("a/b:Q4_K_XL", ["x-UD-Q4_K_XL.gguf", "Q8_0/x.Q8_0.gguf"], "x-UD-Q4_K_XL.gguf"),
        ("a/b:q8_0", ["x-UD-Q4_K_XL.gguf", "Q8_0/x.Q8_0.gguf"], "Q8_0/x.Q8_0.gguf"),
        ("a/b:F16", ["config.json", "model.safetensors", "x.f16.gguf"], "x.f16.gguf"),
        ("a/b/c/x.gguf", ["c/x.gguf", "x.gguf"], "c/x.gguf"),
        ("a/b", ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y.gguf"], "y.gguf"),
    ],
)
def test_gguf_files(name: str, files: list[str], model: str) -> None:
    hub_name = HubName.of(name)
    assert hub_name is not None and choose(hub_name, files, "a/b") == Choice((model,), model)


PARTS = ["x-Q4-00001-of-00002.gguf", "x-Q4-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("name", "files", "sentence"),
    [
        (
            "a/b",
            ["x-Q4.gguf", "x-Q8.gguf"],
            "a/b has 2 GGUF files; name one of them, such as a/b/x-Q4.gguf, or .* There are x-Q4.gguf, x",
        ),
        ("a/b", [f"{number:02}.gguf" for number in range(20)], r"11\.gguf and 8 more\.$"),
        (
            "a/b:Q5",
            ["x-Q4.gguf", "x-Q8.gguf"],
            r"has no GGUF file whose name ends in Q5\. Its GGUF files: x-Q4\.gguf, x-Q8\.gguf\.",
        ),
        (
            "a/b:Q4",
            ["x-Q4.gguf", "y-Q4.gguf"],
            "has more than one GGUF file whose name ends in Q4; name one of them, such as a/b/x-Q4",
        ),
        ("a/b/z.gguf", ["x.gguf"], r"a/b does not have the file z\.gguf\. Its GGUF files: x\.gguf\."),
        ("a/b", PARTS, "has x-Q4-00001-of-00002.gguf in several parts, which are not read here: choose"),
        ("a/b:Q4", PARTS, "has x-Q4-00001-of-00002.gguf in several parts"),
        (
            "a/b",
            ["config.json", "pytorch_model.bin"],
            r"only as pickles \(pytorch_model\.bin\), which can run code .* are refused: look",
        ),
        (
            "a/b",
            ["adapter_model.safetensors", "config.json"],
            r"nothing that can be served: expected config\.json with .* adapter_model",
        ),
        ("a/b", ["model.safetensors"], r"nothing that can be served.* There is model\.safetensors\."),
        ("a/b", [], r"There are no files\."),
    ],
)
def test_repositories_that_are_refused(name: str, files: list[str], sentence: str) -> None:
    hub_name = HubName.of(name)
    assert hub_name is not None
    with pytest.raises(ModelError, match=sentence):
        choose(hub_name, files, "a/b")


# ---------------------------------------------------------------- downloads


def test_a_download_and_nothing_twice(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", READ | {"README.md": b"long"})
    asked = Asked("org/name")
    assert asked.path == tmp_path / "hf" / "hub" / "models--org--name" / "snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in asked.path.iterdir()} == READ
    assert asked.notes() == [f"Downloading 3 files, 12 B, of org/name at 01234567 to {asked.path}."]
    hub.requests.clear()
    again = Asked("org/name")
    assert (again.path, again.told) == (asked.path, [])
    assert hub.requests == ["GET /api/models/org/name/revision/main"]


def test_all_files_are_of_one_commit(hub: Hub) -> None:
    hub.add("org/name", READ)
    Asked("org/name")
    assert {path for path in hub.requests if "/resolve/" in path} == {
        f"{method} /org/name/resolve/{COMMIT}/{file}" for file in READ for method in ("HEAD", "GET")
    }


def test_revisions_and_another_cache(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", READ, revisions={"v1": NEWER, "refs/pr/1": COMMIT})
    asked = Asked("org/name", "v1", tmp_path / "mine")
    assert asked.path == tmp_path / "mine" / "models--org--name" / "snapshots" / NEWER
    assert Asked("org/name", NEWER, tmp_path / "mine").path == asked.path
    assert Asked("org/name", "refs/pr/1").path.name == COMMIT
    assert refusal("org/name", "v2") == (
        "--revision is 'v2', which org/name does not have; allowed is a branch, a tag or a commit."
    )


def test_the_file_that_is_named(hub: Hub) -> None:
    hub.add("org/name", {"a-Q4.gguf": b"4", "a-Q8.gguf": b"8"})
    assert Asked("org/name:q8").path.name == "a-Q8.gguf"
    assert hub.downloads() == ["a-Q8.gguf"]
    assert "There are a-Q4.gguf, a-Q8.gguf." in refusal("org/name")


def test_a_download_that_fails_goes_on_the_next_time(hub: Hub) -> None:
    hub.add("org/name", READ)
    hub.broken.add("model.safetensors")
    assert refusal("org/name") == (
        "The download of org/name was interrupted (status 500); start again: files that were complete are kept."
    )
    hub.requests.clear()
    Asked("org/name")
    assert "model.safetensors" in hub.downloads()
    assert "config.json" not in hub.downloads()


@pytest.mark.slow  # the library waits a second before it tries again
def test_a_connection_that_breaks_is_taken_up_where_it_was(hub: Hub) -> None:
    weights = os.urandom(2 * constants.DOWNLOAD_CHUNK_SIZE)
    hub.add("org/name", READ | {"model.safetensors": weights})
    hub.cut.add("model.safetensors")
    assert (Asked("org/name").path / "model.safetensors").read_bytes() == weights
    assert f"model.safetensors bytes={constants.DOWNLOAD_CHUNK_SIZE}-" in hub.downloads()


# ---------------------------------------------------------------- what the hub says no to


def test_no_such_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/secret", READ, private=True)
    sentence = f"org/secret is neither a path on this machine nor a model that {hub.url} shows to you: see how it is spelt; if it is private,"
    assert refusal("org/secret") == (
        f"{sentence} put a token of an account that may read it into $HF_TOKEN, or run hf auth login."
    )
    assert refusal("org/none").startswith("org/none is neither a path")
    assert refusal("org--x/none").startswith("org--x/none is neither a path"), "no name that the library would ask for"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert Asked("org/secret").path.is_dir()
    del hub.repositories["org/secret"]
    assert refusal("org/secret") == f"{sentence} see that the account of your token may read it."


def test_a_wrong_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", READ)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    told = refusal("org/name")
    assert told.startswith(f"{hub.url} does not accept your token, which comes from $HF_TOKEN or hf auth login: it may")
    assert "hf_wrong" not in told


def test_a_gated_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", READ, gated=True)
    assert refusal("org/name").startswith(
        f"org/name is gated: accept its terms at {hub.url}/org/name, then put a token"
    )
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert Asked("org/name").path.is_dir()


def test_a_status_without_an_explanation(hub: Hub) -> None:
    hub.status = 403
    assert refusal("org/name").startswith(f"{hub.url} refuses org/name with status 403: put a token")


# ---------------------------------------------------------------- without a network


def test_without_a_network_the_cache_is_served(hub: Hub) -> None:
    repository = hub.add("org/name", READ)
    path = Asked("org/name").path
    repository.revisions["main"] = NEWER
    repository.files["model.safetensors"] = b"newer weights"
    hub.broken.add("model.safetensors")
    refusal("org/name")  # main is NEWER, but not all of it is there
    hub.stop()
    close_session()  # and with it the connection that is open
    asked = Asked("org/name")
    assert asked.path == path
    (note,) = asked.told
    assert note == Note(
        f"The hub at {hub.url} can't be asked (Connection refused): org/name is taken from {path}.", is_warning=True
    )
    assert Asked("org/name", COMMIT).path == path
    with pytest.raises(ModelError, match=r"Connection refused.*, and org/name at v1 is not in"):
        Asked("org/name", "v1")
    with pytest.raises(ModelError, match=r"and .*0123.* has no GGUF file whose name ends in Q4"):
        Asked("org/name:Q4")


@pytest.mark.parametrize(
    ("status", "why"),
    [(429, "status 429"), (500, "status 500"), (503, "status 503"), (200, "its answer is not that of a hub")],
)
def test_a_hub_that_has_no_answer_is_no_network(hub: Hub, status: int, why: str) -> None:
    hub.add("org/name", READ)
    path = Asked("org/name").path
    hub.status = status
    assert Asked("org/name").path == path
    told = refusal("org/other")
    assert told.startswith(f"The hub at {hub.url} can't be asked ({why}), and org/other at main is not in ")
    assert told.endswith("download it where there is a network, or give a path.")


def test_offline_nobody_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/name", READ)
    path = Asked("org/name").path
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = Asked("org/name")
    assert asked.path == path
    assert asked.told == [Note(f"$HF_HUB_OFFLINE is set: org/name is taken from {path}.")]
    assert refusal("org/other").startswith("$HF_HUB_OFFLINE is set, and org/other at main is not in ")
    assert not hub.requests


# ---------------------------------------------------------------- what goes wrong here


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "The disk is full: a/b needs 3.0 GiB in /c; make room, or .* --download-dir.",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            r"/c cannot be written \(Permission denied\): give another .* --download-dir.",
        ),
        (
            RuntimeError("File write error: No space left on device (os error 28)"),
            "The disk is full: a/b needs 3.0 GiB in /c; make room, or .* --download-dir.",
        ),
        (
            OSError("Consistency check failed"),
            r"The download of a/b was interrupted \(Consistency check failed\); start again",
        ),
    ],
)
def test_downloads_that_fail_here(error: Exception, sentence: str) -> None:
    failed = Repository(HubName(repository="a/b"), None, "http://hub").failed(error, 3 * 2**30, Path("/c"))
    assert re.fullmatch(f"{sentence}.*", str(failed))


def test_the_reason_is_the_first_cause() -> None:
    error = ValueError("many\nlines")
    error.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert (reason(error), reason(ValueError("many\nlines")), reason(OSError())) == (
        "Connection refused",
        "many lines",
        "OSError",
    )


# ---------------------------------------------------------------- from outside


@pytest.mark.slow
def test_a_sharded_model_is_opened_and_the_process_is_told_how(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("org/tiny", sharded(tmp_path / "files"), revisions={"v1": COMMIT})
    caplog.set_level(logging.INFO, "trunkline.models")
    config = with_files(engine_config("org/tiny", revision="v1", download_dir=str(tmp_path / "mine"), seed=3))
    assert config.model == ModelSource(path=str(tmp_path / f"mine/models--org--tiny/snapshots/{COMMIT}"), seed=3)
    assert [record.getMessage()[:19] for record in caplog.records] == ["Downloading 7 files"]
    checkpoint = open_checkpoint(config.model)
    assert checkpoint.name == "org/tiny"
    weights = tiny.Tiny().weights()
    for name, tensor in checkpoint.tensors():
        np.testing.assert_array_equal(tensor.numpy(), weights[name])
    with pytest.raises(ModelError, match=r"^org/none is neither a path"):
        find_model("org/none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"^\$HF_HUB_OFFLINE is set, and org/tiny at main is not in"):
        find_model("org/tiny")


def test_a_process_that_ends_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "command", lambda _: [sys.executable, "-c", "input()"])
    with pytest.raises(ModelError, match="The download of org/name was cut off; start again"):
        find_model("org/name")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_download_ends_with_who_asked_and_leaves_no_halves(hub: Hub, tmp_path: Path, number: signal.Signals) -> None:
    hub.add("org/name", READ | {"model.safetensors": os.urandom(3 * constants.DOWNLOAD_CHUNK_SIZE)})
    hub.held.add("model.safetensors")
    command = [sys.executable, "-m", "trunkline", "serve", "org/name", "--port", "0"]
    with subprocess.Popen(command, env=child.environment(), stderr=subprocess.PIPE) as asking:
        assert asking.stderr is not None
        assert hub.is_held.wait(60)
        asking.send_signal(number)
        asking.stderr.read()  # until the process that downloads is gone, too, for it has the same
    assert asking.returncode == (130 if number == signal.SIGINT else -number)
    assert (tmp_path / "hf" / "hub" / "models--org--name" / "blobs").is_dir()
    assert not list(tmp_path.rglob("*.incomplete"))


def test_nothing_of_the_library_is_imported_here() -> None:
    script = (
        "import sys\n"
        "import trunkline.async_llm, trunkline.api.launch, trunkline.cli\n"
        "from trunkline.models.hub import find_model\n"
        "find_model('/')\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'huggingface_hub', 'hf_xet', 'torch'})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, env=child.environment(), capture_output=True, text=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_a_sharded_model_writes_what_its_folder_writes(hub: Hub, tmp_path: Path) -> None:
    from trunkline import LLM, SamplingParams

    folder = sharded(tmp_path / "files")
    hub.add("org/tiny", folder)
    written = []
    for model in ("org/tiny", folder):
        with LLM(model, threads=1, device="cpu", num_pages=64) as llm:
            outputs = llm.generate(["hello world"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            written.append(outputs[0].outputs[0].token_ids)
    assert written[0] == written[1]
    assert len(written[0]) == 8


@pytest.mark.slow
def test_a_server_is_asked_for_the_model_by_its_name(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/tiny", sharded(tmp_path / "files"))
    with Server("org/tiny", "--device", "cpu") as server:
        server.wait_ready()
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"model": "org/tiny", "prompt": "hello", "max_tokens": 3}
        )
        assert (answer.status_code, answer.json()["model"]) == (200, "org/tiny")
    assert "Downloading 7 files, " in server.output
    assert "loading org/tiny" in server.output
