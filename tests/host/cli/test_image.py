"""`ginfer image` on two small kernels."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from appliance.cli.main import group, invoke
from ginfer.cuda.runtime import catalog
from ginfer.cuda.runtime.device import device_count
from tests.cuda.kernels import ANYWHERE

ROOT = Path(__file__).resolve().parents[3]


def small_images(capability, every=False):
    return ANYWHERE[:2] if capability in ("80", "86") else ()


@pytest.fixture
def image(tmp_path, monkeypatch, capfd):
    """Run `ginfer image ...` with a cache of its own; returns (exit code, stdout, stderr)."""
    monkeypatch.setenv("GINFER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(catalog, "kernels_of", small_images)

    def call(*arguments):
        code = invoke(group, ["image", *arguments], "ginfer")
        return code, *capfd.readouterr()

    return call


def test_build_list_and_prune(image, tmp_path):
    assert image("list") == (0, "no images; run: ginfer image build\n", "")
    code, out, err = image("build", "--all", "--jobs", "1")
    assert (code, err) == (0, "")
    assert [re.sub(r"\d+ s$", "T", line) for line in out.splitlines()] == [
        "sm_80: 2 kernels, 2 compiled in T",
        "sm_86: 2 kernels, 2 compiled in T",
    ]
    _, out, _ = image("build", "--sm", "80", "--sm", "sm_86", "--sm", "80")
    assert out.count("2 kernels, 0 compiled") == len(out.splitlines()) == 2
    folder = tmp_path / "images" / "sm_80"
    (folder / "0123.cubin").write_bytes(b"old")
    code, out, err = image("list")
    assert (code, err) == (0, "")
    assert re.match(r"sm_80: 2 of 2 kernels, [\d.]+ KiB\n", out)
    assert f"  {folder}\n" in out
    assert re.search(r"^  numba \S+, numba-cuda ", out, flags=re.MULTILINE)
    assert image("prune") == (0, "3 files removed\n", "")  # PTX for both capabilities, too
    assert image("prune") == (0, "0 files removed\n", "")


def terminal_output(leader):
    """What is drawn until the program ends; a terminal that nobody reads stops it when it is
    full, after some hundred lines."""
    drawn = b""
    with suppress(OSError), open(leader, "rb", buffering=0) as terminal:
        while data := terminal.read(1 << 16):
            drawn += data
    return drawn.decode(errors="replace")


def test_build_draws_progress_on_a_terminal(tmp_path):
    code = (
        "from ginfer.cuda.runtime import catalog\n"
        "from tests.host.cli.test_image import small_images\n"
        "catalog.kernels_of = small_images\n"
        "from appliance.cli.main import main\nmain()"
    )
    command = [sys.executable, "-c", code, "image", "build", "--sm", "80", "--jobs", "1"]
    environment = {**os.environ, "GINFER_CACHE_DIR": str(tmp_path), "TERM": "xterm"}
    leader, follower = pty.openpty()
    streams = {"stdout": subprocess.PIPE, "stderr": follower}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams) as process:
        os.close(follower)
        drawn = terminal_output(leader)
        printed = process.stdout.read()
    assert process.returncode == 0
    assert printed.startswith("sm_80: 2 kernels, 2 compiled")
    assert "sm_80" in drawn
    assert "/2" in drawn


MISTAKES = [
    (("build", "--sm", "75"), "sm is '75'; one of 80, 86, 89, 90, 90a, 120a"),
    (("build", "--sm", "80", "--all"), "--all excludes --sm"),
    (("build", "--sm", "120a"), "there are no kernels for sm_120a yet"),
    (("build", "--jobs", "0"), "--jobs"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_1(image, arguments, says):
    code, out, err = image(*arguments)
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("ginfer: ")
    assert says in line


@pytest.mark.parametrize("absent", ["numba_cuda", "cuda.core", "cuda.bindings"])
@pytest.mark.parametrize("arguments", [("build", "--sm", "80"), ("list",), ("prune",)])
def test_without_the_extra_one_line_names_it(image, monkeypatch, arguments, absent):
    monkeypatch.setitem(sys.modules, absent, None)
    assert image(*arguments) == (
        1,
        "",
        f"ginfer: kernels need the cuda extra, {absent} is missing; "
        "run: pip install 'ginfer[cuda]'\n",
    )


@pytest.mark.skipif(device_count() > 0, reason="there is a GPU")
def test_without_a_gpu_the_capability_must_be_named(image):
    assert image("build") == (
        1,
        "",
        "ginfer: there is no NVIDIA GPU here; name a capability: --sm 90a\n",
    )
