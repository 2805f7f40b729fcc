"""Command line options that several commands share, and the values that they build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from appliance.protocols.defaults import SamplingOverrides
from appliance.protocols.fields import EFFORTS
from ginfer.config import EngineConfig
from ginfer.engine.request import SamplingParams
from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PACKAGE = click.argument("package", type=click.Path(exists=True, dir_okay=False, path_type=Path))


def auto_count(value: str | int | None) -> int | None:
    """A count of at least 1, or None for 'auto'. Raises BadParameter."""
    if value in (None, "auto"):
        return None
    try:
        count = int(value or 0)
    except ValueError:
        count = 0
    if count < 1:
        raise click.BadParameter(f"{value!r} is neither a count above 0 nor 'auto'")
    return count


def stacked(*decorators: Decorator) -> Decorator:
    """One decorator that applies all, so that help lists them in this order."""

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


engine_options = stacked(
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        metavar="auto|cpu|cuda",
        help="Image that computes.",
    ),
    click.option(
        "--max-context",
        type=auto_count,
        metavar="N|auto",
        default="auto",
        show_default=True,
        help="Tokens per request, prompt and answer; auto: the model's own length.",
    ),
    click.option(
        "--kv-capacity",
        type=auto_count,
        metavar="N|auto",
        default="auto",
        show_default=True,
        help="Tokens of K/V for all requests together.",
    ),
    click.option(
        "--kv-elastic",
        is_flag=True,
        help="When idle, give K/V memory that holds nothing back to the system.",
    ),
    click.option(
        "--park-mib",
        type=int,
        default=EngineConfig.park_mib,
        show_default=True,
        metavar="N",
        help="Host memory for prefixes that leave the K/V memory, in MiB.",
    ),
    click.option(
        "--kv-dtype",
        default="bf16",
        show_default=True,
        metavar="bf16|int8",
        help="Storage of K/V; int8 halves it.",
    ),
    click.option(
        "--prefill-chunk",
        type=auto_count,
        default="auto",
        show_default=True,
        metavar="N|auto",
        help="Most prompt tokens per forward; a multiple of 64. Auto: 8192 on a GPU.",
    ),
    click.option(
        "--decode-gap-ms",
        type=int,
        default=EngineConfig.decode_gap_ms,
        show_default=True,
        metavar="N",
        help="Longest pause of decode that a prompt may cause.",
    ),
    click.option(
        "--tp",
        type=auto_count,
        default="auto",
        show_default=True,
        metavar="auto|1|2|4",
        help="GPUs that share the model. More than 1 is not available yet and refused.",
    ),
    click.option(
        "--tp-fallback",
        type=click.Choice(["reject"]),
        help="Want the degree of --tp exactly.",
    ),
    click.option(
        "--spec",
        default="auto",
        show_default=True,
        metavar="auto|none",
        help="Speculation: auto where it pays, or none; the same answers.",
    ),
    click.option(
        "--draft-tokens",
        type=auto_count,
        metavar="N|auto",
        default="auto",
        show_default=True,
        help="Most drafts of a request and round.",
    ),
    click.option("--threads", type=int, metavar="N", help="CPU threads.  [default: all cores]"),
    click.option(
        "--no-cuda-graph",
        "cuda_graphs",
        is_flag=True,
        flag_value=False,
        default=True,
        help="Launch rounds kernel by kernel: slower, the same tokens.",
    ),
    click.option("--verify", is_flag=True, help="Check every digest of the package first."),
)

sampling_options = stacked(
    click.option("--greedy", is_flag=True, help="Always the best token: temperature 0."),
    *(
        click.option(f"--{name}", type=kind, metavar=metavar, help=text)
        for name, kind, metavar, text in (
            ("temperature", float, "X", "0 to 2.  [default: the model's preset, for all of these]"),
            ("top-p", float, "X", "0 to 1."),
            ("top-k", int, "N", "0: no limit."),
            ("min-p", float, "X", "0 to 1."),
            ("presence-penalty", float, "X", "-2 to 2."),
            ("frequency-penalty", float, "X", "-2 to 2."),
            ("seed", int, "N", "Repeatable draws.  [default: fresh for each request]"),
        )
    ),
)

thinking_options = stacked(
    click.option("--no-thinking", is_flag=True, help="Answer without reasoning first."),
    click.option(
        "--reasoning-effort",
        type=click.Choice(EFFORTS[1:]),
        help="How much to reason; the nearest level that the model knows.",
    ),
)


def build_engine_config(package: Path, options: dict[str, Any]) -> EngineConfig:
    """The engine's configuration; takes its options out of `options`. Raises ConfigError."""
    names = EngineConfig.__dataclass_fields__
    chosen = {name: options.pop(name) for name in list(options) if name in names}
    if options.pop("tp_fallback") and chosen["tp"] is None:
        raise ConfigError("tp_fallback needs an exact --tp", param="tp_fallback")
    return EngineConfig(package=package, **chosen)


def build_sampling(options: dict[str, Any]) -> SamplingOverrides:
    """The sampling wishes; takes their options out of `options`. Raises RequestError for a value
    out of range."""
    names = SamplingOverrides.__dataclass_fields__
    chosen = {name: options.pop(name) for name in list(options) if name in names}
    if options.pop("greedy"):
        if chosen["temperature"] is not None:
            raise click.UsageError("--greedy excludes --temperature")
        chosen["temperature"] = 0.0
    SamplingParams(**{name: value for name, value in chosen.items() if value is not None})
    return SamplingOverrides(**chosen)


def check_thinking(options: dict[str, Any]) -> None:
    """--no-thinking excludes --reasoning-effort."""
    if options["no_thinking"] and options["reasoning_effort"]:
        raise click.UsageError("--no-thinking excludes --reasoning-effort")
