"""llama.cpp's HTTP server, run by the Python of an environment that has xllamacpp: C++ routes and engine, no Python in a request.

    LLAMA_ENVIRONMENT/bin/python benchmarks/llama_server.py MODEL.gguf PORT --slots 8 --slot-tokens 3072 --threads 2

Imports nothing of Trunkline, which is not installed there. Runs until it gets a signal.
"""

import argparse
import signal

import xllamacpp  # type: ignore[import-not-found]  # in its own environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("port", metavar="PORT", type=int)
    parser.add_argument("--slots", metavar="N", type=int, required=True, help="requests at a time")
    parser.add_argument("--slot-tokens", metavar="N", type=int, required=True, help="prompt and answer of each")
    parser.add_argument("--threads", metavar="N", type=int, required=True)
    args = parser.parse_args()

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {"peer"}
    params.port = args.port
    params.n_parallel = args.slots
    params.n_ctx = args.slots * args.slot_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.use_jinja = True
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the server's threads are made, which take it over
    print(xllamacpp.get_system_info(), flush=True)
    server = xllamacpp.Server(params)
    signal.sigwait(ends)
    del server


if __name__ == "__main__":
    main()
