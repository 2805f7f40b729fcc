"""The tests that need no GPU, in lanes side by side: what waits beside what compiles."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEMO = "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"
WARM = ("-m", "appliance.cli", DEMO, "--prompt", "Hello!", "--max-new", "1")
SELECT = ("-m", "not gpu and not multi_gpu and not long and not oracle")
HANG_S = 1200  # of one test; it ends with every stack
OPTIONS = ("-p", "no:cacheprovider", "-o", "faulthandler_exit_on_timeout=true")
NO_TESTS = 5  # pytest's exit code


@dataclass(frozen=True)
class Lane:
    """One run of pytest over `paths`, less what other lanes own below them."""

    name: str
    paths: tuple[str, ...]
    warm: bool = True  # needs the CPU kernels; lanes that start together would each compile them
    niceness: int = 0

    def ignored(self) -> list[str]:
        """Paths of other lanes below this one's."""
        others = [path for lane in LANES if lane is not self for path in lane.paths]
        return [p for p in others if any(Path(p).is_relative_to(own) for own in self.paths)]

    def command(self, options: list[str]) -> list[str]:
        """The command line."""
        ignored = [f"--ignore={path}" for path in self.ignored()]
        timeout = ("-o", f"faulthandler_timeout={HANG_S}")
        pytest = [sys.executable, "-m", "pytest", *SELECT, *OPTIONS, *timeout]
        return ["nice", "-n", str(self.niceness), *pytest, *self.paths, *ignored, *options]


LANES = (
    Lane("kernels", ("tests/host/cuda/test_matrix.py",), warm=False, niceness=10),
    Lane(  # most start servers of their own
        "servers",
        tuple(
            f"tests/service/test_{name}.py"
            for name in ("bridge", "cli", "load", "operations", "supervision")
        ),
    ),
    Lane("service", ("tests/service",)),
    Lane("models", ("tests/models",)),
    Lane("emulated", ("tests/host/cuda",)),  # kernels, thread by thread: the longest
    Lane("host", ("tests",), niceness=10),
)


def run(lane: Lane, warmed: Future[None], options: list[str]) -> tuple[int, float, str]:
    """Run a lane; returns (exit code, seconds, output)."""
    if lane.warm:
        warmed.result()
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            lane.command(options), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        )
        output.seek(0)
        return done.returncode, time.monotonic() - began, output.read()


def warm() -> None:
    """Compile the CPU kernels that most tests use; what goes wrong here the tests will tell."""
    subprocess.run([sys.executable, *WARM], cwd=ROOT, capture_output=True, check=False)


def main(options: list[str]) -> int:
    """Run all lanes, pytest options added; returns 0 if all passed."""
    began, failed = time.monotonic(), []
    with ThreadPoolExecutor(len(LANES) + 1) as pool:
        warmed = pool.submit(warm)
        jobs = {pool.submit(run, lane, warmed, options): lane for lane in LANES}
        for job in as_completed(jobs):
            code, seconds, output = job.result()
            print(f"== {jobs[job].name}: {seconds:.0f} s\n{output}", flush=True)
            if code not in (0, NO_TESTS):
                failed.append(jobs[job].name)
    verdict = f"failed: {', '.join(failed)}" if failed else "all passed"
    print(f"== {verdict} in {time.monotonic() - began:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
