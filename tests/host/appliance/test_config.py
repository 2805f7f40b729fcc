"""Options of the server are checked once, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.config import ApplianceConfig
from appliance.protocols.defaults import SamplingOverrides, ServerDefaults
from ginfer.config import EngineConfig
from ginfer.errors import ConfigError

ENGINE = EngineConfig(package=Path("p.ginfer"))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"port": 65536}, "port"),
        ({"port": -1}, "port"),
        ({"host": ""}, "host"),
        ({"model_id": ""}, "model_id"),
        ({"max_request_mib": 0}, "max_request_mib"),
        ({"keepalive_s": 10.1}, "keepalive_s"),
        ({"keepalive_s": 0}, "keepalive_s"),
        ({"send_timeout_s": float("nan")}, "send_timeout_s"),
        ({"watchdog_s": 0.1}, "watchdog_s"),
        ({"request_log_max_mib": 0}, "request_log_max_mib"),
        ({"request_log_files": -1}, "request_log_files"),
        ({"response_store_max_records": 0}, "response_store_max_records"),
        ({"response_store_max_mib": 0}, "response_store_max_mib"),
        ({"log_format": "xml"}, "log_format"),
        ({"log_stats_interval_s": -1}, "log_stats_interval_s"),
        ({"api_keys": ("good", "")}, "api_keys"),
        ({"api_keys": ("line\nbreak",)}, "api_keys"),
        ({"defaults": ServerDefaults(max_tokens=0)}, "default_max_tokens"),
        ({"defaults": ServerDefaults(sampling=SamplingOverrides(top_p=2))}, "top_p"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ApplianceConfig(engine=ENGINE, **options)
    assert caught.value.param == param
