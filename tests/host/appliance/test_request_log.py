"""Whole lines, bounded files, no waiting, nothing overwritten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from appliance.line_writer import LineWriter
from appliance.reports import redacted
from appliance.request_log import RequestLog, RotatingFile
from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]


def _file(path: Path, **options: Any) -> RotatingFile:
    defaults: dict[str, Any] = {"max_nbytes": 1000, "num_old": 2, "package": Path("p.ginfer")}
    return RotatingFile(path, **defaults | options)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_the_file_rotates_at_its_size_and_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = _file(path)
    for i in range(100):
        file.write([b"%099d\n" % i])
    file.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    kept = [int(x) for name in ("log.2", "log.1", "log") for x in _lines(tmp_path / name)]
    assert kept == list(range(70, 100))
    assert path.stat().st_mode & 0o777 == 0o600


def test_one_batch_may_fill_many_files_and_none_may_be_kept(tmp_path: Path) -> None:
    file = _file(tmp_path / "log", num_old=0)
    file.write([b"%099d\n" % i for i in range(25)] + [b"x" * 5000 + b"\n"])
    file.close()
    assert [p.name for p in tmp_path.iterdir()] == ["log"]
    assert _lines(tmp_path / "log") == [b"x" * 5000 + b"\n"]


@pytest.mark.parametrize(("left", "kept"), [(b"a\nhal", b"a\n"), (b"half", b""), (b"a\n", b"a\n")])
def test_an_unfinished_line_is_cut_off(tmp_path: Path, left: bytes, kept: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(left)
    file = _file(path)
    file.write([b"b\n"])
    file.close()
    assert path.read_bytes() == kept + b"b\n"


def test_the_package_is_not_overwritten_whatever_it_is_called(tmp_path: Path) -> None:
    package = tmp_path / "m.ginfer"
    package.write_bytes(b"weights")
    (tmp_path / "hard").hardlink_to(package)
    (tmp_path / "soft").symlink_to(package)
    (tmp_path / "log.2").hardlink_to(package)
    for name in ("m.ginfer", "hard", "soft", "log", "../" + tmp_path.name + "/m.ginfer"):
        with pytest.raises(ConfigError, match="overwrite") as caught:
            _file(tmp_path / name, package=package)
        assert caught.value.param == "request_log"
    assert package.read_bytes() == b"weights"
    assert not (tmp_path / "log").exists()


def test_a_path_that_cannot_be_written_or_is_in_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        _file(tmp_path / "none" / "log")
    with pytest.raises(ConfigError, match="directory"):
        _file(tmp_path)
    first = _file(tmp_path / "log")
    with pytest.raises(ConfigError, match="in use"):
        _file(tmp_path / "log")
    first.close()
    _file(tmp_path / "log").close()


def test_a_slow_medium_delays_nobody_and_drops_are_counted() -> None:
    gate, written = threading.Event(), list[bytes]()

    def write(lines: Sequence[bytes]) -> None:
        gate.wait(60)
        written.extend(lines)

    writer = LineWriter(write, max_nbytes=1000)
    began = time.monotonic()
    for _ in range(1000):
        writer.put(b"x" * 99 + b"\n")
    assert time.monotonic() - began < 5
    assert not writer.flush(0)
    gate.set()
    writer.close(60)
    assert writer.num_dropped + len(written) == 1000
    assert 10 <= len(written) <= 20


def test_a_full_disk_costs_lines_and_is_told_once() -> None:
    told, broken = list[str](), [True]

    def write(_lines: Sequence[bytes]) -> None:
        if broken[0]:
            raise OSError(28, "No space left on device")

    writer = LineWriter(write, on_error=lambda error: told.append(str(error)))
    for _ in range(3):
        writer.put(b"x\n")
        assert writer.flush(60)
    broken[0] = False
    writer.put(b"x\n")
    writer.close(60)
    assert writer.num_dropped == 3
    assert len(told) == 1


def test_events_are_complete_and_keys_are_not_in_the_command_line(tmp_path: Path) -> None:
    log = RequestLog(_file(tmp_path / "log"))
    log.write("server_start", argv=redacted(["x", "--api-key", "k1", "--api-key=k2", "--port"]))
    log.close()
    (line,) = map(orjson.loads, _lines(tmp_path / "log"))
    assert line.pop("timestamp_unix_ms") > 1.7e12
    assert line == {
        "artifact_type": "ginfer_request_log",
        "schema_version": 1,
        "event": "server_start",
        "server_instance_id": log.instance_id,
        "argv": ["x", "--api-key", "***", "--api-key=***", "--port"],
    }


WRITE = """
import sys
from pathlib import Path
from appliance.request_log import RequestLog, RotatingFile
file = RotatingFile(Path(sys.argv[1]), max_nbytes=100_000, num_old=3, package=Path("none"))
log = RequestLog(file)
print("ready", flush=True)
i = 0
while True:
    log.write("x", number=i, more="y" * (i % 700))
    i += 1
"""


def test_kill_9_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for life in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, str(path)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while not (tmp_path / "log.1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05 * life)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    _file(path).close()
    for file in tmp_path.iterdir():
        for line in _lines(file):
            assert orjson.loads(line)["event"] == "x"
