"""Two devices; skipped with fewer."""

import pytest

from ginfer.cuda.runtime.device import Device, device_count


def pytest_collection_modifyitems(items):
    """Everything here needs two GPUs."""
    skip = pytest.mark.skip(reason="fewer than two NVIDIA GPUs")
    for item in items:
        if "tests/multi_gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.multi_gpu)
            if device_count() < 2:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def devices():
    return [Device(0), Device(1)]
