"""The import table holds: every import is parsed, every forbidden edge has a reason."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"errors", "sizes", "formats", "env", "spec"}
VALUES = FACTS | {"config", "prompt", "batch", "backend"}

# package -> other packages of ginfer that it may import
ALLOWED = {
    **{package: {"errors", "sizes"} for package in FACTS},
    **dict.fromkeys(("config", "prompt", "batch", "backend"), VALUES),
    **dict.fromkeys(("artifact", "frontend", "media", "cache", "models"), VALUES),
    **{p: FACTS | {"batch", "backend"} for p in ("cpu", "cuda")},
    "engine": VALUES | {"artifact", "frontend", "media", "cache", "models", "cpu", "cuda"},
}
THIRD_PARTY = {
    "frontend": {"numpy", "tokenizers", "jinja2", "orjson"},
    "media": {"numpy", "pillow", "PIL", "av"},
    "engine": {"numpy", "orjson", "llguidance"},
    "cpu": {"numpy", "numba", "llvmlite"},
    "cuda": {"numpy", "numba", "llvmlite", "cuda"},
    "artifact": {"numpy", "orjson"},
}
APPLIANCE_MAY_IMPORT = {"artifact", "frontend", "media", "engine", *VALUES}
RUNTIME_COMMANDS = {"cli/image.py", "doctor/gpu.py"}
REASONS = {
    "cpu": "a backend knows blocks and tables, never requests, models, files or HTTP",
    "cuda": "a backend knows blocks and tables, never requests, models, files or HTTP",
    "cache": "bookkeeping is testable without a model and without a device",
    "models": "a model program reads like the model; loading and serving are the engine's",
    "artifact": "a file format knows nothing of the models that it carries",
    "frontend": "text in, ids out; no engine behind it",
}


def imports_of(path):
    """Absolute module names imported anywhere in the file, with their line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{a.name}", node.lineno) for a in node.names)


def package_of(path):
    """'artifact' for ginfer/artifact/x.py, 'errors' for ginfer/errors.py."""
    parts = path.relative_to(ROOT / "ginfer").parts
    return parts[0].removesuffix(".py")


def library_files():
    return [
        p
        for p in sorted((ROOT / "ginfer").rglob("*.py"))
        if p.name != "__init__.py" or p.parent.name != "ginfer"
    ]


@pytest.mark.parametrize("path", library_files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_library_imports_point_one_way(path):
    package = package_of(path)
    for name, line in imports_of(path):
        top, *rest = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if top == "ginfer":
            target = rest[0]
            same = target == package
            assert same or target in ALLOWED[package], (
                f"{where}: {REASONS.get(package, 'rows import upwards only')}"
            )
            if target in ("cpu", "cuda") and not same:
                assert path.name == "backends.py", (
                    f"{where}: only engine/backends.py opens a backend"
                )
        else:
            assert top in sys.stdlib_module_names or top in THIRD_PARTY.get(package, {"numpy"}), (
                where
            )


def appliance_files():
    return sorted((ROOT / "appliance").rglob("*.py"))


@pytest.mark.parametrize("path", appliance_files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_appliance_uses_public_packages(path):
    for name, line in imports_of(path):
        top, *rest = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        assert top != "scripts", where
        inside = path.relative_to(ROOT / "appliance").as_posix()
        if name.startswith("ginfer.cuda.runtime") and inside in RUNTIME_COMMANDS:
            continue  # images are built without an engine
        if top == "ginfer" and rest and rest[0] in ("models", "cache", "cpu", "cuda"):
            pytest.fail(f"{where}: the appliance sees the engine, not its parts")
        if "protocols" in path.parts:
            assert top not in ("sanic", "httpx", "click"), f"{where}: protocol translation is pure"


def test_importing_the_library_loads_no_compiler_and_no_server():
    heavy = ("numba", "sanic", "tokenizers", "jinja2")
    code = f"import sys, ginfer; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert out.stdout.strip() == "[]"


def test_importing_the_library_opens_no_socket():
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise SystemExit('socket at import')\n"
        "socket.socket.connect = refuse\n"
        "import ginfer, ginfer.engine.engine, ginfer.frontend, ginfer.artifact, appliance.cli.main"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_every_environment_variable_is_declared():
    declared = (ROOT / "ginfer/env.py").read_text() + (ROOT / "appliance/config.py").read_text()
    for path in [*library_files(), *appliance_files()]:
        if path.name == "env.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith("GINFER_")
            ):
                assert f'"{node.value}"' in declared, (
                    f"{path.relative_to(ROOT)}: {node.value} is not declared"
                )
