"""Every property test draws the same examples on every machine; --backend for engines."""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.load_profile("fixed")


def pytest_addoption(parser):
    """--backend NAME: what the engines of tests/models and tests/service run on."""
    parser.addoption("--backend", choices=("auto", "cpu", "cuda"), default="cpu")


def pytest_configure(config):
    """Tell those that open engines, which may be other processes."""
    os.environ["GINFER_TEST_BACKEND"] = config.getoption("--backend")
