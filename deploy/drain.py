"""Wait until a server has nothing left to do: what runs before it is told to stop. Standard library only.

python drain.py http://127.0.0.1:8000 120

First it waits some seconds, in which whoever sends requests here learns that others should get them. Then it waits until none
runs or waits. Exit code 0; 1 if there are some left after so many seconds in all.
"""

import re
import sys
import time
import urllib.request

NOTICE_SECONDS = 5.0  # for a load balancer to forget this server
PAUSE_SECONDS = 0.5


def num_requests(url: str) -> float:
    """Running and waiting. 0 if the server is gone, or its engine is: then nobody waits for anything."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
            text = page.read().decode()
    except OSError as error:
        is_gone = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
        return 0 if is_gone else 1  # a server that is only slow to answer is busy
    told = re.findall(r"^trunkline:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)
    if not told and re.search(r"^trunkline:engine_ready\{.*\} 1", text, re.MULTILINE):
        return 1  # at least: its engine is in the middle of a long step
    return sum(map(float, told))


def main(url: str, seconds: float, notice: float = NOTICE_SECONDS) -> int:
    deadline = time.monotonic() + seconds
    time.sleep(min(notice, seconds))
    while num_requests(url):
        if time.monotonic() >= deadline:
            return 1
        time.sleep(PAUSE_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2])))
