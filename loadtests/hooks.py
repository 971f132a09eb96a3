"""What Locust calls: our flags, a sample every few seconds, the end of a run. What is said then is in `report`.

Workers have nothing to say; their rows come to the master.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import gevent
from locust import events
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtests.report import History, add_section, answers, summary, too_little_cached

SAMPLE_SECONDS = 2.0


@events.init_command_line_parser.add_listener
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="the model's name (default: the first that /v1/models lists)")
    parser.add_argument("--applications", type=int, default=4, help="different system prompts (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer in words (%(default)s)")
    parser.add_argument("--answers", type=int, default=0, help="end the run after so many answers (0: by --run-time)")
    parser.add_argument(
        "--min-cached-ratio",
        type=float,
        default=0.0,
        help="fail the run if less of the RAG users' prompt tokens was cached, 0 to 1 (%(default)s)",
    )


@events.init.add_listener
def watch(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    history = [History()]

    def sample() -> None:
        while True:
            gevent.sleep(SAMPLE_SECONDS)
            history[0].sample(environment.stats)
            wanted = environment.parsed_options.answers
            if wanted and answers(environment.stats) >= wanted:
                environment.runner.quit()
                return

    @environment.events.test_start.add_listener
    def begin(**_: Any) -> None:
        history[0] = History()

    @environment.events.quitting.add_listener
    def judge(**_: Any) -> None:
        if reason := too_little_cached(environment.stats, environment.parsed_options.min_cached_ratio):
            print(reason)
            environment.process_exit_code = 1

    @environment.events.quit.add_listener
    def tell(**_: Any) -> None:
        sampler.kill()
        print(summary(environment.stats))
        if file := environment.parsed_options.html_file:
            page = Path(file).read_text(encoding="utf-8")
            Path(file).write_text(add_section(page, environment.stats, history[0]), encoding="utf-8")
            print(f"The report: {file}")

    sampler = gevent.spawn(sample)
