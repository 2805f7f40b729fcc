"""Kernel images: the cubins of one compute capability with their manifest; build, load, seal.

An image is the folder `<cache>/images/sm_90a`: a `<key>.cubin` per kernel, and `manifest.json` with
what the linker reported. Building needs no GPU. Loading needs no compiler; it refuses a device of
another capability and kernels whose source has changed since.
"""

from __future__ import annotations

import fcntl
import json
import os
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ginfer.cuda.runtime.compiler import CubinRecord, SealedError, compile_cubin, seal_compiler
from ginfer.cuda.runtime.jit import CAPABILITIES
from ginfer.cuda.runtime.launch import Function
from ginfer.env import CACHE_DIR
from ginfer.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.stream import Stream

SCHEMA = "ginfer-image-v1"
__all__ = ["CubinRecord", "Image", "build_image", "compile_cubin", "image_folder", "read_manifest"]


def image_folder(capability: str) -> Path:
    """Folder of an image: below GINFER_CACHE_DIR, else in the user's cache folder."""
    configured = CACHE_DIR.read()
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ginfer"
    return (Path(configured) if configured else user) / "images" / f"sm_{capability}"


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


def build_image(
    items: Iterable[Kernel],
    capability: str,
    *,
    processes: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> list[CubinRecord]:
    """Compile what is missing or was made by other compilers, in several processes; return the
    records of all `items`.

    progress(done, total, name) is called at the start and after each kernel. What has been compiled
    is kept whatever happens. Raises InternalError of the first kernel that fails, after all others.
    """
    folder = image_folder(capability)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(items))
    have = read_manifest(folder)
    missing = [item for item in wanted if not _is_current(item, capability, have)]
    made: dict[str, CubinRecord] = {}
    faults: list[InternalError] = []
    try:
        for done, (name, job) in enumerate(_compile_all(missing, capability, processes)):
            progress(done, len(missing), name)
            try:
                record = job.result() if job is not None else None
            except InternalError as error:
                faults.append(error)
            else:
                made.update({record.source: record} if record is not None else {})
    finally:
        with _manifest(folder) as records:
            records.update(made)
    if faults:
        raise faults[0]
    have |= made
    return [have[item.source(capability)] for item in wanted]


def _is_current(item: Kernel, capability: str, have: dict[str, CubinRecord]) -> bool:
    record = have.get(item.source(capability))
    return record is not None and record.key == item.key(capability)


def _compile_all(
    items: list[Kernel], capability: str, processes: int | None
) -> Iterator[tuple[str, Future[CubinRecord] | None]]:
    """Yield ('', None) at the start, then the name and the finished job of each kernel."""
    yield "", None
    if not items:
        return
    workers = min(processes or os.cpu_count() or 1, len(items))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(_compile_to_folder, item, capability): item for item in items}
        try:
            yield from ((jobs[job].name, job) for job in as_completed(jobs))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _compile_to_folder(item: Kernel, capability: str) -> CubinRecord:
    record, code = compile_cubin(item, capability)
    path = cubin_path(image_folder(capability), record)
    _write_atomically(path, code)
    return record


@contextmanager
def _manifest(folder: Path) -> Iterator[dict[str, CubinRecord]]:
    """The records of the manifest under a lock, to be changed; written back at the end."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = read_manifest(folder)
        yield records
        rows = [asdict(r) for r in sorted(records.values(), key=lambda r: (r.name, r.key))]
        text = json.dumps({"schema": SCHEMA, "kernels": rows}, indent=1)
        _write_atomically(folder / "manifest.json", text.encode())


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def prune_image(items: Iterable[Kernel], capability: str) -> int:
    """Remove the cubins that none of `items` has now, and what broken builds left; return how many
    files."""
    folder = image_folder(capability)
    if not folder.exists():
        return 0
    wanted = {item.source(capability) for item in items}
    with _manifest(folder) as records:
        for source in set(records) - wanted:
            del records[source]
        keep = {cubin_path(folder, r) for r in records.values()}
        stale = [p for p in (*folder.glob("*.cubin"), *folder.glob(".*.cubin.*")) if p not in keep]
        for path in stale:
            path.unlink()
    return len(stale)


@dataclass(kw_only=True)
class Image:
    """The loaded kernels of one device context. Launchers ask it for functions by kernel value."""

    capability: str
    functions: dict[Kernel, Function] = field(default_factory=dict)
    sealed: bool = False

    @classmethod
    def open(
        cls, capability: str, items: Iterable[Kernel], *, device_capability: tuple[int, int]
    ) -> Self:
        """Load `items` into the current context, that of a device with `device_capability`.

        Raises ConfigError for an image of another capability and for kernels that the image lacks
        or has in an older form, with the command that builds them; DeviceError when the driver
        refuses a cubin.
        """
        if CAPABILITIES[capability][:2] != device_capability:
            raise ConfigError(
                f"the sm_{capability} image does not run on this device; run: ginfer image build "
                f"--sm {native_capability(device_capability)}",
                param="image",
            )
        image = cls(capability=capability)
        image.load(items)
        return image

    def load(self, items: Iterable[Kernel]) -> None:
        """Load more kernels. Raises as open() does, and SealedError after seal()."""
        wanted = [item for item in dict.fromkeys(items) if item not in self.functions]
        if not wanted:
            return
        if self.sealed:
            raise SealedError(
                f"kernel {wanted[0].name} was to be loaded after the image was sealed"
            )
        folder = image_folder(self.capability)
        have = read_manifest(folder)
        missing = [item for item in wanted if item.source(self.capability) not in have]
        if missing:
            raise missing_error(missing, self.capability)
        for item in wanted:
            record = have[item.source(self.capability)]
            self.functions[item] = Function(record, cubin_path(folder, record).read_bytes())

    def __getitem__(self, item: Kernel) -> Function:
        try:
            return self.functions[item]
        except KeyError:
            raise InternalError(f"kernel {item.name} is not in the loaded image") from None

    def launch(
        self,
        item: Kernel,
        grid: tuple[int, ...],
        stream: Stream,
        *arguments: int | float,
        **how: Any,
    ) -> None:
        """Put a kernel on a stream; `how` as in Function.launch."""
        self[item].launch(grid, stream, *arguments, **how)

    def seal(self) -> None:
        """Forbid loading into this image, and compilation in this process."""
        self.sealed = True
        seal_compiler()


def native_capability(device: tuple[int, int]) -> str:
    """The capability to build for a device. Raises ConfigError for a GPU without kernels."""
    fitting = [name for name, cc in CAPABILITIES.items() if cc[:2] == device]
    if not fitting:
        raise ConfigError(
            f"the GPU is sm_{device[0]}{device[1]}; there are kernels for "
            f"{', '.join(f'sm_{name}' for name in CAPABILITIES)}",
            param="device",
        )
    return fitting[-1]


def missing_error(missing: list[Kernel], capability: str) -> ConfigError:
    """The error of kernels that the image lacks or has only in an older form."""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return ConfigError(
        f"the sm_{capability} image has no current cubin of {missing[0].name}{more}; "
        f"run: ginfer image build --sm {capability}",
        param="image",
    )
