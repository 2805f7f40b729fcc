"""Entry points: `ginfer` with its commands, loaded when used, and `ginfer-serve`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {  # name -> its line in the list; the module appliance.cli.<name> has `command`
    "run": "Answer one prompt; the default when the first argument is a package.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve the OpenAI API over HTTP.",
    "launch": "Configure an agent client for a running server.",
    "key": "Make an API key and keep its hash.",
    "models": "List packages and the models that can be served.",
    "inspect": "Show what is in a package.",
    "verify": "Check every byte of a package.",
    "bench": "Measure decode and prefill of a package on this machine.",
    "image": "Build, list and prune the compiled kernels of this machine.",
}
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
INTERRUPTED = 130
PIPE_CLOSED = 141


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used. A first argument that names none is
    the PACKAGE of `run`; `./serve` reaches a file of that name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"appliance.cli.{cmd_name}").command
        command.context_settings = CONTEXT
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command and its arguments."""
        if args[0] not in COMMANDS:
            args = ["run", *args]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings=CONTEXT,
    subcommand_metavar="PACKAGE | COMMAND [ARGS]...",
    epilog="`ginfer PACKAGE --prompt TEXT` is short for `ginfer run PACKAGE --prompt TEXT`.",
)
@click.version_option(package_name="ginfer", message="ginfer %(version)s")
@click.pass_context
def group(ctx: click.Context) -> None:
    """GInfer: language models for agents, on your own machine."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def invoke(command: click.Command, args: Sequence[str], name: str) -> int:
    """Run a command and return the exit code: 0; 1 after one line on stderr for a mistake of the
    user; 130 on Ctrl-C; 141 when the reader of the output has gone."""
    try:
        with command.make_context(name, list(args)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return _fail(name, error.format_message())
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except OSError as error:
        _give_up_stdout()
        return PIPE_CLOSED if isinstance(error, BrokenPipeError) else _fail(name, str(error))
    except Exception as error:
        # not imported above: --help loads as little as it can
        if not isinstance(error, import_module("ginfer.errors").GInferError):
            raise
        return _fail(name, str(error))


def _give_up_stdout() -> None:
    """If stdout takes nothing more, spare the interpreter its last flush, which would fail too."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(name: str, message: str) -> int:
    click.echo(f"{name}: {' '.join(message.split())}", err=True)
    return 1


def main() -> NoReturn:
    """The `ginfer` program."""
    sys.exit(invoke(group, sys.argv[1:], "ginfer"))


def serve_main() -> NoReturn:
    """The `ginfer-serve` program."""
    command = import_module("appliance.cli.serve").command
    command.context_settings = CONTEXT
    sys.exit(invoke(command, sys.argv[1:], "ginfer-serve"))
