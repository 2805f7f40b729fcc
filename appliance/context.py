"""What the routes share: the engine, the configuration, the frontend, the counters."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from appliance.admission import Admission
from appliance.auth import KeyRing
from appliance.connections import MAX_CONNECTIONS
from appliance.instance_key import instance_key, state_folder
from appliance.metrics import HttpStats
from appliance.protocols.thinking_signature import ThinkingSigner
from appliance.request_log import RequestLog, RotatingFile
from appliance.response_memory import ResponseMemory
from appliance.response_store import ResponseStore
from ginfer.artifact import Package
from ginfer.errors import UnavailableError
from ginfer.frontend.registry import open_frontend
from ginfer.sizes import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from appliance.config import ApplianceConfig
    from appliance.engine_client import EngineClient

    T = TypeVar("T")

INLINE_NBYTES = 8 << 10  # smaller requests are prepared at once: under a millisecond
PREPARE_THREADS = 2
BODY_BUDGET = 2  # largest bodies that may be in memory before the queue


class ServerContext:
    """State of one server; `app.ctx` of its Sanic app. Raises ArtifactError when the package cannot
    be used, ConfigError when the request log or the file of keys cannot."""

    def __init__(self, client: EngineClient, config: ApplianceConfig) -> None:
        self.client = client
        self.config = config
        with Package.open(config.engine.package) as package:
            resources = {name: package.resource(name) for name in package.resources}
            self.frontend = open_frontend(package.identity.model_id, resources)
            self.model_id = config.model_id or package.identity.model_id
        self.keys = KeyRing.load(config)
        self.request_log = open_request_log(config)
        key = instance_key(state_folder(config.state_dir))
        self.signer = ThinkingSigner(key)
        self.responses = ResponseMemory(
            ResponseStore(config.response_store_max_records, config.response_store_max_mib * MIB),
            key,
        )
        self.created = int(time.time())
        self.admission = Admission(
            num_places=config.engine.max_concurrency + config.engine.max_pending,
            max_nbytes=BODY_BUDGET * config.max_request_nbytes,
        )
        self.http_stats = HttpStats()
        self.max_connections = MAX_CONNECTIONS
        self.stopping = False
        self._executor = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")

    @property
    def unready_reason(self) -> str | None:
        """Why requests are refused now; None when they are not."""
        if self.stopping:
            return "the server is stopping"
        return None if self.client.state.ready else self.client.state.reason

    def check_ready(self) -> None:
        """Raise UnavailableError, with the reason, unless requests are taken."""
        if (reason := self.unready_reason) is not None:
            raise UnavailableError(reason)

    async def prepare(self, work: Callable[[bytes], T], body: bytes, long: bytes = b"") -> T:
        """Run `work(body)`, away from the event loop when the body is long or holds `long`, which
        stands for more than it says."""
        if len(body) <= INLINE_NBYTES and not (long and long in body):
            return work(body)
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, body)

    def close(self) -> None:
        """Let the preparing threads go and finish the request log."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.request_log.close()


def open_request_log(config: ApplianceConfig) -> RequestLog:
    """The request log that the configuration wants. Raises ConfigError."""
    if config.request_log is None:
        return RequestLog()
    return RequestLog(
        RotatingFile(
            config.request_log,
            max_nbytes=config.request_log_max_mib * MIB,
            num_old=config.request_log_files,
            package=config.engine.package,
        )
    )
