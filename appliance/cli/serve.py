"""`ginfer serve` and `ginfer-serve`: the HTTP server."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from appliance.cli.options import (
    PACKAGE,
    build_engine_config,
    build_sampling,
    check_thinking,
    engine_options,
    sampling_options,
    thinking_options,
)
from appliance.config import LOG_FORMATS, ApplianceConfig
from appliance.protocols.defaults import DEFAULT_MAX_TOKENS, ServerDefaults


@click.command()
@PACKAGE
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0: any free port.")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="Demand this key; repeatable.  [default: no authentication]",
)
@click.option(
    "--api-keys-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Demand a key whose hash is in FILE (see `ginfer key`); SIGHUP reads it again.",
)
@click.option("--model-id", metavar="NAME", help="Served name.  [default: the package's model]")
@click.option(
    "--max-concurrency", type=int, default=8, show_default=True, metavar="N", help="1 to 8."
)
@click.option(
    "--max-pending-requests",
    "max_pending",
    type=int,
    default=16,
    show_default=True,
    metavar="N",
    help="Requests that may wait; one more is answered 429.",
)
@click.option(
    "--pending-timeout-ms",
    type=int,
    default=600_000,
    show_default=True,
    metavar="N",
    help="Longest wait of a request.",
)
@click.option(
    "--default-max-tokens",
    type=int,
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    metavar="N",
    help="Longest answer of requests that do not say.",
)
@click.option(
    "--max-request-mib",
    type=int,
    default=384,
    show_default=True,
    metavar="N",
    help="Largest request body.",
)
@click.option(
    "--response-store-max-records",
    type=int,
    default=1024,
    show_default=True,
    metavar="N",
    help="Stored responses (OpenAI Responses); the least recently used go first.",
)
@click.option(
    "--response-store-max-mib",
    type=int,
    default=256,
    show_default=True,
    metavar="N",
    help="Memory of the stored responses.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="PATH",
    help="Folder of the server's key, with which reasoning is sealed.  [default: the user's]",
)
@click.option("--no-prefix-reuse", is_flag=True, help="Prefill every prompt from its first token.")
@click.option(
    "--preserve-thinking/--no-preserve-thinking",
    default=True,
    show_default=True,
    help="Whether earlier turns keep their reasoning, unless the request says.",
)
@click.option(
    "--request-log-jsonl",
    "request_log",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PATH",
    help="Append one JSON object per event of a request, without prompts, answers and keys.",
)
@click.option(
    "--request-log-max-mib",
    type=int,
    default=64,
    show_default=True,
    metavar="N",
    help="Size at which the request log becomes PATH.1.",
)
@click.option(
    "--request-log-files",
    type=int,
    default=8,
    show_default=True,
    metavar="N",
    help="Old request logs that are kept.",
)
@click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default="text",
    show_default=True,
    help="Form of the lines on stderr.",
)
@click.option(
    "--log-stats-interval-ms",
    type=int,
    default=5000,
    show_default=True,
    metavar="N",
    help="Between two lines of throughput; 0: none.",
)
@click.option(
    "--drain-timeout-ms",
    type=int,
    default=30_000,
    show_default=True,
    metavar="N",
    help="What running requests get when the server stops; a second signal ends it.",
)
@click.option(
    "--watchdog-ms",
    type=int,
    default=60_000,
    show_default=True,
    metavar="N",
    help="An engine that is frozen for so long is started anew.",
)
@click.option(
    "--no-canonical-headers",
    is_flag=True,
    help="Leave the line that Claude Code changes per request in its system prompt.",
)
@click.option("--cors", is_flag=True, help="Allow browsers of any origin.")
@thinking_options
@sampling_options
@engine_options
def command(package: Path, **options: Any) -> None:
    """Serve PACKAGE over HTTP: OpenAI Chat Completions and Responses, Anthropic Messages.

    Thinking and sampling options are defaults; a request overrides them.
    """
    config = build_config(package, options)
    echo = partial(click.echo, err=True)
    import_module("appliance.server").serve(config, echo)  # loads the web framework


def build_config(package: Path, options: dict[str, Any]) -> ApplianceConfig:
    """The server's configuration from the parsed options. Raises ConfigError or UsageError."""
    check_thinking(options)
    defaults = ServerDefaults(
        max_tokens=options.pop("default_max_tokens"),
        thinking=not options.pop("no_thinking"),
        effort=options.pop("reasoning_effort"),
        preserve_thinking=options.pop("preserve_thinking"),
        canonical_headers=not options.pop("no_canonical_headers"),
        sampling=build_sampling(options),
    )
    options["prefix_reuse"] = not options.pop("no_prefix_reuse")
    for name in ("pending_timeout", "log_stats_interval", "drain_timeout", "watchdog"):
        options[f"{name}_s"] = options.pop(f"{name}_ms") / 1000
    engine = build_engine_config(package, options)
    return ApplianceConfig(engine=engine, defaults=defaults, **options)
