"""Run the GPU tests of this machine and record what ran in docs/performance/<date>-<device>.json.

The record says on which commit, device and compilers which tests passed; `tests/host` checks that
every committed record is complete. Kernels are compiled first, unless --no-build says that the
image was carried here.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

from ginfer.cuda.runtime.build import build_image
from ginfer.cuda.runtime.catalog import kernels_of
from ginfer.cuda.runtime.device import Device, device_count
from ginfer.cuda.runtime.image import native_capability
from ginfer.cuda.runtime.manifest import image_folder, read_manifest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "performance"
SUITES = {"gpu": "tests/cuda", "multi_gpu": "tests/multi_gpu"}
ALSO_RUN = {"90a": ("90",)}
OUTCOMES = ("passed", "failed", "skipped")


class Recorder:
    """Pytest plugin: the outcome of every collected test, by file."""

    def __init__(self) -> None:
        self.collected: Counter[str] = Counter()
        self.outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count what will run."""
        self.collected.update(item.nodeid.partition("::")[0] for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's setup, call and teardown."""
        if report.when == "call" or report.outcome != "passed":
            worse = self.outcomes.get(report.nodeid) == "failed"
            self.outcomes[report.nodeid] = "failed" if worse else report.outcome

    def files(self) -> dict[str, dict[str, int]]:
        """Per file how many tests were collected, and how they ended."""
        rows = {
            name: {"collected": n, **dict.fromkeys(OUTCOMES, 0)}
            for name, n in sorted(self.collected.items())
        }
        for nodeid, outcome in self.outcomes.items():
            rows[nodeid.partition("::")[0]][outcome] += 1
        return rows


def commit() -> str:
    """The commit of the working tree, with '+' when files differ from it; empty outside Git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    return head + "+" if head and git("status", "--porcelain") else head


def environment(device: Device) -> dict[str, Any]:
    """What the tests ran on."""
    capability = native_capability(device.info.capability)
    records = read_manifest(image_folder(capability)).values()
    _, version = driver.cuDriverGetVersion()
    return {
        "device": device.info.name,
        "num_devices": device_count(),
        "capability": capability,
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
        "compilers": sorted({r.compilers for r in records}),
    }


def record_path(device: str, day: str) -> Path:
    """docs/performance/2026-11-29-nvidia-h200.json."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return FOLDER / f"{day}-{slug}.json"


def write_record(path: Path, suite: str, result: dict[str, Any]) -> None:
    """Put the result into the file of the day, beside what else is there."""
    tree = json.loads(path.read_text()) if path.exists() else {}
    tree.setdefault("tests", {})[suite] = result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n")


def build(capability: str) -> None:
    """Compile the kernels of the library and of the tests, and those of the sm_80 class that run on
    the same device."""
    kernels_for = import_module("tests.cuda.kernels").kernels_for
    for name in (capability, *ALSO_RUN.get(capability, ())):
        build_image((*kernels_of(name), *kernels_for(name)), name)


def run(suite: str, options: argparse.Namespace) -> int:
    """Build, run one suite, record; returns the exit code."""
    device = Device()
    capability = native_capability(device.info.capability)
    if not options.no_build:
        build(capability)
    recorder, start = Recorder(), time.monotonic()
    marked = suite if options.long else f"{suite} and not long"
    arguments = [SUITES[suite], "-m", marked, "-p", "no:cacheprovider", *options.pytest]
    code = int(pytest.main(arguments, plugins=[recorder]))
    files = recorder.files()
    now = datetime.now(UTC)
    result = {
        "date": now.isoformat(timespec="seconds"),
        "commit": options.commit or commit(),
        **environment(device),
        "seconds": round(time.monotonic() - start, 1),
        **{key: sum(row[key] for row in files.values()) for key in ("collected", *OUTCOMES)},
        "files": files,
    }
    path = options.out or record_path(device.info.name, now.date().isoformat())
    write_record(path, suite, result)
    print(f"{path}: {result['passed']} of {result['collected']} passed")
    return code


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--suite", choices=SUITES, default="gpu")
    parser.add_argument("--out", type=Path, help="write the record here")
    parser.add_argument("--commit", help="record this commit instead of asking Git")
    parser.add_argument("--build-only", metavar="CAPABILITY", help="compile, and run nothing")
    parser.add_argument("--long", action="store_true", help="full counts too")
    parser.add_argument("--no-build", action="store_true", help="the image has been built")
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    options = parser.parse_args()
    if options.build_only:
        build(options.build_only)
        return 0
    return run(options.suite, options)


if __name__ == "__main__":
    sys.exit(main())
