"""The command line: flags, defaults, help, words for mistakes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trunkline
from trunkline.cli import main, make_parser, serve_config
from trunkline.cli_parser import NAMES_HERE, NOT_HERE
from trunkline.cli_serve import engine_settings
from trunkline.config import GrammarConfig, ServeConfig, engine_config
from trunkline.errors import ConfigError, StartupError
from trunkline.models.hub import Wanted


def config(*arguments: str) -> ServeConfig:
    return serve_config(make_parser().parse(["serve", *arguments]))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one sentence on stderr."""
    try:
        code = main(arguments)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        code = ended.code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return code, line


DEFAULTS = {
    "--host": "127.0.0.1",
    "--port": "8000",
    "--dtype": "auto",
    "--quantization": "auto",
    "--load-format": "auto",
    "--generation-config": "auto",
    "--block-size": "16",
    "--enable-prefix-caching": "True",
    "--scheduling-policy": "window",
    "--max-num-seqs": "256",
    "--max-num-batched-tokens": "512",
    "--device": "auto",
    "--seed": "0",
    "--max-model-len": "the model's own length",
    "--disk-cache-size": "10GiB",
    "--grammar-backend": "auto",
    "--grammar-unsupported": "error",
    "--grammar-compile-seconds": "5.0",
    "--grammar-cache-size": "256MiB",
    "--grammar-forced-tokens": "True",
    "--max-stored-responses": "4096",
    "--stored-responses-memory": "64MiB",
    "--threads": "all cores",
    "--gpu-memory-utilization": "0.9",
    "--kv-cache-dtype": "auto",
    "--served-model-name": "MODEL as given",
}


def test_defaults_are_what_people_know() -> None:
    served = config("folder")
    assert served.engine.model.path == "folder"
    assert served.engine.model.max_model_len is None
    assert served.engine.cache.block_size == 16
    assert served.engine.cache.enable_prefix_caching is True
    assert served.engine.scheduler.max_num_seqs == 256
    assert served.engine.scheduler.max_num_batched_tokens == 512
    assert (served.api.host, served.api.port) == ("127.0.0.1", 8000)
    assert served.api.served_model_names == ("folder",)


def test_how_many_responses_are_kept() -> None:
    api = config("m", "--max-stored-responses", "0", "--stored-responses-memory", "1GiB").api
    assert (api.max_stored_responses, api.stored_responses_memory) == (0, 2**30)
    assert config("m").api.stored_responses_memory == 64 * 2**20


@pytest.mark.parametrize(("flag", "default"), DEFAULTS.items())
def test_help_shows_the_defaults(capsys: pytest.CaptureFixture[str], flag: str, default: str) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    described = re.split(rf" {flag}[ ,]", text[text.index("options:") :])[1]
    assert f"(default: {default})" in described[: described.index(")") + 1]


