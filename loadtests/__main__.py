"""`make loadtest`: serve the built-in model on a free port, put the mix on it for two minutes, and keep what Locust reports.

    python -m loadtests [flags of locust]      # --run-time 20s, --users 8, RagUser, …

Ends with Locust's own exit code: 1 if any request failed, or less than MIN_CACHED_RATIO of the RAG users' prompts came from the cache.
"""

import subprocess
import sys
from pathlib import Path

from benchmarks.server import serve

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
MIN_CACHED_RATIO = 0.8


def main(flags: list[str]) -> int:
    # For two cores. What an application has never sent must be read once, and counts as not cached: the ratio needs about a dozen
    # answers for each application.
    defaults = [
        *("--applications", "2", "--max-tokens", "32"),
        *("--users", "6", "--spawn-rate", "2", "--run-time", "120s", "--stop-timeout", "60"),
        *("--csv", str(RESULTS / "loadtest"), "--csv-full-history", "--html", str(RESULTS / "loadtest.html")),
        *("--min-cached-ratio", str(MIN_CACHED_RATIO), "--headless", "--only-summary"),
    ]
    with serve() as url:
        print(f"Locust asks {url} …", flush=True)
        command = [sys.executable, "-m", "locust", "-f", str(FOLDER / "locustfile.py"), "--host", url]
        return subprocess.run([*command, *defaults, *flags], check=False, cwd=FOLDER.parent).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
