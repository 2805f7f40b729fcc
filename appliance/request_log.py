"""Request log: one JSON object per line in a file that rotates; no prompts, no output, no keys."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import orjson

from appliance.line_writer import LineWriter
from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

ARTIFACT_TYPE = "ginfer_request_log"
SCHEMA_VERSION = 1
PARAM = "request_log"
TAIL_NBYTES = 1 << 20  # the longest line that a start repairs


class RotatingFile:
    """Appends whole lines to `path`; when it would exceed `max_nbytes`, it becomes `path`.1, the
    older ones move up, and those above `num_old` go. One process at a time writes it.

    Raises ConfigError when the path cannot be written, is the package, or is in use."""

    def __init__(self, path: Path, *, max_nbytes: int, num_old: int, package: Path) -> None:
        self._path, self._max_nbytes, self._num_old = path, max_nbytes, num_old
        for target in (path, *map(self._old, range(1, num_old + 1))):
            if _same(target, package):
                raise ConfigError(
                    f"the request log {path} would overwrite the package {package}", param=PARAM
                )
        try:
            self._open()
            self._repair()
        except BlockingIOError:
            raise ConfigError(
                f"the request log {path} is in use by another server", param=PARAM
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot write the request log {path}: {error.strerror}", param=PARAM
            ) from None

    def write(self, lines: Sequence[bytes]) -> None:
        """Append lines, each in one piece. Raises OSError."""
        batch: list[bytes] = []
        nbytes = self._nbytes
        for line in lines:
            if nbytes and nbytes + len(line) > self._max_nbytes:
                self._append(batch)
                self._rotate()
                batch, nbytes = [], 0
            batch.append(line)
            nbytes += len(line)
        self._append(batch)

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._nbytes = os.fstat(file).st_size
        except OSError:
            os.close(file)
            raise
        self._file = file

    def _repair(self) -> None:
        """Cut off a line that a killed writer left unfinished."""
        start = max(0, self._nbytes - TAIL_NBYTES)
        tail = os.pread(self._file, TAIL_NBYTES, start)
        end = start + tail.rfind(b"\n") + 1
        if self._nbytes > end:
            os.ftruncate(self._file, end)
            self._nbytes = end

    def _append(self, batch: list[bytes]) -> None:
        data = b"".join(batch)
        try:
            while data:
                written = os.write(self._file, data)
                data = data[written:]
        except OSError:  # the disk is full: take back half a line
            with suppress(OSError):
                os.ftruncate(self._file, self._nbytes)
            raise
        self._nbytes += sum(map(len, batch))

    def _rotate(self) -> None:
        for number in range(self._num_old, 0, -1):
            source = self._old(number - 1)
            with suppress(FileNotFoundError):
                os.replace(source, self._old(number))
        if self._num_old == 0:
            os.unlink(self._path)
        full = self._file
        self._open()
        os.close(full)

    def _old(self, number: int) -> Path:
        """`number` rotations ago; 0 is the file itself."""
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


def _same(path: Path, package: Path) -> bool:
    """Whether writing `path` would touch the package, through links too."""
    if path.resolve() == package.resolve():
        return True
    return path.exists() and package.exists() and os.path.samefile(path, package)


class RequestLog:
    """Events of one server; does nothing without a file. `write` never waits for the disk."""

    def __init__(self, file: RotatingFile | None = None) -> None:
        self.instance_id = token_hex(8)
        self._file = file
        self._writer = LineWriter(file.write, on_error=_tell) if file else None

    @property
    def enabled(self) -> bool:
        """Whether anything is written."""
        return self._writer is not None

    @property
    def num_dropped(self) -> int:
        """Lines lost to a disk that is slow or full."""
        return self._writer.num_dropped if self._writer else 0

    def write(self, event: str, **members: Any) -> None:
        """Append one event."""
        if self._writer is None:
            return
        line = {
            "artifact_type": ARTIFACT_TYPE,
            "schema_version": SCHEMA_VERSION,
            "event": event,
            "timestamp_unix_ms": time.time_ns() // 1_000_000,
            "server_instance_id": self.instance_id,
            **members,
        }
        self._writer.put(orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Write what is queued and let the file go."""
        if self._writer is not None and self._file is not None:
            self._writer.close()
            if self._writer.flush(0):
                self._file.close()


def _tell(error: OSError) -> None:
    logger.error("the request log cannot be written: %s; lines are lost", error.strerror)
