"""The secret of a server: what it signs and seals with, kept over restarts."""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

from platformdirs import user_state_path

from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

KEY_NBYTES = 32
FILE = "instance.key"


def state_folder(configured: Path | None) -> Path:
    """Where the server keeps what must outlive it: the configured folder, else the user's."""
    return configured or user_state_path("ginfer")


def instance_key(folder: Path) -> bytes:
    """The key in `folder`, made at the first start, readable by its owner alone; a folder that
    cannot be written makes the key last as long as the process.

    Raises ConfigError when the file is there and is not a key."""
    path = folder / FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
        key = path.read_bytes()
    except OSError as error:
        logger.warning("no lasting key: %s; what clients keep expires with this process", error)
        return secrets.token_bytes(KEY_NBYTES)
    if len(key) != KEY_NBYTES:
        raise ConfigError(f"{path} is not a key of {KEY_NBYTES} bytes; remove it")
    return key


def _create(path: Path) -> None:
    """Write the file whole, unless another server was first."""
    draft = path.with_name(f"{FILE}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_NBYTES))
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
