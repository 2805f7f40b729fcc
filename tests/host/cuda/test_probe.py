"""Why the CUDA image cannot serve: one line with what is there, what is needed, and the remedy."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda.bindings import driver

from ginfer.config import EngineConfig
from ginfer.cuda.runtime import probe
from ginfer.engine.backends import open_backend
from ginfer.errors import ConfigError, DeviceError
from ginfer.models.qwen import QWEN_DEMO
from tests.host.cuda.emulated_device import Device

OK = driver.CUresult.CUDA_SUCCESS


@pytest.fixture
def machine(monkeypatch):
    """machine(count, driver version, capability): a machine that has these."""

    def have(count=1, version=13_000, capability=(9, 0)):
        found = type("Found", (Device,), {"info": replace(Device.info, capability=capability)})
        versions = SimpleNamespace(cuDriverGetVersion=lambda: (OK, version))
        monkeypatch.setattr(probe, "device_count", lambda: count)
        monkeypatch.setattr(probe, "driver", versions)
        monkeypatch.setattr(probe, "Device", found)

    return have


def test_a_machine_that_can_serve_is_not_refused(machine):
    machine()
    assert probe.refusal() == ""


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"count": 0}, r"no NVIDIA GPU .* use backend cpu"),
        ({"version": 12_040}, r"driver is for CUDA 12\.4, the kernels need 13\.0; update"),
        ({"capability": (7, 5)}, r"the GPU is sm_75; there are kernels for sm_80, .* sm_120a"),
    ],
)
def test_what_is_missing_is_named_in_one_line(machine, facts, says):
    machine(**facts)
    config = EngineConfig(package=Path("p"), backend="cuda")
    with pytest.raises(ConfigError, match=says) as caught:
        open_backend(config, QWEN_DEMO.spec)
    assert caught.value.param == "backend"
    assert "\n" not in str(caught.value)
    automatic = open_backend(replace(config, backend="auto"), QWEN_DEMO.spec)
    assert automatic.name == "cpu"
    automatic.close()


def test_a_driver_that_does_not_start_is_named(machine, monkeypatch):
    machine()

    def broken():
        raise DeviceError("cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (other version)")

    monkeypatch.setattr(probe, "device_count", broken)
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in probe.refusal()
