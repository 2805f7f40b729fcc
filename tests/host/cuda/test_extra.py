"""What installing the cuda extra changes for everybody else: nothing."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_cpu_image_loads_no_part_of_the_cuda_extra():
    code = (
        "import sys, ginfer.cpu.backend\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('numba_cuda', 'cuda')])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_device_code_comes_from_the_extra_and_not_from_numba_itself():
    code = "from numba import cuda; print(cuda.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "numba_cuda" in done.stdout
