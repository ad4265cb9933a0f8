"""The ``knockon`` command: registers the commands and turns errors into one line and an exit code.

Each command is a function in a module of its own in this folder, registered below in the order
that ``--help`` shows. A command module imports torch, transformers and the rooms that need them
inside its functions, so that ``--help`` and completion answer at once.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from knockon import __version__
from knockon.cli import bench, chat, doctor, generate, models, serve, train
from knockon.cli.flag_names import named_as_typed
from knockon.errors import KnockonError

app = typer.Typer(
    name="knockon",
    help="Serve a language model faster, token for token the same: Domino speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of long options off
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"knockon {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """Options that stand before the command."""


app.command(
    "serve",
    short_help="Serve a model over an OpenAI-compatible HTTP API.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve.serve)
app.command("generate", short_help="Complete one prompt, or a file of them.")(generate.generate)
app.command("chat", short_help="Talk to a model in the terminal.")(chat.chat)
app.command("train", short_help="Make a drafter for a target.")(train.train)
app.add_typer(models.app, name="models")
app.add_typer(bench.app, name="bench")
app.command("doctor", short_help="Show versions, devices, models, and what will be used.")(
    doctor.doctor
)


def main() -> None:
    """Entry point. Exit codes: 0 done, 2 refused or misused (one line on stderr), 130 Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        # What a terminal's encoding has no character for must not end an answer half-way.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if sys.stdin is None:  # closed by who started this: as good as empty
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused as a prompt, with the reason
    try:
        try:
            app(prog_name="knockon")
        finally:
            # Here rather than at interpreter exit, where a reader that is gone cannot be caught.
            sys.stdout.flush()
    except KnockonError as error:
        named = named_as_typed(error, typer.main.get_command(app), sys.argv[1:])
        print(f"error: {named}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has what it wanted; nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
