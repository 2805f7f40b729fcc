"""Checkpoint: a folder of safetensors files, read in rows, never whole."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.errors import GInferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

INDEX = "model.safetensors.index.json"
MAX_HEADER_NBYTES = 100 << 20  # of a safetensors file
ITEM_NBYTES = {"BF16": 2, "F16": 2, "F32": 4}
HASH_BLOCK = 8 << 20
DRAFTER = "dflash2."  # before the names of a drafter's tensors

Listing = dict[str, tuple[tuple[int, ...], str | None]]  # name to shape and element type


class CheckpointError(GInferError):
    """A checkpoint cannot be packed; `problems` lists everything that is wrong with it."""

    code = "invalid_checkpoint"

    def __init__(self, problems: Sequence[str]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. offset: of its first byte in the file."""

    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int


class Checkpoint:
    """The tensors of a folder by name, and those of its drafter's folder as `dflash2.…`. A context
    manager: it keeps the files open."""

    def __init__(self, folder: Path, drafter: Path | None = None) -> None:
        """Read the headers. Raises CheckpointError listing every fault of the files."""
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._stack = ExitStack()
        self._handles: dict[Path, int] = {}
        problems: list[str] = []
        prefixes = dict.fromkeys(_weight_files(folder, problems), "")
        if drafter is not None:
            prefixes |= dict.fromkeys(_weight_files(drafter, problems), DRAFTER)
        self.files = list(prefixes)
        for path, prefix in prefixes.items():
            self._read_header(path, prefix, problems)
        if problems:
            raise CheckpointError(problems)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._handles.clear()

    def listing(self) -> Listing:
        """Names, shapes and element types of all tensors."""
        return {name: (t.shape, t.dtype) for name, t in self.tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop of axis 0 as float32 [stop - start, all other axes]."""
        tensor = self.tensors[name]
        width = prod(tensor.shape[1:])
        row_nbytes = width * ITEM_NBYTES[tensor.dtype]
        nbytes = (stop - start) * row_nbytes
        # pread, not a map: pages of a map would count as our memory until they are reclaimed.
        raw = os.pread(self._handle(tensor.path), nbytes, tensor.offset + start * row_nbytes)
        if len(raw) != nbytes:
            raise CheckpointError([f"{tensor.path.name}: ends inside tensor {name}"])
        return _to_float32(raw, tensor.dtype).reshape(stop - start, width)

    def digest(self, resources: Sequence[Path], progress: Callable[[int], None]) -> str:
        """SHA-256 over 'digest  name' lines of the weight files and resources, sorted by name, the
        drafter's last. progress: receives the bytes of each block read."""

        def place(path: Path) -> tuple[bool, str]:
            return path.parent != self.folder, path.name

        lines = [
            f"{_file_digest(path, progress)}  {path.name}\n"
            for path in sorted({*self.files, *resources}, key=place)
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _handle(self, path: Path) -> int:
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(path.open("rb")).fileno()
        return self._handles[path]

    def _read_header(self, path: Path, prefix: str, problems: list[str]) -> None:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MAX_HEADER_NBYTES:
                    raise ValueError(f"header of {length} bytes")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            size = path.stat().st_size
            for name, entry in header.items():
                self._add(prefix + name, entry, path, (8 + length, size))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            problems.append(f"{path.name}: not a safetensors file ({error})")

    def _add(self, name: str, entry: dict[str, Any], path: Path, data: tuple[int, int]) -> None:
        dtype = str(entry["dtype"])
        start, stop = (int(x) for x in entry["data_offsets"])
        dims = tuple(int(x) for x in entry["shape"])
        if name in self.tensors:
            raise ValueError(f"tensor {name} is in {self.tensors[name].path.name} too")
        item_nbytes = ITEM_NBYTES.get(dtype)
        if item_nbytes and stop - start != prod(dims) * item_nbytes:
            raise ValueError(f"tensor {name} has {stop - start} bytes for shape {list(dims)}")
        if not 0 <= start <= stop <= data[1] - data[0]:
            raise ValueError(f"tensor {name} lies outside the file")
        self.tensors[name] = StoredTensor(dims, dtype, path, data[0] + start)


def _weight_files(folder: Path, problems: list[str]) -> list[Path]:
    """The files that the index names, or every safetensors file of a folder without an index."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{INDEX}: not an index ({error})")
            return []
        files = [folder / str(name) for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        problems.append(f"{folder}: no safetensors files; give the folder of a checkpoint")
    problems += [f"{path.name}: named by {INDEX}, not there" for path in files if not path.exists()]
    return [path for path in files if path.exists()]


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The same numbers as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_float32(raw: bytes, dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return bf16_to_f32(np.frombuffer(raw, "<u2"))
    return np.frombuffer(raw, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _file_digest(path: Path, progress: Callable[[int], None]) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            sha.update(block)
            progress(len(block))
    return sha.hexdigest()
