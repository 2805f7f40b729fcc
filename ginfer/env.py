"""Every environment variable of the library: name, type, default, one line of help."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EnvVar:
    """One variable; `read` returns its text or the default."""

    name: str
    default: str
    help: str

    def read(self) -> str:
        """The value in the environment, else the default."""
        return os.environ.get(self.name, self.default)


CACHE_DIR = EnvVar(
    "GINFER_CACHE_DIR", "", "folder for compiled kernels; default: the user's cache folder"
)
THREADS = EnvVar("GINFER_THREADS", "", "threads of the CPU image; default: all cores")
DEMO_CHECKPOINT = EnvVar(
    "GINFER_DEMO_CHECKPOINT", "", "folder of the demo checkpoint; tests that need it run when set"
)
LAUNCH_CHECK = EnvVar(
    "GINFER_LAUNCH_CHECK", "", "1: wait after every kernel, so that a GPU fault names its kernel"
)
FAULT_FILE = EnvVar(
    "GINFER_FAULT_FILE",
    "",
    "test hook: once this file exists, the next selection removes it and fails as it says: "
    "'nan ROW' or 'trap'",
)

ALL = (CACHE_DIR, THREADS, DEMO_CHECKPOINT, LAUNCH_CHECK, FAULT_FILE)


class FaultFile:
    """The file that GINFER_FAULT_FILE names now."""

    def __init__(self) -> None:
        name = FAULT_FILE.read()
        self._path = Path(name) if name else None

    def take(self) -> tuple[str, int]:
        """(kind, row) that the file asks for, which is removed; ("", 0): none."""
        if self._path is None:
            return "", 0
        try:
            kind, _, row = self._path.read_text().partition(" ")
            self._path.unlink()
        except FileNotFoundError:
            return "", 0
        return kind, int(row or 0)


def cache_root() -> Path:
    """Folder of everything compiled: GINFER_CACHE_DIR, else below the user's cache folder. Raises
    RuntimeError when there is neither."""
    if configured := CACHE_DIR.read():
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ginfer"
