"""A child process that runs pieces of Python as a reader types them: one after the other, in one namespace. Knows no pages.

A piece is a line of JSON on stdin, {"name", "code"}; so is what became of it on stdout, {"output", "error"}.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    """Until stdin ends. Whatever else writes to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in sys.stdin:
        piece = json.loads(line)
        output, error = io.StringIO(), None
        try:
            with contextlib.redirect_stdout(output):
                exec(compile(piece["code"], piece["name"], "exec"), names)  # noqa: S102  they are ours, of a page
        except BaseException:  # noqa: BLE001  whatever it is, it is told
            error = traceback.format_exc()
        print(json.dumps({"output": output.getvalue(), "error": error}), file=answers, flush=True)


if __name__ == "__main__":
    main()
