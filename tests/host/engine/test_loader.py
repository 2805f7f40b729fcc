"""Loader: a package is bound to its contract, and every difference is reported at once."""

from __future__ import annotations

import dataclasses
import os

import pytest

from ginfer.engine.loader import open_package
from ginfer.errors import ArtifactError, ConfigError
from tests.engines import DEMO_PACKAGE
from tests.packages import IDENTITY, write_package


def nothing(stage, done, total):
    """Progress of nobody."""


def test_the_demo_package_has_what_its_contract_wants():
    seen = []
    bound = open_package(DEMO_PACKAGE, verify=True, progress=lambda *call: seen.append(call))
    with bound.package:
        assert bound.contract.model_id == "qwen3.8-demo"
        assert sorted(bound.resources()) == sorted(bound.contract.resources)
    stage, done, total = seen[-1]
    assert (stage, done) == ("verify", total)


def test_payloads_are_read_past_the_mapping_as_they_lie_in_it(tmp_path):
    path = tmp_path / "p.ginfer"
    path.write_bytes(DEMO_PACKAGE.read_bytes())
    bound = open_package(path, verify=False, progress=nothing)
    with bound.package:
        tensors = list(bound.weights())
        assert bound.weights_nbytes == sum(t.data.nbytes for t in tensors)
        for tensor in tensors[::20]:
            buffer = bytearray(min(1000, tensor.data.nbytes - 3))
            tensor.read(memoryview(buffer), 3)
            assert buffer == tensor.data[3 : 3 + len(buffer)].tobytes()
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(ArtifactError, match="was cut while it was read"):
            tensors[-1].read(memoryview(bytearray(1 << 20)), 0)


def test_every_difference_is_reported_at_once(tmp_path):
    path = write_package(tmp_path / "p.ginfer")
    with pytest.raises(ArtifactError) as caught:
        open_package(path, verify=False, progress=nothing)
    findings = [str(f) for f in caught.value.findings]
    assert len(findings) > 140
    for name in ("text/output_head", "text/final_norm", "vision/merger/fc2/bias", "scale"):
        assert any(name in finding for finding in findings), name
    assert "more)" in str(caught.value)


def test_an_unregistered_model_is_refused(tmp_path):
    identity = dataclasses.replace(IDENTITY, weights_id="nvfp4")
    path = write_package(tmp_path / "p.ginfer", identity=identity)
    with pytest.raises(ConfigError, match="nvfp4"):
        open_package(path, verify=False, progress=nothing)


def test_a_flipped_payload_bit_is_found_when_asked(tmp_path):
    data = bytearray(DEMO_PACKAGE.read_bytes())
    data[-1000] ^= 1
    path = tmp_path / "p.ginfer"
    path.write_bytes(data)
    open_package(path, verify=False, progress=nothing).package.close()
    with pytest.raises(ArtifactError, match="vision/"):
        open_package(path, verify=True, progress=nothing)
