"""The bar of a slow start: drawn on a terminal after a while, never elsewhere."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import time
from appliance.cli import load_bar
load_bar.PATIENCE_S = {patience}
with load_bar.LoadBar() as bar:
    bar("load", 1, 4)
    time.sleep(0.5)
    bar("prepare", 0, 1)
    time.sleep(0.3)
"""


def drawn(patience, on_terminal):
    """What a start of 0.8 s leaves on stderr."""
    command = [sys.executable, "-c", CODE.format(patience=patience)]
    if not on_terminal:
        return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, check=True).stderr.decode()
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, cwd=ROOT, stderr=slave, env=env) as process:
        os.close(slave)
        seen = b""
        try:
            while part := os.read(master, 1000):
                seen += part
        except OSError:  # how Linux reports that the other end is closed
            pass
    os.close(master)
    assert process.returncode == 0
    return seen.decode()


def test_a_slow_start_shows_its_stages():
    seen = drawn(0.0, on_terminal=True)
    assert "Loading" in seen
    assert "Preparing kernels" in seen


@pytest.mark.parametrize(("patience", "on_terminal"), [(60.0, True), (0.0, False)])
def test_nothing_is_drawn_before_or_off_a_terminal(patience, on_terminal):
    assert drawn(patience, on_terminal) == ""
