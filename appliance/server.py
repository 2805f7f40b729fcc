"""serve: the bridge, the application and the signals of one server."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sanic.server.loop import try_use_uvloop

from appliance import logs
from appliance.app import create_app
from appliance.auth import KeyRing
from appliance.bridge import EngineBridge
from appliance.connections import BoundedProtocol, allow_connections
from appliance.reports import report_start, report_throughput
from ginfer.errors import ConfigError
from ginfer.sizes import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.app import App
    from appliance.config import ApplianceConfig

logger = logging.getLogger(__name__)

BACKLOG = 256
ACCEPTS = 16  # taken in one go, before the first of them can be refused
SEND_BUFFER_NBYTES = 256 * KIB  # what a slow reader leaves unread merges here, not in the kernel
SWITCH_INTERVAL_S = 0.0005  # preparing threads give way to the event loop within this time
FAREWELL_S = 5.0  # for the last events of requests that the drain cut off


def serve(config: ApplianceConfig, echo: Callable[[str], None] | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then drain and return; a second signal skips the draining.

    echo: takes lines for the operator; they go to stderr by default. Raises ConfigError for a busy
    or impossible address, and what the engine raises when it cannot start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try_use_uvloop()
    with logs.to_stderr(config.log_format):
        if config.log_format == "json":
            echo = logger.info
        asyncio.run(_Server(config, echo or _print).run())


class _Server:
    """One run of the server."""

    def __init__(self, config: ApplianceConfig, echo: Callable[[str], None]) -> None:
        self._config = config
        self._echo = echo
        self._signals: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> None:
        """Listen first, so that probes see the engine start; end with the first signal."""
        with _bind(self._config.host, self._config.port) as sock:
            bridge = EngineBridge(
                self._config.engine,
                self._echo,
                watchdog_s=self._config.watchdog_s,
                log_format=self._config.log_format,
            )
            app = create_app(bridge, self._config)
            app.ctx.max_connections = allow_connections()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._signals.put_nowait, number)
            loop.add_signal_handler(signal.SIGHUP, self._reload, app)
            http = await _listen(app, sock)
            try:
                await self._serve(app, bridge, sock)
            finally:
                await self._stop(app, bridge, http)

    async def _serve(self, app: App, bridge: EngineBridge, sock: socket.socket) -> None:
        """Run until a signal comes. Raises what the engine raises when it cannot start."""
        signalled = asyncio.ensure_future(self._signals.get())
        bridge.start()
        ready = asyncio.ensure_future(bridge.wait_ready())
        reports: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({signalled, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                info = ready.result()
                self._echo(
                    f"serving {app.ctx.model_id} at {_url(sock)} "
                    f"({info.backend}, context {info.max_context}, "
                    f"{info.max_concurrency} at once)"
                )
                await report_start(app.ctx)
                gc.collect()
                gc.freeze()  # a full collection would halt the event loop to walk what stays anyway
                if self._config.log_stats_interval_s:
                    reports = asyncio.ensure_future(report_throughput(app.ctx))
                await signalled
        finally:
            for task in (signalled, ready, reports):
                if task is not None:
                    task.cancel()

    def _reload(self, app: App) -> None:
        """Read the file of keys anew; one that is wrong changes nothing."""
        try:
            app.ctx.keys = KeyRing.load(self._config)
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error.message)
        else:
            logger.info("%d API keys are in force", len(app.ctx.keys))

    async def _stop(self, app: App, bridge: EngineBridge, http: Any) -> None:
        """Take no more, let running requests finish until the deadline or another signal."""
        context = app.ctx
        context.stopping = True
        closed = http.close()
        if context.http_stats.active:
            self._echo(f"stopping; waiting for {context.http_stats.active} running requests")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                while context.http_stats.active and self._signals.empty():
                    await asyncio.sleep(0.02)
        await bridge.close()
        await _close_connections(http)
        await http.before_stop()
        await closed
        await http.after_stop()
        context.close()


def _print(line: str) -> None:
    print(f"ginfer: {line}", file=sys.stderr, flush=True)


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError in one line."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}", param="host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port",
            param="port",
        ) from None
    return sock


def _url(sock: socket.socket) -> str:
    """What a client on this machine types."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _listen(app: App, sock: socket.socket) -> Any:
    """Start the application on a bound socket."""
    http: Any = await app.create_server(
        sock=sock,
        backlog=ACCEPTS,
        protocol=BoundedProtocol,
        asyncio_server_kwargs={"start_serving": False},
    )
    await http.startup()
    await http.before_start()
    await http.start_serving()
    sock.listen(BACKLOG)  # asyncio takes one number for both
    await http.after_start()
    return http


async def _close_connections(http: Any) -> None:
    """Close idle connections at once, busy ones when their last event is out or time is up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            while http.connections:
                for connection in list(http.connections):
                    connection.close_if_idle()
                await asyncio.sleep(0.02)
    for connection in list(http.connections):
        connection.abort()
    await asyncio.sleep(0)
