"""`ginfer chat`: a conversation in the terminal, in this process."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from appliance.cli.answer import Answer
from appliance.cli.options import (
    PACKAGE,
    build_engine_config,
    build_sampling,
    check_thinking,
    engine_options,
    sampling_options,
    thinking_options,
)
from appliance.cli.run import open_engine, prepare
from appliance.protocols.defaults import DEFAULT_MAX_TOKENS
from appliance.protocols.openai_chat import ChatRequest
from ginfer.errors import GInferError
from ginfer.prompt import ContentPart, Message, PromptOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ginfer.engine.engine import Engine

PROMPT = "> "
HINT = "/reset starts anew, /quit ends, Ctrl-C stops an answer"


@click.command()
@PACKAGE
@click.option(
    "--max-new",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    metavar="N",
    help="Longest answer in tokens, reasoning included.",
)
@thinking_options
@sampling_options
@engine_options
def command(package: Path, **options: Any) -> None:
    """Talk to PACKAGE in the terminal; lines may also come through a pipe.

    /reset starts a new conversation, /quit or the end of input ends. Ctrl-C stops an answer.
    """
    check_thinking(options)
    chat = ChatRequest(
        model="",
        messages=(),
        options=PromptOptions(
            thinking=not options.pop("no_thinking"), effort=options.pop("reasoning_effort")
        ),
        max_tokens=options.pop("max_new"),
        sampling=build_sampling(options),
    )
    config = build_engine_config(package, {**options, "max_concurrency": 1, "max_pending": 1})
    with open_engine(config) as engine:
        if sys.stdin.isatty():
            info = engine.info
            click.echo(f"{info.model_id} {info.weights_id} on {info.backend}. {HINT}", err=True)
        Conversation(engine, chat).run(lines())


def lines() -> Iterator[str]:
    """What the user says, line by line, to the end of input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import_module("readline")  # line editing and history for input()
    with suppress(EOFError):
        while True:
            yield input(PROMPT)


class Conversation:
    """Turns of a chat. Earlier turns are sent back word for word, reasoning too, so that each
    prompt begins with the one before and its prefix is reused."""

    def __init__(self, engine: Engine, chat: ChatRequest) -> None:
        self._engine = engine
        self._chat = chat

    def run(self, said: Iterator[str]) -> None:
        """Answer every line until /quit or the end of input."""
        for line in said:
            text = line.strip()
            if text == "/quit":
                return
            if text == "/reset":
                self._chat = replace(self._chat, messages=())
            elif text.startswith("/"):
                click.echo(f"unknown command {text.split()[0]}; {HINT}", err=True)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        before = self._chat
        self._append(Message(role="user", content=(ContentPart(kind="text", text=text),)))
        answer = Answer(self._engine.frontend.output_parser(()))
        try:
            request = prepare(self._engine, self._chat)
            answer.follow(self._engine.generate(request))
        except KeyboardInterrupt:
            click.echo("(stopped)", err=True)
        except GInferError as error:
            self._chat = before
            click.echo(f"{error.message} (/reset starts anew)", err=True)
            return
        self._engine.frontend.remember(request.prompt, answer.token_ids)
        self._append(
            Message(
                role="assistant",
                content=(ContentPart(kind="text", text=answer.content),),
                reasoning=answer.reasoning or None,
            )
        )

    def _append(self, message: Message) -> None:
        self._chat = replace(self._chat, messages=(*self._chat.messages, message))