def test_flags_reach_their_places() -> None:
    served = config(
        *("--model", "m.gguf", "--port", "0", "--served-model-name", "a", "b", "--no-enable-prefix-caching"),
        *("--kv-cache-memory", "1.5GiB", "--max-model-len", "128", "--scheduling-policy", "lpm", "--block-size", "32"),
        *(
            "--max-num-seqs",
            "3",
            "--max-num-batched-tokens",
            "64",
            "--seed",
            "9",
            "--load-format",
            "dummy",
            "--threads",
            "2",
        ),
        *("--dtype", "float32", "--api-key", "k", "--chat-template", "t.jinja", "--device", "cpu"),
    )
    engine, api = served.engine, served.api
    assert (engine.model.path, engine.model.load_format, engine.model.dtype) == ("m.gguf", "dummy", "float32")
    assert (engine.model.max_model_len, engine.model.seed) == (128, 9)
    assert engine.cache.kv_cache_memory == 3 * 2**29
    assert engine.cache.enable_prefix_caching is False
    assert engine.cache.block_size == 32
    assert (engine.scheduler.policy, engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (
        "lpm",
        3,
        64,
    )
    assert (engine.worker.device, engine.worker.threads) == ("cpu", 2)
    assert api.served_model_names == ("a", "b")
    assert (api.api_keys, api.chat_template, api.port) == (("k",), "t.jinja", 0)


@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_vllms_names_of_dtypes(name: str, dtype: str) -> None:
    assert config("m", "--dtype", name).engine.model.dtype == engine_config("m", dtype=name).model.dtype == dtype


def test_counts_of_tokens_may_have_a_unit() -> None:
    engine = config(
        "m", "--max-model-len", "32k", "--max-num-batched-tokens", "2K", "--max-waiting-tokens", "1M"
    ).engine
    assert (engine.model.max_model_len, engine.scheduler.max_num_batched_tokens) == (32_000, 2048)
    assert engine.scheduler.max_waiting_tokens == 2**20


def test_flags_of_gpus_reach_their_places() -> None:
    engine = config("m").engine
    assert (engine.worker.gpu_memory_utilization, engine.worker.enforce_eager) == (0.9, False)
    assert engine.cache.kv_cache_dtype == "auto"
    flags = ("--gpu-memory-utilization", "0.8", "--enforce-eager", "--kv-cache-dtype", "fp8", "--device", "cuda")
    engine = config("m", *flags).engine
    assert (engine.worker.gpu_memory_utilization, engine.worker.enforce_eager) == (0.8, True)
    assert (engine.cache.kv_cache_dtype, engine.worker.device) == ("fp8", "cuda")


def test_flags_of_structured_output_reach_their_places() -> None:
    served = config("m")
    assert served.engine.grammar == GrammarConfig()
    assert (served.api.grammar_backend, served.api.grammar_unsupported, served.api.close_on_length) == (
        "auto",
        "error",
        False,
    )
    served = config(
        *("m", "--grammar-backend", "outlines", "--grammar-unsupported", "validate", "--close-on-length"),
        *("--grammar-compile-seconds", "0.5", "--grammar-compile-threads", "3", "--grammar-cache-size", "1MiB"),
        "--no-grammar-forced-tokens",
    )
    assert served.engine.grammar == GrammarConfig(
        compile_seconds=0.5, compile_threads=3, cache_bytes=2**20, forced_tokens=False
    )
    assert (served.api.grammar_backend, served.api.grammar_unsupported, served.api.close_on_length) == (
        "outlines",
        "validate",
        True,
    )


@pytest.mark.parametrize("flag", ["--guided-decoding-backend", "--structured-outputs-config.backend"])
def test_vllms_names_of_the_grammar_backend(flag: str) -> None:
    assert config("m", flag, "guidance").api.grammar_backend == "llguidance"
    assert config("m", flag, "xgrammar").api.grammar_backend == "xgrammar"


def test_gguf_is_served_under_its_bare_name() -> None:
    assert config("/some/where/Model.Q4.gguf").api.served_model_names == ("Model.Q4",)


def test_without_a_model_the_built_in_one_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.models.hub.builtin_model", lambda: "/x/Built-In.gguf")
    served = config()
    assert served.engine.model.path == "/x/Built-In.gguf"
    assert served.api.served_model_names == ("Built-In",)


def test_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_API_KEY", "from-environment")
    assert config("m").api.api_keys == ("from-environment",)
    assert config("m", "--api-key", "from-flag").api.api_keys == ("from-flag",)
    monkeypatch.setenv("TRUNKLINE_API_KEY", "")
    assert config("m").api.api_keys == ()


def test_unknown_fields_are_refused_only_if_told() -> None:
    assert config("m", "--strict-params").api.strict_params is True
    assert config("m").api.strict_params is False


def test_several_keys_and_the_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    api = config("m", "--api-key", "a", "b", "a", "--admin-api-key", "root", "--cache-sharing", "all").api
    assert (api.api_keys, api.admin_api_key, api.cache_sharing) == (("a", "b"), "root", "all")
    assert config("m", "--api-key", "a", "--api-key", "b", "c").api.api_keys == ("a", "b", "c")
    assert (config("m").api.admin_api_key, config("m").api.cache_sharing) == (None, "key")
    monkeypatch.setenv("TRUNKLINE_ADMIN_API_KEY", "from-environment")
    assert config("m").api.admin_api_key == "from-environment"


@pytest.mark.parametrize("arguments", [["--api-key", "sécret"], ["--api-key", "a", ""], ["--admin-api-key", "sec ret"]])
def test_keys_that_no_client_can_send_are_not_shown(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"A key of {arguments[0]} is empty or has other characters") as refused:
        config("m", *arguments)
    assert "ret" not in str(refused.value)


def test_model_among_the_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The last --api-key is the path of a file or folder\. Write"):
        config("--api-key", "a", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--max-num-seq", "3"], 2, "unknown argument --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--max_model_len=5"], 2, "did you mean --max-model-len?"),
        (["serve", "--dtype", "int3"], 2, "error: --dtype is 'int3'; allowed is one of auto, float32, "),
        (["serve", "--port", "many"], 2, "error: --port is 'many'; allowed is an integer"),
        (["serve", "--max-model-len", "4x"], 2, "error: --max-model-len is '4x'; allowed is an integer"),
        (["chat", "--temperature", "hot"], 2, "error: --temperature is 'hot'; allowed is a number"),
        (["bench", "serve", "--seed", "4k"], 2, "error: --seed is '4k'; allowed is an integer"),
        (
            ["serve", "--max-stored-responses", "-1"],
            2,
            "--max-stored-responses is '-1'; allowed is an integer of at least 0",
        ),
        (["serve", "--port"], 2, "error: --port: expected one argument"),
        (["serve", "--kv-cache-memory", "4 parsecs"], 2, "error: --kv-cache-memory: '4 parsecs' is not a size"),
        (["serve", "m", "--threads", "0"], 1, "error: --threads is 0; allowed is an integer of at least 1."),
        (
            ["serve", "m", "--gpu-memory-utilization", "1.01"],
            1,
            "error: --gpu-memory-utilization is 1.01; allowed is a share above 0 and up to 1.",
        ),
        (
            ["serve", "m", "--gpu-memory-utilization", "0"],
            1,
            "error: --gpu-memory-utilization is 0.0; allowed is a share",
        ),
        (
            ["serve", "m", "--kv-cache-dtype", "fp4"],
            2,
            "--kv-cache-dtype is 'fp4'; allowed is one of auto, float32, float16, bfloat16, fp8, fp8_e4m3",
        ),
        (["serve", "m", "--port", "70000"], 1, "--port is 70000; allowed is 0 to 65535"),
        (["serve", "m", "--block-size", "0"], 1, "error: --block-size is 0; allowed is an integer of at least 1."),
        (["serve", "m", "--max-num-seqs", "-1"], 1, "error: --max-num-seqs is -1"),
        (["serve", "m", "--model", "n"], 1, "Two models are named"),
        (
            ["serve", "m", "--guided-decoding-backend", "none"],
            2,
            "error: --grammar-backend is 'none'; allowed is one of auto",
        ),
        (
            ["serve", "m", "--grammar-unsupported", "ignore"],
            2,
            "--grammar-unsupported is 'ignore'; allowed is one of error, validate.",
        ),
        (
            ["serve", "m", "--grammar-compile-seconds", "0"],
            1,
            "--grammar-compile-seconds is 0.0; allowed is a number of seconds above",
        ),
        (
            ["serve", "m", "--grammar-compile-threads", "0"],
            1,
            "--grammar-compile-threads is 0; allowed is an integer of at least 1.",
        ),
        (["serve", "m", "--grammar-cache-size", "0"], 2, "--grammar-cache-size: '0' is less than one byte"),
        (["serve", "m", "--disk-cache-size", "1GiB"], 1, "no folder to keep files in; add --disk-cache-dir FOLDER."),
        (["serve", "/does/not/exist", "--port", "0"], 1, "/does/not/exist"),
        (["serve", "m", "--host", "no.such.host.invalid"], 1, "no.such.host.invalid"),
        (["serve", "m", "--host", ""], 1, "--host is ''; name an address"),
        (["serve", ""], 1, "The model is ''; give the path"),
        (["serve", "--model", ""], 1, "The model is ''; give the path"),
        (["sevre"], 2, "command is 'sevre'; did you mean serve?"),
        (["dance"], 2, "command is 'dance'; there are serve, chat, complete, cache, grammar, run-batch,"),
        (["bench", "serv"], 2, "did you mean serve?"),
        (["bench", "serve", "--workload", "W99"], 1, "W99"),
        (
            ["chat", "--url", "http://127.0.0.1:9/v1"],
            1,
            "No server answers at http://127.0.0.1:9/v1: Connection refused.",
        ),
        (["chat", "--url", "nonsense"], 1, "No server answers at http://nonsense/v1: "),
        (["chat", "--url", "127.0.0.1:9"], 1, "No server answers at http://127.0.0.1:9/v1: Connection refused."),
        (["cache", "tree", "--url", "127.0.0.1:9"], 1, "No server answers at http://127.0.0.1:9/v1: Connection"),
        (["bench", "serve", "--url", "127.0.0.1:9"], 1, "GET http://127.0.0.1:9/v1/models failed"),
    ],
)
def test_mistakes_get_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    seen, line = fails(capsys, *arguments)
    assert (seen, words in line) == (code, True), line


