"""Errors by the flags that were typed, not by the settings behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from knockon.errors import KnockonError, Refused

# Those that are not the setting's own name with dashes.
_OTHERS = {
    "model": "--model-path",
    "draft": "--speculative-draft-model-path",
    "max_model_len": "--context-length",
    "max_batch_size": "--max-running-requests",
    "prefill_chunk": "--chunked-prefill-size",
    "host and port": "--host and --port",
}


def named_as_typed(error: KnockonError, command: Any, arguments: Sequence[str]) -> KnockonError:
    """A refusal that names the flag, where one was typed for the field that it names.

    Args:
        error: a :class:`Refused`, or what the engine's process has said of one.
        command: the whole program, as click sees it.
        arguments: its own.
    """
    field, colon, rest = str(error).partition(": ")
    if not colon or type(error) not in (KnockonError, Refused):
        return error
    typed = [argument.partition("=")[0] for argument in arguments]
    for name in typed:
        command = getattr(command, "commands", {}).get(name, command)
    for option in command.params:
        if {field, f"--{field.replace('_', '-')}"} & {option.name, *option.opts}:
            flags = [name for name in typed if name in option.opts]
            if flags:  # the last one's value is the one that counts
                return KnockonError(f"{flags[-1]}: {rest}")
    return error


@contextmanager
def named_by_flags() -> Iterator[None]:
    """What is refused inside, or said to be by the engine's process, names flags of ``serve``."""
    flags = flags_of_settings()
    try:
        yield
    except Refused as error:
        if error.field not in flags:
            raise
        flag = flags[error.field]
        raise Refused(flag, error.found, error.wanted, error.hint) from error
    except KnockonError as error:
        if type(error) is not KnockonError:
            raise
        field, colon, rest = str(error).partition(": ")
        if not colon or field not in flags:
            raise
        raise KnockonError(f"{flags[field]}: {rest}") from error


def flags_of_settings() -> dict[str, str]:
    """The flag of every setting of an engine and a server."""
    from knockon.engine.config import EngineConfig
    from knockon.server.settings import ServerSettings

    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerSettings))
    return {each.name: f"--{each.name.replace('_', '-')}" for each in fields} | _OTHERS
