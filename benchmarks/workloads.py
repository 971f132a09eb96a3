"""`make bench`: start our server with the built-in model, run the workloads against it, stop it.

make bench ARGS='--workload W1 W2 --output numbers.json'
make bench ARGS='--workload W6 --serve "--max-num-seqs 64"'      # flags for the server
"""

import argparse
import shlex
import sys

from benchmarks.server import serve
from trunkline.bench import cli
from trunkline.errors import StartupError


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.workloads", description=__doc__)
    cli.add_arguments(parser)
    parser.add_argument("--serve", default="", metavar="FLAGS", help="flags for `trunkline serve`, in quotes")
    args = parser.parse_args()
    with serve(*shlex.split(args.serve)) as url:
        args.url = url
        try:
            return cli.run(args)
        except StartupError as error:
            print(f"trunkline: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
