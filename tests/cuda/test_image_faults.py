"""Loading images on a device, and faults that cost the context, each in its own process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ginfer.cuda.runtime.image import Image
from ginfer.cuda.runtime.manifest import cubin_path, image_folder, read_manifest
from ginfer.errors import ConfigError, DeviceError, InternalError
from tests.cuda.kernels import double_kernel, scale_kernel

ROOT = Path(__file__).resolve().parents[2]
PROLOGUE = """
from ginfer.cuda.runtime.device import Device
from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.jit import SealedError, seal
from ginfer.cuda.runtime.stream import Stream
from ginfer.errors import DeviceError
from tests.cuda.kernels import fault_kernel, meet_kernel, scale_kernel
device = Device()
cc = device.info.capability
items = [fault_kernel(), scale_kernel(256, 3)]
image = Image.open(native_capability(cc), items, device_capability=cc)
stream = Stream()
"""


def run(code, **environment):
    """Run code behind the prologue in a new process; returns its output."""
    command = [sys.executable, "-c", PROLOGUE + code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FAULT = """
image.launch(scale_kernel(256, 3), (1,), stream, 0, 0, 0)
try:
    image.launch(fault_kernel(), (1,), stream, 8)
    print("launched")
    stream.synchronize()
except DeviceError as error:
    print(error, error.context_lost, error.code)
try:
    Stream()
except DeviceError as error:
    print(error.context_lost)
"""


def test_a_fault_surfaces_with_the_last_launches():
    first, error, later = run(FAULT).splitlines()
    assert first == "launched"
    assert error.startswith(
        "cuStreamSynchronize after fault(), scale(256, 3): CUDA_ERROR_ILLEGAL_ADDRESS"
    )
    assert error.endswith("True device_error")
    assert later == "True"


def test_with_launch_check_a_fault_surfaces_at_its_kernel():
    error, later = run(FAULT, GINFER_LAUNCH_CHECK="1").splitlines()
    assert error.startswith("cuStreamSynchronize after fault(), ")
    assert later == "True"


def test_after_seal_nothing_is_loaded_and_what_is_loaded_works():
    code = """
seal()
image.load(items)  # nothing new
try:
    image.load([meet_kernel()])
except SealedError as error:
    print(error)
image.launch(scale_kernel(256, 3), (1,), stream, 0, 0, 0)
stream.synchronize()
print("works")
"""
    refusal, last = run(code).splitlines()
    assert refusal.startswith("kernel meet() was to be loaded after the kernel images had been")
    assert last == "works"


def test_an_image_of_another_capability_is_refused(device, capability):
    other = "80" if capability != "80" else "86"
    with pytest.raises(ConfigError, match=f"run: ginfer image build --sm {capability}"):
        Image.open(other, [], device_capability=device.info.capability)


def test_a_kernel_that_was_not_loaded_is_named(image):
    with pytest.raises(InternalError, match=r"double\(\) is not in the loaded image"):
        image[double_kernel()]


def test_a_damaged_cubin_is_refused_by_name(device, capability, tmp_path, monkeypatch):
    item = scale_kernel(256, 3)
    shutil.copytree(image_folder(capability), tmp_path / "images" / f"sm_{capability}")
    monkeypatch.setenv("GINFER_CACHE_DIR", str(tmp_path))
    folder = image_folder(capability)
    record = read_manifest(folder)[item.source(capability)]
    cubin_path(folder, record).write_bytes(b"\x7fELF and nothing else")
    with pytest.raises(DeviceError, match=r"load scale\(256, 3\): CUDA_ERROR_INVALID_IMAGE"):
        Image.open(capability, [item], device_capability=device.info.capability)
