"""Building images: compile what is missing in several processes, remove what nobody wants."""

from __future__ import annotations

import gc
import os
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING

from ginfer.cuda.runtime.compiler import compile_cubin
from ginfer.cuda.runtime.front_end import speed_up
from ginfer.cuda.runtime.manifest import (
    CubinRecord,
    cubin_path,
    edit_manifest,
    image_folder,
    ptx_folder,
    read_manifest,
    write_atomically,
)
from ginfer.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ginfer.cuda.runtime.jit import Kernel


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
    nbytes = {r.name: cubin_path(folder, r).stat().st_size for r in have.values()}
    missing = [item for item in wanted if not _is_current(item, capability, have)]
    missing.sort(key=lambda item: -nbytes.get(item.name, 0))  # the longest work first
    made: dict[str, CubinRecord] = {}
    faults: list[InternalError] = []
    progress(0, len(missing), "")
    try:
        for done, (name, job) in enumerate(_compile_all(missing, capability, processes), 1):
            try:
                record = job.result()
                made[record.source] = record
            except InternalError as error:
                faults.append(error)
            except BrokenProcessPool:
                raise InternalError(
                    f"a compiler process died at {name}; is there memory for one per core?"
                ) from None
            progress(done, len(missing), name)
    finally:
        with edit_manifest(folder) as records:
            records.update(made)
    if faults:
        raise faults[0]
    have |= made
    changed = [item for item in wanted if item.source(capability) not in have]
    if changed:
        raise InternalError(
            f"the source of {changed[0].name} changed during the build; build again"
        )
    return [have[item.source(capability)] for item in wanted]


def _is_current(item: Kernel, capability: str, have: dict[str, CubinRecord]) -> bool:
    record = have.get(item.source(capability))
    return record is not None and record.key == item.key(capability)


def _compile_all(
    items: list[Kernel], capability: str, processes: int | None
) -> Iterator[tuple[str, Future[CubinRecord]]]:
    """Yield the name and the finished job of each kernel."""
    if not items:
        return
    workers = min(processes or os.cpu_count() or 1, len(items))
    spawn = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_prepare) as pool:
        jobs = {pool.submit(_compile_to_folder, item, capability): item for item in items}
        try:
            yield from ((jobs[job].name, job) for job in as_completed(jobs))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare() -> None:
    """Make a process a compiler. It makes millions of objects that live as long as one kernel:
    collect rarely."""
    speed_up()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def _compile_to_folder(item: Kernel, capability: str) -> CubinRecord:
    record, code = compile_cubin(item, capability, ptx_folder=ptx_folder())
    path = cubin_path(image_folder(capability), record)
    write_atomically(path, code)
    return record


def prune_ptx() -> int:
    """Remove what builds keep for other capabilities; return how many files."""
    files = list(ptx_folder().glob("*"))
    for path in files:
        path.unlink()
    return len(files)


def prune_image(items: Iterable[Kernel], capability: str) -> int:
    """Remove the cubins that none of `items` has now, and what broken builds left; return how many
    files."""
    folder = image_folder(capability)
    if not folder.exists():
        return 0
    wanted = {item.source(capability) for item in items}
    with edit_manifest(folder) as records:
        for source in set(records) - wanted:
            del records[source]
        keep = {cubin_path(folder, r) for r in records.values()}
        stale = [p for p in (*folder.glob("*.cubin"), *folder.glob(".*.cubin.*")) if p not in keep]
        for path in stale:
            path.unlink()
    return len(stale)
