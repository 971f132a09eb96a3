"""Two environments for the clients: this one, with the newest openai, and one beside it with openai 2.

    python -m tests.integration.environment      # build the second one

LangChain and LiteLLM support both majors, Instructor holds back a library that openai 3 wants new: so the second environment is the
only place for it, and the place where the older major is tried. What goes into it says the extra `integration-openai2` in
pyproject.toml; its exact versions say constraints-openai2.txt. Trunkline itself isn't in it: clients know nothing but HTTP.
"""

import fcntl
import subprocess
import sys
import tomllib
import venv
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = Path(__file__).parent / "constraints-openai2.txt"
FOLDER = ROOT / ".venv-integration-openai2"


class NotInstallableError(Exception):
    """pip could not install the packages: most often, there is no registry in reach. The message has pip's last words."""


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"]["integration-openai2"])


def openai2_python() -> str:
    """The interpreter of the second environment, which is built if it is not there, or was built from other versions.

    Raises NotInstallableError if it can't be.
    """
    python = FOLDER / "bin" / "python"
    wanted = requirements()
    digest = sha256(repr(wanted).encode() + CONSTRAINTS.read_bytes()).hexdigest()
    stamp = FOLDER / ".installed"
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once: one builds, the other waits
        if not stamp.exists() or stamp.read_text() != digest:
            venv.create(FOLDER, with_pip=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run(
                [*pip, "--constraint", str(CONSTRAINTS), *wanted], check=False, capture_output=True, text=True
            )
            if done.returncode:
                raise NotInstallableError("\n".join(done.stderr.strip().splitlines()[-3:]))
            stamp.write_text(digest)
    return str(python)


if __name__ == "__main__":
    try:
        print(openai2_python())
    except NotInstallableError as error:
        sys.exit(f"The environment for openai 2 could not be installed: {error}")
