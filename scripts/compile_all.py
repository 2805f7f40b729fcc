"""Compile matrix: every kernel of every plan for every capability, as a table; needs no GPU.

Fails on code that does not compile, spills, computes in float64 or exceeds a limit, on a kernel of
no image, and on an image of more than 120 cubins. What is up to date in the cache is not
compiled again; --default takes the plans in use only, --fresh ignores the cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from ginfer.cuda.runtime.build import build_image
from ginfer.cuda.runtime.catalog import built_capabilities, forgotten_builders, kernels_of
from ginfer.cuda.runtime.jit import CAPABILITIES
from ginfer.errors import GInferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ginfer.cuda.runtime.manifest import CubinRecord

MAX_CUBINS = 120  # of the plans in use, per capability
COLUMNS = ("capability", "kernel", "threads", "registers", "shared", "stack", "spills")


def table(records: Iterable[CubinRecord], capability: str) -> Iterator[str]:
    """Lines of the table, without its head."""
    for r in records:
        numbers = (r.threads, r.registers, r.shared, r.stack, r.spills)
        yield f"sm_{capability:<8} {r.name:64}" + "".join(f"{n:>10}" for n in numbers)


def compile_capability(capability: str, *, every: bool, jobs: int | None) -> Iterator[str]:
    """Compile one capability; yield the lines of its table. Raises InternalError of a kernel."""
    items = kernels_of(capability, every=every)

    def progress(done: int, total: int, name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[Ksm_{capability} {done}/{total} {name}", end="", file=sys.stderr)

    yield from table(build_image(items, capability, processes=jobs, progress=progress), capability)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)


def findings() -> Iterator[str]:
    """What is wrong with the set of kernels, before any is compiled."""
    for name in forgotten_builders():
        yield f"{name} is in no image: its module's image_kernels does not give it"
    for capability in CAPABILITIES:
        count = len(kernels_of(capability))
        if count > MAX_CUBINS:
            yield f"the sm_{capability} image has {count} cubins, at most {MAX_CUBINS}"


def run(names: Iterable[str], *, every: bool, jobs: int | None) -> int:
    """Compile and print; returns the exit code."""
    faults = list(findings())
    start = time.monotonic()
    print(f"{COLUMNS[0]:11} {COLUMNS[1]:64}" + "".join(f"{c:>10}" for c in COLUMNS[2:]))
    for name in names:
        try:
            for line in compile_capability(name, every=every, jobs=jobs):
                print(line, flush=True)
        except GInferError as error:
            faults.append(" ".join(str(error).split()))
    print(f"{time.monotonic() - start:.0f} s")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sm", action="append", choices=CAPABILITIES, help="only this capability")
    parser.add_argument("--default", action="store_true", help="only the plans in use")
    parser.add_argument("--fresh", action="store_true", help="compile everything again")
    parser.add_argument("--jobs", type=int, help="compiler processes; default: one per core")
    options = parser.parse_args()
    names = options.sm or built_capabilities()
    if not options.fresh:
        return run(names, every=not options.default, jobs=options.jobs)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["GINFER_CACHE_DIR"] = cache
        return run(names, every=not options.default, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
