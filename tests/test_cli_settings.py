"""Where settings come from: flags, the environment, a file, defaults; and what is said of each that cannot be read."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import fails
from trunkline.cli import main, make_parser, serve_config
from trunkline.cli_settings import ShowConfig, misspelt_variables, variable
from trunkline.config import ServeConfig
from trunkline.errors import ConfigError

FILE = """\
# a server of two people
model: some.gguf
max-model-len: 32k
served_model_name: [a, b]
enable-prefix-caching: false
enforce-eager: yes
api-key:
  - k1
  - k2
chat-template:
dtype: half
scheduling-policy: "fcfs"
"""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for action in make_parser().parse(["serve", "m"]).parser.settings():
        monkeypatch.delenv(variable(action), raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(FILE)
    return path


def config(*arguments: str) -> ServeConfig:
    return serve_config(make_parser().parse(["serve", *arguments]))


def test_a_file_says_it_all(file: Path) -> None:
    served = config("--config", str(file))
    assert (served.engine.model.path, served.engine.model.max_model_len) == ("some.gguf", 32_000)
    assert (served.engine.model.dtype, served.engine.worker.enforce_eager) == ("float16", True)
    assert served.engine.cache.enable_prefix_caching is False
    assert served.engine.scheduler.policy == "fcfs"
    assert served.api.served_model_names == ("a", "b")
    assert served.api.api_keys == ("k1", "k2")
    assert served.api.chat_template is None, "a key without a value is as good as none"
    assert served.engine.scheduler.max_num_seqs == 256, "what it does not name has its default"


def test_flags_count_most_then_the_environment_then_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_MAX_MODEL_LEN", "2K")
    monkeypatch.setenv("TRUNKLINE_ENABLE_PREFIX_CACHING", "on")
    monkeypatch.setenv("TRUNKLINE_SERVED_MODEL_NAME", "c,d")
    monkeypatch.setenv("TRUNKLINE_MODEL", "of-environment.gguf")
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(file))
    served = config()
    assert (served.engine.model.path, served.engine.model.max_model_len) == ("of-environment.gguf", 2048)
    assert served.engine.cache.enable_prefix_caching is True
    assert served.api.served_model_names == ("c", "d")
    assert served.api.api_keys == ("k1", "k2")
    served = config("typed.gguf", "--max-model-len", "7", "--no-enable-prefix-caching", "--api-key", "k3")
    assert (served.engine.model.path, served.engine.model.max_model_len) == ("typed.gguf", 7)
    assert served.engine.cache.enable_prefix_caching is False
    assert served.api.api_keys == ("k3",), "a list replaces another one"


def test_a_flag_with_its_default_still_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_MAX_NUM_SEQS", "3")
    assert config("m").engine.scheduler.max_num_seqs == 3
    assert config("m", "--max-num-seqs", "256").engine.scheduler.max_num_seqs == 256


@pytest.mark.parametrize(("name", "flag"), [("PORT", "--port=1"), ("VERBOSE", "--verbose")])
def test_a_variable_that_does_not_count_may_hold_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, flag: str
) -> None:
    """Kubernetes sets $TRUNKLINE_PORT for a service of that name."""
    monkeypatch.setenv(f"TRUNKLINE_{name}", "tcp://10.0.0.1:80")
    args = make_parser().parse(["serve", "m", flag])
    assert args.origins[name.lower()] == "flag"
    assert fails(capsys, "serve", "m")[0] == 2


def test_values_of_a_list_may_begin_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("api-key: [-abc, --def, g]\n")
    monkeypatch.setenv("TRUNKLINE_SERVED_MODEL_NAME", "-a,b")
    served = config("m", "--config", str(path))
    assert served.api.api_keys == ("-abc", "--def", "g")
    assert served.api.served_model_names == ("-a", "b")


@pytest.mark.parametrize("off", ["", "0", "false", "NO"])
def test_what_is_empty_or_off(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv("TRUNKLINE_ENFORCE_EAGER", off)
    monkeypatch.setenv("TRUNKLINE_VERBOSE", off)
    monkeypatch.setenv("TRUNKLINE_THREADS", "")
    args = make_parser().parse(["serve", "m"])
    assert (args.enforce_eager, args.verbose, args.threads) == (False, False, None)


def test_every_flag_has_its_variable() -> None:
    parser = make_parser().parse(["serve", "m"]).parser
    names = [variable(action) for action in parser.settings()]
    assert len(set(names)) == len(names) > 40
    assert {"TRUNKLINE_MAX_MODEL_LEN", "TRUNKLINE_API_KEY", "TRUNKLINE_CONFIG", "TRUNKLINE_GRAMMAR_BACKEND"} <= set(
        names
    )
    left_out = {action.dest for action in parser._actions} - {action.dest for action in parser.settings()}
    assert left_out == {"help", "model", "show_config"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nmax-modl-len: 3", "server.yaml, line 2: unknown key max-modl-len; did you mean max-model-len?"),
        ("ctx-size: 3", "line 1: unknown key ctx-size; here it is --max-model-len"),
        ("enable-lora: true", "line 1: unknown key enable-lora; it is not there yet"),
        ("zzz: 3", "line 1: unknown key zzz; see trunkline serve --help"),
        (
            "show-config: true",
            "line 1: show-config cannot be set in a file; leave it out, and give --show-config on the",
        ),
        ("config: other.yaml", "line 1: config cannot be set in a file;"),
        ("help: true", "line 1: help cannot be set in a file;"),
        ("\n\nport: many", "line 3: --port is 'many'; allowed is an integer"),
        ("dtype: int3", "line 1: --dtype is 'int3'; allowed is one of auto"),
        ("verbose: 7", "line 1: verbose is '7'; allowed is true or false."),
        ("verbose: [true]", "line 1: verbose is 'a sequence'; allowed is true or false."),
        ("port: {a: 1}", "line 1: port is a mapping; allowed is one value."),
        ("port: [1, 2]", "line 1: port is a sequence; allowed is one value."),
        ("api-key: {a: 1}", "line 1: api-key is a mapping; allowed is a list of values."),
    ],
)
def test_what_a_file_gets_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    code, line = fails(capsys, "serve", "m", "--config", str(path))
    assert (code, words in line) == (2, True), line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port: 1\nport: 2", "server.yaml, line 2: port stands in line 1 already; keep one of them."),
        (
            "max-model-len: 1\nmax_model_len: 2",
            "line 2: max_model_len stands in line 1 already as max-model-len; keep one",
        ),
        ("dashboard: true\nno-dashboard: true", "line 2: no-dashboard stands in line 1 already as dashboard; keep one"),
        ("port: 1\n? [port, host]\n: 2", "server.yaml, line 2: a key is a sequence; allowed is a flag's name"),
        pytest.param("port: " + "[" * 10_000, "server.yaml is nested too deeply;", id="deep"),
        ("- port", "server.yaml holds no settings; write one on each line"),
        ("port: [", "server.yaml, line 1: "),
        ("port: 1\n--- \nport: 2", "this is not YAML."),
        ("\xff", "which cannot be read: it is not UTF-8."),
        (None, "which cannot be read: No such file or directory."),
    ],
)
def test_what_is_no_file_of_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "server.yaml"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    code, line = fails(capsys, "serve", "m", "--config", str(path))
    assert (code, words in line) == (1, True), line


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert config("m", "--config", str(tmp_path / "empty.yaml")).api.port == 8000


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TRUNKLINE_PORT", "many", "$TRUNKLINE_PORT: --port is 'many'; allowed is an integer"),
        ("TRUNKLINE_VERBOSE", "very", "$TRUNKLINE_VERBOSE: --verbose is 'very'; allowed is true or false."),
        ("TRUNKLINE_DEVICE", "tpu", "$TRUNKLINE_DEVICE: --device is 'tpu'; allowed is one of auto, cpu, cuda."),
    ],
)
def test_what_the_environment_gets_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    code, line = fails(capsys, "serve", "m")
    assert (code, words in line) == (2, True), line


def test_a_misspelt_variable_is_told_of() -> None:
    parser = make_parser().parse(["serve", "m"]).parser
    environment = {"TRUNKLINE_MAX_MODEL_LENGTH": "3", "TRUNKLINE_DATA": "x", "TRUNKLINE_PORT": "1", "OTHER_PORT": "2"}
    assert misspelt_variables(parser, environment) == [
        "$TRUNKLINE_MAX_MODEL_LENGTH is no setting, and is ignored; did you mean $TRUNKLINE_MAX_MODEL_LEN?"
    ]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, tuple[str, str]]:
    """Setting -> value and origin, as `--show-config` prints them."""
    assert main(["serve", "--show-config", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        match: Any = re.fullmatch(r"(?:# )?([\w.-]+):(.*?)\s+# (.+)", line)
        found[match[1]] = (match[2].strip(), match[3])
    return found


def test_each_setting_is_shown_with_its_origin(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUNKLINE_PORT", "0")
    settings = shown(capsys, "--config", str(file), "--threads", "2")
    assert settings["model"] == ("some.gguf", "server.yaml, line 2")
    assert settings["max-model-len"] == ("32000", "server.yaml, line 3")
    assert settings["served-model-name"] == ("[a, b]", "server.yaml, line 4")
    assert settings["port"] == ("0", "$TRUNKLINE_PORT")
    assert settings["threads"] == ("2", "flag")
    assert settings["max-num-seqs"] == ("256", "default")
    assert settings["chat-template"] == ("", "default")
    assert settings["api-key"] == ("…", "server.yaml, line 7"), "what is secret is not shown"
    parser = make_parser().parse(["serve", "m"]).parser
    assert len(settings) == len(parser.settings()) - 1, "all but --config"
    assert not any(isinstance(action, ShowConfig) for action in parser.settings())


def test_passwords_in_urls_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    settings = shown(capsys, "m", "--otlp-endpoint", "http://me:hush@collector:4318")
    assert settings["otlp-endpoint"] == ("http://…@collector:4318", "flag")


def test_what_is_shown_can_be_a_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(FILE.replace("api-key:\n  - k1\n  - k2\n", ""))
    assert main(["serve", "--show-config", "--config", str(file)]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    assert config("--config", str(again)) == config("--config", str(file))


def test_settings_that_make_no_sense_are_not_shown(file: Path) -> None:
    with pytest.raises(ConfigError, match="--block-size is 0"):
        config("--config", str(file), "--block-size", "0")
    assert main(["serve", "--show-config", "--config", str(file), "--block-size", "0"]) == 1
