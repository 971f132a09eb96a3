"""`trunkline bench quality`: what cannot be measured is found before the first format is, and settings are read as flags are."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import fails
from tests.tiny import tiny_embedder, tiny_gguf, tiny_model
from trunkline.cli import main
from trunkline.errors import ConfigError

ENGINE = ("--threads", "1", "--kv-cache-memory", "4MiB")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of them."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "tiny")
    tiny_model(folder / "half", seed=1)
    tiny_model(folder / "123", seed=2)
    tiny_embedder(folder / "embedder")
    tokenizer = tiny_model(folder / "other_tokenizer") / "tokenizer.json"
    described = json.loads(tokenizer.read_text())
    described["model"]["merges"] = []
    tokenizer.write_text(json.dumps(described))
    tiny_gguf(folder / "packed.gguf", quantization="Q8_0")
    return folder


@pytest.fixture(autouse=True)
def inside(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Model and settings of every engine that is opened, which goes no further."""
    seen: list[tuple[str, dict[str, Any]]] = []

    class Recorder:
        def __init__(self, model: str, **flags: Any) -> None:
            seen.append((model, flags))
            raise ConfigError("Opened.")

    monkeypatch.setattr("trunkline.llm.LLM", Recorder)
    return seen


def test_a_model_of_the_environment_is_measured_on_a_text_that_is_named(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, models: Path, capsys: Any
) -> None:
    (models / "text.txt").write_text("one two three " * 200)
    monkeypatch.setenv("TRUNKLINE_MODEL", "tiny")
    fails(capsys, "bench", "quality", "text.txt", "--baseline", "none", "--context", "64", *ENGINE)
    assert [model for model, _ in opened] == ["tiny"]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("enable-prefix-caching=True", True),
        ("enable-prefix-caching=no", False),
        ("no-enable-prefix-caching=true", False),
        ("enforce_eager=yes", True),
        ("gpu-memory-utilization=0.5", 0.5),
        ("kv-cache-memory=2GiB", 2 * 2**30),
        ("max-model-len=1K", 1024),
        ("max-num-seqs=8", 8),
        ("dtype=half", "half"),
    ],
)
@pytest.mark.parametrize("flag", ["--formats", "--baseline"])
def test_a_setting_is_read_as_its_flag_is(
    setting: str, value: Any, flag: str, opened: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    seen: list[dict[str, Any]] = []

    def windows(args: Any, text: str, settings: list[dict[str, Any]]) -> list[list[int]]:
        seen.extend(settings)
        return [[1, 2]]

    monkeypatch.setattr("trunkline.cli_quality._windows", windows)
    fails(capsys, "bench", "quality", "--model", "tiny", flag, setting)
    name = setting.split("=")[0].removeprefix("no-").replace("-", "_")
    assert seen[flag == "--baseline"] == {name: value}
    assert len(opened) == 1 and (flag == "--baseline" or opened[0][1][name] == value)


@pytest.mark.parametrize("model", ["half", "123"])
def test_a_model_is_a_path_whatever_it_looks_like(model: str, opened: list[Any], capsys: Any) -> None:
    assert "Opened." in fails(capsys, "bench", "quality", "--model", "tiny", "--formats", f"model={model}")[1]
    assert [name for name, _ in opened] == [model]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--formats", "kv-dtype=fp8"], 2, "trunkline bench quality: error: --formats: unknown key kv-dtype;"),
        (["--baseline", "dtype=f32"], 2, "error: --baseline: --dtype is 'f32'; allowed is one of auto, "),
        (["--formats", "enforce-eager=maybe"], 2, "--formats: --enforce-eager is 'maybe'; allowed is true or false."),
        (["--formats", "port=80"], 1, "--formats is 'port=80', which is no setting of the model or the engine,"),
        (["--formats", "dashboard=off"], 1, "--formats is 'dashboard=off', which is no setting of the model"),
    ],
)
def test_what_is_no_setting(flags: list[str], code: int, words: str, opened: list[Any], capsys: Any) -> None:
    seen, line = fails(capsys, "bench", "quality", "--model", "tiny", *flags)
    assert (seen, words in line) == (code, True), line
    assert not opened


@pytest.mark.parametrize("where", ["--formats", "--baseline"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("gpu-memory-utilization=2", "--gpu-memory-utilization is 2.0; allowed is a share above 0 and up to 1."),
        ("quantization=gguf", "--quantization is 'gguf', but no matrix that is read from tiny is stored as one of"),
        ("max-model-len=513", "--max-model-len is 513; allowed is 1 to 512"),
        (
            "max-model-len=16",
            "--context is 32; allowed is 2 to 16, which is as long as a request can be with max-model-len=16.",
        ),
        ("kv-cache-dtype=bfloat16,device=cpu", "--kv-cache-dtype is 'bfloat16', which pages on the CPU don't have"),
        ("tensor-parallel-size=3", "--tensor-parallel-size is 3, but 4 query heads"),
        ("model=no/such/model", "no/such/model"),
        ("model=embedder", "This model has no output layer"),
        ("model=other_tokenizer", "tiny and other_tokenizer do not read the same tokens in this text"),
    ],
)
def test_what_would_fail_later_is_found_first(
    setting: str, words: str, where: str, opened: list[Any], capsys: Any
) -> None:
    changes = ["--formats", "dtype=float32", setting] if where == "--formats" else [where, *setting.split(",")]
    flags = ["--model", "tiny", "--context", "32", "--continuation-tokens", "4"]
    code, line = fails(capsys, "bench", "quality", *flags, *changes)
    assert (code, words in line) == (1, True), line
    assert not opened


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--max-model-len", "256"],
            "--context is 512; allowed is 2 to 256, which is as long as a request can be. Give less.",
        ),
        (["--context", "9000"], "--context is 9000; allowed is 2 to 512, "),
        (
            ["--context", "400", "--continuation-tokens", "413"],
            "--continuation-tokens is 413; allowed is 1 to 412 behind a quarter of --context, since a request can be 512 tokens long.",
        ),
        (["--context", "400", "--continuation-tokens", "412"], "Opened."),
        (["--continuations", "0", "--continuation-tokens", "9000"], "Opened."),
        (["--context", "9000", "short.txt"], "Opened."),
        (["--formats", "model=packed.gguf", "quantization=none"], "Opened."),
    ],
)
def test_windows_fit_the_model(flags: list[str], words: str, opened: list[Any], capsys: Any) -> None:
    Path("short.txt").write_text("hello world, what is that?")
    code, line = fails(capsys, "bench", "quality", "--model", "tiny", *flags)
    assert (code, words in line) == (1, True), line
    assert len(opened) == (words == "Opened.")


@pytest.mark.slow
def test_two_tokens_are_a_window_and_more_windows_than_may_wait(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny", *ENGINE, "--context", "2", "--windows", "10", "--max-waiting-requests", "4", "--json"]
    assert main(["bench", "quality", *flags, "--continuation-tokens", "3", "--continuations", "5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["continuations"]) == (10, 5)


@pytest.mark.slow
def test_a_format_may_be_another_model_with_the_same_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny", *ENGINE, "--context", "16", "--windows", "2", "--continuation-tokens", "4", "--json"]
    changes = ["--formats", "enable-prefix-caching=off,kv-cache-memory=2MiB", "--baseline", "model=half"]
    assert main(["bench", "quality", *flags, *changes]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["formats"][0]["settings"] == {"enable_prefix_caching": False, "kv_cache_memory": 2 * 2**20}
    assert told["baseline"]["settings"] == {"model": "half"} and told["formats"][0]["perplexity_ratio"] != 1
