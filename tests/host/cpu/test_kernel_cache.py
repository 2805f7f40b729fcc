"""Where compiled kernels are kept, and what makes them stale."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ginfer.cpu

FOLDER = Path(ginfer.cpu.__file__).parent
PRINT = "import ginfer.cpu, numba; print(numba.config.CACHE_DIR)"


def _cache_dir(**environment: str) -> Path:
    path = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(FOLDER.parents[1])}
    run = subprocess.run(
        [sys.executable, "-c", PRINT],
        env={**path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(run.stdout.strip())


def test_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    named = _cache_dir(GINFER_CACHE_DIR=str(tmp_path / "a"), HOME=str(tmp_path))
    assert named.parent == tmp_path / "a"
    assert _cache_dir(HOME=str(tmp_path)).parent == tmp_path / ".cache" / "ginfer"


def test_an_impossible_cache_folder_is_replaced_by_a_fresh_one(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    fresh = _cache_dir(GINFER_CACHE_DIR=str(blocked / "below"), TMPDIR=str(tmp_path))
    assert fresh.parent == tmp_path
    assert fresh.is_dir()


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda f: f.name)
def test_kernels_inline_only_what_the_cache_key_covers(file: Path) -> None:
    if "njit" not in file.read_text() and file.name not in ginfer.cpu.INLINED:
        return  # no kernels inside, and none that others take in
    inlined = {f"ginfer.cpu.{Path(name).stem}" for name in ginfer.cpu.INLINED}
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    modules = {n for n in names if (FOLDER / f"{n.rsplit('.', 1)[-1]}.py").exists()}
    used = {n for n in modules if n.startswith("ginfer.cpu.")}
    assert used <= inlined, f"add {used - inlined} to ginfer.cpu.INLINED"
