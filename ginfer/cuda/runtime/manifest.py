"""What an image has on disk: its folder, the manifest, and how far it is from what it should be."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from ginfer.env import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ginfer.cuda.runtime.jit import Kernel

SCHEMA = "ginfer-image-v1"


@dataclass(frozen=True, kw_only=True)
class CubinRecord:
    """One compiled kernel: what the manifest knows of it. Sizes in bytes; registers per thread."""

    key: str
    source: str
    name: str
    entry: str
    signature: tuple[str, ...]
    threads: int
    registers: int
    static_shared: int
    dynamic_shared: int
    stack: int
    spills: int
    compilers: str

    @property
    def shared(self) -> int:
        """Shared memory of a block."""
        return self.static_shared + self.dynamic_shared


def image_folder(capability: str) -> Path:
    """Folder of an image."""
    return cache_root() / "images" / f"sm_{capability}"


def ptx_folder() -> Path:
    """Where builds keep PTX that several capabilities share; never read by anything else."""
    return image_folder("80").parent / "ptx"


@dataclass(frozen=True, kw_only=True)
class ImageState:
    """An image on disk against the kernels that it should hold."""

    folder: Path
    wanted: int
    current: int
    stale: int  # cubins that nobody wants any more
    nbytes: int
    compilers: tuple[str, ...]


def image_state(items: Iterable[Kernel], capability: str) -> ImageState:
    """What is there of an image."""
    folder = image_folder(capability)
    have = read_manifest(folder)
    wanted = {item.source(capability) for item in items}
    return ImageState(
        folder=folder,
        wanted=len(wanted),
        current=len(wanted & set(have)),
        stale=len(set(have) - wanted),
        nbytes=sum(path.stat().st_size for path in folder.glob("*.cubin")),
        compilers=tuple(sorted({r.compilers for r in have.values()})),
    )


def read_manifest(folder: Path) -> dict[str, CubinRecord]:
    """Source digest to record of the cubins that are there; empty when the image does not exist or
    its manifest has another form."""
    try:
        tree = json.loads((folder / "manifest.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    names = {f.name for f in fields(CubinRecord)}
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
        return {}
    rows = [row for row in tree["kernels"] if set(row) == names]
    records = [CubinRecord(**{**row, "signature": tuple(row["signature"])}) for row in rows]
    return {r.source: r for r in records if cubin_path(folder, r).exists()}


def cubin_path(folder: Path, record: CubinRecord) -> Path:
    """Where the machine code of a record lies."""
    return folder / f"{record.key}.cubin"


@contextmanager
def edit_manifest(folder: Path) -> Iterator[dict[str, CubinRecord]]:
    """The records of the manifest under a lock, to be changed; written back at the end."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = read_manifest(folder)
        yield records
        rows = [asdict(r) for r in sorted(records.values(), key=lambda r: (r.name, r.key))]
        text = json.dumps({"schema": SCHEMA, "kernels": rows}, indent=1)
        write_atomically(folder / "manifest.json", text.encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that no reader ever sees in part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)