@pytest.mark.parametrize(("arguments", "usage"), [([], "usage: trunkline ["), (["bench"], "usage: trunkline bench [")])
def test_what_needs_another_word_prints_the_help(
    capsys: pytest.CaptureFixture[str], arguments: list[str], usage: str
) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(usage)


@pytest.mark.parametrize(("flag", "here"), NAMES_HERE.items())
def test_flags_of_other_servers_are_named(capsys: pytest.CaptureFixture[str], flag: str, here: str) -> None:
    assert fails(capsys, "serve", "m", flag, "4") == (
        2,
        f"trunkline serve: error: unknown argument {flag}; here it is {here}",
    )
    command = make_parser().parse(["serve", "m"]).parser
    assert here.split(",")[0] in command.format_help(), "and exists"


@pytest.mark.parametrize(("flag", "why"), NOT_HERE.items())
def test_flags_without_a_counterpart_are_explained(capsys: pytest.CaptureFixture[str], flag: str, why: str) -> None:
    assert fails(capsys, "serve", f"{flag}=4") == (2, f"trunkline serve: error: unknown argument {flag}; {why}")


def test_flags_that_are_not_alike_are_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    _, line = fails(capsys, "chat", "--ctx-size", "4")
    assert line == "trunkline chat: error: unknown argument --ctx-size; see trunkline chat --help"
    _, line = fails(capsys, "serve", "--stack-size", "4")
    assert line == "trunkline serve: error: unknown argument --stack-size; see trunkline serve --help"


