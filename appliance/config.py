"""ApplianceConfig: every option of the server, validated once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from appliance.protocols.defaults import ServerDefaults
from ginfer.engine.request import SamplingParams
from ginfer.errors import ConfigError, RequestError
from ginfer.sizes import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from ginfer.config import EngineConfig

LOG_FORMATS = ("text", "json")
KEEPALIVE_S = 9.0
KEEPALIVE_MAX_S = 10.0  # promised to clients; the shortest known watchdog is 20 s


@dataclass(frozen=True, kw_only=True)
class ApplianceConfig:
    """Options of one server. Raises ConfigError naming the field, the value and what is legal.

    port: 0 = any free one. api_keys: empty = no authentication. model_id: the served id, None =
    the package's own. defaults: what requests leave open. request_timeout_s: for a request to
    arrive whole. response_timeout_s: for an answer that is not streamed. send_timeout_s: a reader
    that takes nothing for so long is dropped. drain_timeout_s: what running requests get when the
    server stops. watchdog_s: an engine that shows no life, or runs no round while requests wait,
    for so long is started anew. request_log: file of one JSON object per event, None = off; it
    rotates at request_log_max_mib and keeps request_log_files old files. log_stats_interval_s:
    between two throughput lines, 0 = none. response_store_max_records, response_store_max_mib:
    bounds of the stored responses. state_dir: folder of what outlives the server, None = the
    user's.
    """

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_keys_file: Path | None = None
    model_id: str | None = None
    defaults: ServerDefaults = field(default_factory=ServerDefaults)
    max_request_mib: int = 384
    cors: bool = False
    keepalive_s: float = KEEPALIVE_S
    request_timeout_s: float = 60.0
    response_timeout_s: float = 7200.0
    send_timeout_s: float = 300.0
    drain_timeout_s: float = 30.0
    watchdog_s: float = 60.0
    request_log: Path | None = None
    request_log_max_mib: int = 64
    request_log_files: int = 8
    log_format: str = "text"
    log_stats_interval_s: float = 5.0
    response_store_max_records: int = 1024
    response_store_max_mib: int = 256
    state_dir: Path | None = None

    def __post_init__(self) -> None:
        self._within("port", self.port, 0, 65535)
        self._within("default_max_tokens", self.defaults.max_tokens, 1, 1 << 30)
        self._within("max_request_mib", self.max_request_mib, 1, 1 << 14)
        self._within("keepalive_s", self.keepalive_s, 0.05, KEEPALIVE_MAX_S)
        self._within("drain_timeout_s", self.drain_timeout_s, 0, 3600)
        self._within("watchdog_s", self.watchdog_s, 0.5, 3600)
        self._within("request_log_max_mib", self.request_log_max_mib, 1, 1 << 14)
        self._within("request_log_files", self.request_log_files, 0, 100)
        self._within("response_store_max_records", self.response_store_max_records, 1, 1 << 20)
        self._within("response_store_max_mib", self.response_store_max_mib, 1, 1 << 14)
        self._within("log_stats_interval_s", self.log_stats_interval_s, 0, 3600)
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(
                f"log_format is {self.log_format!r}; legal: {', '.join(LOG_FORMATS)}",
                param="log_format",
            )
        for name in ("request_timeout_s", "response_timeout_s", "send_timeout_s"):
            self._within(name, getattr(self, name), 0.1, 1e6)
        if not self.host:
            raise ConfigError("host is empty; give an address such as 127.0.0.1", param="host")
        if self.model_id == "":
            raise ConfigError("model_id is empty; give a name or leave it out", param="model_id")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("an api_key is empty or not printable ASCII", param="api_keys")
        self._check_sampling()

    @property
    def max_request_nbytes(self) -> int:
        """Largest request body in bytes."""
        return self.max_request_mib * MIB

    def _check_sampling(self) -> None:
        given = {k: v for k, v in asdict(self.defaults.sampling).items() if v is not None}
        try:
            SamplingParams(**given)
        except RequestError as error:
            raise ConfigError(error.message, param=error.param) from None

    def _within(self, name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}; legal: {low} to {high}", param=name)
