"""`trunkline env`, what a bug report needs, and `trunkline completion`, which makes a shell complete flags."""

import argparse
import json

from trunkline.cli_parser import Parser, add_command

SHELLS = ("bash", "zsh", "fish")


def add_env(commands: "argparse._SubParsersAction[Parser]") -> None:
    """The command `trunkline env`."""
    command = add_command(
        commands,
        "env",
        "print what a bug report needs: versions, the machine, settings in the environment",
        _env,
        about="Secrets are masked.",
        examples=("env", "env --json > environment.json"),
    )
    command.add_argument("--json", action="store_true", help="as one JSON object")


def add_completion(commands: "argparse._SubParsersAction[Parser]") -> None:
    """The command `trunkline completion`."""
    command = add_command(
        commands,
        "completion",
        "print what makes a shell complete commands and flags",
        _completion,
        examples=(
            "completion bash                                            # to look at",
            'completion bash >> ~/.bashrc                               # or in a shell: eval "$(trunkline completion bash)"',
            "completion zsh  >> ~/.zshrc                                # below compinit",
            "completion fish > ~/.config/fish/completions/trunkline.fish",
        ),
    )
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def _env(args: argparse.Namespace) -> int:
    from trunkline.environment import as_text, describe

    facts = describe()
    print(json.dumps(facts, indent=1, ensure_ascii=False) if args.json else as_text(facts))
    return 0


def _completion(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["trunkline"], shell=args.shell))
    return 0
