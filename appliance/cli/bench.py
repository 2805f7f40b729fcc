"""`ginfer bench PACKAGE`: decode and prefill speed of this machine, in this process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from appliance.cli.options import PACKAGE, build_engine_config, engine_options
from appliance.cli.run import open_engine
from ginfer.config import MAX_CONCURRENCY

if TYPE_CHECKING:
    from pathlib import Path

    from ginfer.engine.engine import Engine

ROWS = (1, 2, 4, 8)
COLUMNS = (
    f"{'context':>8}  {'rows':>4}  {'tokens/s':>9}  {'a round':>7}  {'round ms':>8}  {'host us':>8}"
)


@click.command()
@PACKAGE
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1024,),
    show_default=True,
    metavar="N",
    help="Tokens before those that are measured; repeatable.",
)
@click.option(
    "--rows",
    type=click.IntRange(1, MAX_CONCURRENCY),
    multiple=True,
    default=ROWS,
    show_default=True,
    metavar="N",
    help="Requests that decode together; repeatable.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens per request that are measured.",
)
@click.option(
    "--prefill",
    type=click.IntRange(min=0),
    default=1024,
    show_default=True,
    metavar="N",
    help="Prompt tokens of the prefill that is measured; 0: none.",
)
@engine_options
def command(package: Path, **options: Any) -> None:
    """Measure PACKAGE: tokens per second while requests decode together, and of one prefill.

    Contexts are not computed but copied from a short prompt, so that long ones take no time. A
    round gives each request one token and its accepted drafts. Host is what a round costs the
    processor apart from waiting for values.
    """
    contexts, rows, tokens, prefill = map(options.pop, ("contexts", "rows", "tokens", "prefill"))
    config = build_engine_config(package, {**options, "max_concurrency": max(rows)})
    with open_engine(config) as engine:
        info = engine.info
        click.echo(f"{info.model_id}, {info.weights_id}, backend {info.backend}")
        click.echo(COLUMNS)
        for context in contexts:
            for count in rows:
                click.echo(line(engine, context, count, tokens))
        if prefill:
            speed = import_module("ginfer").bench.measure_prefill(engine, prefill)
            click.echo(f"prefill of {prefill} tokens: {speed:.1f} tokens/s")


def line(engine: Engine, context: int, rows: int, tokens: int) -> str:
    """One line of the table. Raises ConfigError for what does not fit."""
    bench = import_module("ginfer").bench  # not imported above: --help does without the engine
    prompts = bench.histories(engine, rows, context, tokens)
    with bench.decoding(engine, prompts, tokens) as steady:
        return (
            f"{context:>8}  {rows:>4}  {steady.tokens_per_s:>9.1f}  "
            f"{steady.tokens_per_round:>7.2f}  {1e3 * steady.round_s:>8.2f}  "
            f"{1e6 * steady.host_s:>8.0f}"
        )
