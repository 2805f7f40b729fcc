"""GET /metrics: counters in Prometheus' text format."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sanic import Blueprint
from sanic.response import text

from appliance.metrics import CONTENT_TYPE, COUNTER, GAUGE, number, render_engine
from ginfer.errors import UnavailableError

if TYPE_CHECKING:
    from sanic import Request
    from sanic.response import HTTPResponse

    from appliance.app import App

blueprint = Blueprint("metrics")


@blueprint.get("/metrics")
async def metrics(request: Request[App, Any]) -> HTTPResponse:
    """The server's counters always, the engine's while it is ready."""
    context = request.app.ctx
    lines = [*number("ginfer_ready", context.unready_reason is None, GAUGE)]
    lines += number("ginfer_tasks", len(asyncio.all_tasks()), GAUGE)
    lines += number("ginfer_engine_restarts_total", context.client.num_restarts, COUNTER)
    lines += number("ginfer_request_log_dropped_total", context.request_log.num_dropped, COUNTER)
    store = context.responses.store
    lines += number("ginfer_stored_responses", len(store), GAUGE)
    lines += number("ginfer_stored_responses_bytes", store.nbytes, GAUGE)
    lines += context.http_stats.render()
    with suppress(UnavailableError):  # ginfer_ready says so
        lines += render_engine(await context.client.stats())
    return text("\n".join(lines) + "\n", content_type=CONTENT_TYPE)
