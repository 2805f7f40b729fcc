"""`ginfer run`: one answer from a package, in this process."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from appliance.cli.answer import Answer
from appliance.cli.load_bar import LoadBar
from appliance.cli.options import (
    PACKAGE,
    build_engine_config,
    build_sampling,
    check_thinking,
    engine_options,
    sampling_options,
    thinking_options,
)
from appliance.protocols import checks
from appliance.protocols.defaults import DEFAULT_MAX_TOKENS, ServerDefaults
from appliance.protocols.openai_chat import parse_request
from ginfer.engine.request import StopString
from ginfer.errors import ConfigError, RequestError
from ginfer.prompt import Channel

if TYPE_CHECKING:
    from appliance.protocols.openai_chat import ChatRequest
    from ginfer.config import EngineConfig
    from ginfer.engine.engine import Engine
    from ginfer.engine.request import Request


@click.command()
@PACKAGE
@click.option("--prompt", metavar="TEXT", help="What the user says.")
@click.option(
    "--messages",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="JSON array of messages, or an object with messages and tools; - reads stdin.",
)
@click.option(
    "--max-new",
    type=click.IntRange(min=1),
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    metavar="N",
    help="Longest answer in tokens, reasoning included.",
)
@thinking_options
@click.option(
    "--thinking-budget",
    type=click.IntRange(min=0),
    metavar="N",
    help="Most tokens of reasoning; then the answer follows.",
)
@sampling_options
@click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; repeatable.")
@click.option(
    "--reasoning-stop",
    multiple=True,
    metavar="TEXT",
    help="End before TEXT in the reasoning; repeatable.",
)
@click.option(
    "--stop-token-id",
    "stop_token_ids",
    type=int,
    multiple=True,
    metavar="N",
    help="End at this token; repeatable.",
)
@click.option("--raw-output", is_flag=True, help="Print all text, special tokens included.")
@click.option("--print-token-ids", is_flag=True, help="Print the generated ids on stderr.")
@engine_options
def command(package: Path, **options: Any) -> None:
    """Answer one prompt with PACKAGE and end.

    The answer goes to stdout; reasoning, progress and a summary go to stderr.
    """
    check_thinking(options)
    if options["raw_output"]:
        check_raw(options)
    chat = build_chat(options)
    raw, show_ids = options.pop("raw_output"), options.pop("print_token_ids")
    stops = tuple(
        StopString(text=text, channel=channel)
        for name, channel in (("stop", Channel.CONTENT), ("reasoning_stop", Channel.REASONING))
        for text in options.pop(name)
    )
    more = {"raw": raw, "stop_strings": stops, "stop_token_ids": options.pop("stop_token_ids")}
    config = build_engine_config(package, {**options, "max_concurrency": 1, "max_pending": 1})
    with open_engine(config) as engine:
        request = replace(prepare(engine, chat), **more)
        answer = Answer(None if raw else engine.frontend.output_parser(chat.active_tools))
        answer.follow(engine.generate(request))
    if show_ids:
        click.echo("token ids: " + " ".join(map(str, answer.token_ids)), err=True)
    click.echo(answer.summary(), err=True)


def check_raw(options: dict[str, Any]) -> None:
    """--raw-output excludes what needs a reasoning channel. Raises UsageError."""
    for name, absent in (("thinking_budget", None), ("reasoning_stop", ())):
        if options[name] != absent:
            raise click.UsageError(f"--raw-output excludes --{name.replace('_', '-')}")


def open_engine(config: EngineConfig) -> Engine:
    """Load the engine into this process, with a bar when it takes long. The import is here because
    --help should not pay for the compiler."""
    with LoadBar() as bar:
        engine: Engine = import_module("ginfer").Engine.open(config, bar)
    return engine


def prepare(engine: Engine, chat: ChatRequest) -> Request:
    """Render and tokenise the conversation for the engine."""
    prompt = engine.frontend.prepare(chat.messages, chat.active_tools, chat.options)
    preset = engine.frontend.sampling_defaults(thinking=chat.options.thinking)
    return chat.to_engine_request(prompt, "cli", preset)


def build_chat(options: dict[str, Any]) -> ChatRequest:
    """The conversation of --prompt or --messages with its options; takes them out of `options`."""
    prompt, path = options.pop("prompt"), options.pop("messages")
    if (prompt is None) == (path is None):
        raise click.UsageError("give --prompt or --messages, one of them")
    body = {"messages": [{"role": "user", "content": prompt}]} if path is None else read(path)
    budget = options.pop("thinking_budget")
    defaults = ServerDefaults(
        max_tokens=options.pop("max_new"),
        thinking=not options.pop("no_thinking"),
        effort=options.pop("reasoning_effort"),
        sampling=build_sampling(options),
    )
    try:
        return parse_request({**body, "model": "", "thinking_budget": budget}, defaults=defaults)
    except RequestError as error:
        raise ConfigError(f"{path or '--prompt'}: {error.message}", param="messages") from None


def read(path: Path) -> dict[str, Any]:
    """The members messages and tools of a messages file. Raises ConfigError naming the file."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        content = checks.decoded(data, "the content")
        if isinstance(content, list):
            return {"messages": content}
        return checks.members(content, "file", ("messages", "tools"))
    except (OSError, RequestError) as error:
        raise ConfigError(f"{path}: {error}", param="messages") from None