def test_setting_without_a_flag_is_not_called_one() -> None:
    with pytest.raises(ConfigError, match=r"^num_pages is 0; allowed is"):
        engine_config("m", num_pages=0)


def test_verbose_shows_the_traceback() -> None:
    with pytest.raises(StartupError):
        main(["serve", "/does/not/exist", "--port", "0", "-v"])


def test_python_m_trunkline() -> None:
    command = [sys.executable, "-m", "trunkline", "--version"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.stdout == f"trunkline {trunkline.__version__}\n"


@pytest.mark.parametrize("arguments", [["env"], ["bench", "--help"], ["chat", "--url", "nowhere:1"]])
def test_a_reader_that_leaves_ends_it_quietly(arguments: list[str]) -> None:
    """Both streams go into a pipe that nobody reads any more, as in `trunkline … 2>&1 | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "trunkline", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE if "chat" not in arguments else writer,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            check=False,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr or b"") == (141, b"")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom trunkline.cli import make_parser\nmake_parser().format_help()\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'pydantic', 'zmq', 'tokenizers', 'aiohttp'} & sys.modules.keys()\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------- models on the hub


@pytest.mark.parametrize(
    "flags", [["org/name"], ["--model", "org/name"], ["-hf", "org/name"], ["--hf-repo", "org/name"]]
)
def test_a_name_on_the_hub_is_kept_until_the_server_starts(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.models.hub._ask", None)
    served = config(*flags, "--revision", "v1", "--download-dir", "/x")
    source = served.engine.model
    assert (source.path, source.revision, source.download_dir) == ("org/name", "v1", "/x")
    assert served.api.served_model_names == ("org/name",)


def test_settings_are_shown_without_a_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trunkline.models.hub._ask", None)
    assert main(["serve", "org/name", "--show-config"]) == 0
    assert "model: org/name" in capsys.readouterr().out


def test_commands_with_an_engine_of_their_own_find_the_model_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that make no sense are told before anything is downloaded; another model does not have this one's revision."""
    asked: list[Wanted] = []

    def found(wanted: Wanted) -> str:
        asked.append(wanted)
        return f"/found/{wanted.name.repository}"

    monkeypatch.setattr("trunkline.models.hub._ask", found)
    args = make_parser().parse(["bench", "step", "--model", "org/name", "--revision", "v1"]).serve
    path, flags = engine_settings(args, {})
    assert (path, flags["revision"], flags["download_dir"]) == ("/found/org/name", None, None)
    assert engine_settings(args, {"model": "org/other"})[0] == "/found/org/other"
    assert engine_settings(args, {"model": "org/other", "revision": "v2"})[0] == "/found/org/other"
    assert [(wanted.name.repository, wanted.revision) for wanted in asked] == [
        ("org/name", "v1"),
        ("org/other", None),
        ("org/other", "v2"),
    ]
    with pytest.raises(ConfigError, match="--threads is 0"):
        engine_settings(args, {"threads": 0})
    assert len(asked) == 3


@pytest.mark.parametrize(("flag", "value"), [("--revision", ""), ("--download-dir", "")])
def test_a_variable_that_was_never_set(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} is ''; allowed is "):
        config("org/name", flag, value)
