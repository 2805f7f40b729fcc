"""What the server says of itself: how it was started, and now and then its throughput."""

from __future__ import annotations

import asyncio
import logging
import platform
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from appliance import logs
from ginfer import __version__
from ginfer.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.context import ServerContext

logger = logging.getLogger(__name__)

SECRET_OPTIONS = ("--api-key",)
SECRET_FIELDS = ("engine", "defaults", "api_keys")
PACKAGES = ("numpy", "numba", "sanic")


def redacted(argv: Sequence[str]) -> list[str]:
    """Arguments without the values of secret options."""
    shown: list[str] = []
    for i, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        if equals and name in SECRET_OPTIONS:
            word = f"{name}=***"
        elif i and argv[i - 1] in SECRET_OPTIONS:
            word = "***"
        shown.append(word)
    return shown


async def report_start(context: ServerContext) -> None:
    """Write server_start; the engine is ready."""
    info, config = context.client.info, context.config
    assert info is not None
    memory: dict[str, int] = {}
    with suppress(UnavailableError):  # lost again already
        memory = (await context.client.stats())["memory"]
    server = {k: v for k, v in vars(config).items() if k not in SECRET_FIELDS}
    context.request_log.write(
        "server_start",
        server=server | {"version": __version__, "num_keys": len(context.keys)},
        artifact={
            "package": config.engine.package.name,
            "model_id": info.model_id,
            "weights_id": info.weights_id,
            "package_digest": info.package_digest,
        },
        engine=vars(config.engine) | asdict(info),
        sampling_defaults=asdict(config.defaults),
        memory=memory,
        environment={
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: version(name) for name in PACKAGES},
        },
        argv=redacted(sys.argv),
    )


async def report_throughput(context: ServerContext) -> None:
    """Write throughput at every interval that was not idle, for ever."""
    interval_s = context.config.log_stats_interval_s
    before: Mapping[str, Any] | None = None
    clock = asyncio.get_running_loop().time
    then = clock()
    while True:
        await asyncio.sleep(interval_s)
        try:
            stats = await context.client.stats()
        except UnavailableError:
            before = None
            continue
        now = clock()
        if before is not None and _work(stats) != _work(before):
            line = _throughput(before, stats, now - then)
            context.request_log.write("throughput", **line)
            logs.event(logger, "throughput", "", **_flat(line))
        before, then = stats, now


def _work(stats: Mapping[str, Any]) -> tuple[int, int]:
    return stats["prefill_tokens"], stats["completion_tokens"]


def _throughput(
    before: Mapping[str, Any], stats: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    def grown(name: str) -> int:
        return int(stats[name] - before[name])

    def total(name: str) -> int:
        return int(sum(stats[name].values()) - sum(before[name].values()))

    rounds, row_rounds = grown("decode_rounds"), grown("row_rounds")
    drafted, accepted = total("drafted"), total("accepted")
    tokens = {
        "computed_prefill": grown("prefill_tokens"),
        "committed_decode": grown("completion_tokens"),
    }
    running, decoding = stats["running"], stats["decoding"]
    return {
        "interval_seconds": seconds,
        "tokens": tokens,
        "throughput_tokens_per_second": {k: v / seconds for k, v in tokens.items()},
        "scheduler": {
            "running": running,
            "prefilling": running - decoding,
            "decode_ready": decoding,
            "waiting": stats["waiting"],
        },
        "decode_batch": {
            "rounds": rounds,
            "row_rounds": row_rounds,
            "average_size": row_rounds / rounds if rounds else 0.0,
            "drafted": drafted,
            "accepted": accepted,
            "tokens_per_row_round": 1 + accepted / row_rounds if row_rounds else 0.0,
        },
    }


def _flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that an operator reads along."""
    speed = line["throughput_tokens_per_second"]
    return {
        "prefill_tok_s": round(speed["computed_prefill"], 1),
        "decode_tok_s": round(speed["committed_decode"], 1),
        "running": line["scheduler"]["running"],
        "waiting": line["scheduler"]["waiting"],
        "batch": round(line["decode_batch"]["average_size"], 2),
        "tokens_per_round": round(line["decode_batch"]["tokens_per_row_round"], 2),
    }
