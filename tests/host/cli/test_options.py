"""Options of the command line arrive in the configuration under their documented defaults."""

from pathlib import Path

import click
import pytest

from appliance.cli.main import group
from appliance.cli.serve import build_config
from appliance.config import ApplianceConfig
from appliance.protocols.defaults import SamplingOverrides, ServerDefaults
from ginfer.config import EngineConfig
from ginfer.errors import ConfigError


def config_of(package, *args):
    """The server configuration of a command line."""
    command = group.get_command(None, "serve")
    with click.Context(command) as context:
        command.parse_args(context, [str(package), *args])
        options = dict(context.params)
        return build_config(options.pop("package"), options)


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "x.ginfer"
    path.touch()
    return path


def test_product_defaults(package):
    config = config_of(package)
    assert (config.host, config.port, config.api_keys) == ("127.0.0.1", 8000, ())
    assert config.engine == EngineConfig(package=package)
    assert (config.engine.max_concurrency, config.engine.max_pending) == (8, 16)
    assert config.engine.pending_timeout_s == 600
    assert config.engine.prefix_reuse
    assert config.defaults == ServerDefaults()
    assert not config.cors
    assert config == ApplianceConfig(engine=config.engine), "the options say what the class says"


CHANGES = [
    ("--max-context 512", "engine.max_context", 512),
    ("--kv-capacity 1024", "engine.kv_capacity", 1024),
    ("--kv-capacity auto", "engine.kv_capacity", None),
    ("--kv-elastic", "engine.kv_elastic", True),
    ("--park-mib 64", "engine.park_mib", 64),
    ("--prefill-chunk 128", "engine.prefill_chunk", 128),
    ("--decode-gap-ms 50", "engine.decode_gap_ms", 50),
    ("--max-concurrency 2", "engine.max_concurrency", 2),
    ("--max-pending-requests 3", "engine.max_pending", 3),
    ("--pending-timeout-ms 1500", "engine.pending_timeout_s", 1.5),
    ("--no-prefix-reuse", "engine.prefix_reuse", False),
    ("--tp 1 --tp-fallback reject", "engine.tp", 1),
    ("--spec none", "engine.spec", "none"),
    ("--draft-tokens 3", "engine.draft_tokens", 3),
    ("--threads 1", "engine.threads", 1),
    ("--no-cuda-graph", "engine.cuda_graphs", False),
    ("--backend cpu", "engine.backend", "cpu"),
    ("--verify", "engine.verify", True),
    ("--host 0.0.0.0", "host", "0.0.0.0"),
    ("--port 9", "port", 9),
    ("--api-key a --api-key b", "api_keys", ("a", "b")),
    ("--model-id m", "model_id", "m"),
    ("--max-request-mib 5", "max_request_mib", 5),
    ("--cors", "cors", True),
    (f"--api-keys-file {__file__}", "api_keys_file", Path(__file__)),
    ("--request-log-jsonl log", "request_log", Path("log")),
    ("--request-log-max-mib 2", "request_log_max_mib", 2),
    ("--request-log-files 3", "request_log_files", 3),
    ("--response-store-max-records 5", "response_store_max_records", 5),
    ("--response-store-max-mib 6", "response_store_max_mib", 6),
    ("--state-dir state", "state_dir", Path("state")),
    ("--log-format json", "log_format", "json"),
    ("--log-stats-interval-ms 0", "log_stats_interval_s", 0),
    ("--drain-timeout-ms 500", "drain_timeout_s", 0.5),
    ("--watchdog-ms 2500", "watchdog_s", 2.5),
    ("--default-max-tokens 5", "defaults.max_tokens", 5),
    ("--no-thinking", "defaults.thinking", False),
    ("--reasoning-effort low", "defaults.effort", "low"),
    ("--no-preserve-thinking", "defaults.preserve_thinking", False),
    ("--no-canonical-headers", "defaults.canonical_headers", False),
    ("--greedy", "defaults.sampling", SamplingOverrides(temperature=0.0)),
    ("--seed 5 --top-k 3", "defaults.sampling", SamplingOverrides(seed=5, top_k=3)),
    (
        "--temperature .5 --top-p .4 --min-p .1 --presence-penalty 1 --frequency-penalty -1",
        "defaults.sampling",
        SamplingOverrides(
            temperature=0.5, top_p=0.4, min_p=0.1, presence_penalty=1, frequency_penalty=-1
        ),
    ),
]


@pytest.mark.parametrize(("args", "path", "expected"), CHANGES)
def test_option_arrives(package, args, path, expected):
    found = config_of(package, *args.split())
    default = config_of(package)
    for name in path.split("."):
        found, default = getattr(found, name), getattr(default, name)
    assert found == expected
    assert found != default or expected is None


def test_every_option_of_serve_is_tried(package):
    tried = {word for args, *_ in CHANGES for word in args.split() if word.startswith("--")}
    options = {o for p in group.get_command(None, "serve").params for o in p.opts}
    assert options - {"package", "--preserve-thinking", "--kv-dtype"} <= tried
    assert config_of(package, "--preserve-thinking").defaults.preserve_thinking
    assert config_of(package, "--kv-dtype", "int8").engine.kv_dtype == "int8"


@pytest.mark.parametrize("tp", ["2", "4"])
def test_absent_degrees_are_refused(package, tp):
    with pytest.raises(ConfigError, match=f"tp is {tp}"):
        config_of(package, "--tp", tp)
