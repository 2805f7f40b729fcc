"""`ginfer inspect` and `ginfer verify` as a user calls them."""

import json
import os
import pty
import subprocess
import sys

import pytest

from ginfer.artifact import PlannedResource, PlannedTensor
from ginfer.models.contract import PROFILES
from ginfer.models.qwen import QWEN_DEMO
from tests.packages import assemble, canonical, take_apart, write_package


def ginfer(*arguments, **options):
    """Run the program; return its exit code, stdout and stderr."""
    command = [sys.executable, "-m", "appliance.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def package(tmp_path):
    return write_package(tmp_path / "p.ginfer")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A package with the whole inventory of the demo model."""
    profile = PROFILES["groupwise-int"]
    plan = [PlannedResource(name=name, nbytes=9) for name in QWEN_DEMO.resources]
    for t in QWEN_DEMO.inventory():
        fmt, layout = profile.storage(t.role)
        plan.append(PlannedTensor(name=t.name, shape=t.shape, format=fmt, layout=layout))
    return write_package(tmp_path_factory.mktemp("demo") / "demo.ginfer", plan)


def test_inspect_shows_identity_totals_and_resources(complete):
    code, out, err = ginfer("inspect", complete)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["model", "qwen3.8-demo"] in rows
    assert ["weights", "groupwise-int"] in rows
    assert ["inventory", "complete"] in rows
    assert ["resource", "frontend/tokenizer.json", "9", "B"] in rows
    formats = {
        row[1]: int(row[3]) for row in rows if row[:1] == ["format"] and "tile128x64-v1" in row
    }
    tiled = sum(t.role in ("matrix", "head") for t in QWEN_DEMO.inventory())
    assert formats["Q4G64_F16S"] + formats["W8G32_F16S"] == tiled
    (group,) = (row for row in rows if row[:1] == ["ranks"])
    assert group[1:4] == ["0", str(len(QWEN_DEMO.inventory())), "tensors"]


def test_inspect_lists_objects_and_differences_from_the_model(package):
    code, out, err = ginfer("inspect", package, "--objects")
    assert (code, err) == (0, "")
    assert "text/layers/0/mlp/down [3, 5]" in out
    assert "difference text/output_head: no such tensor on rank 0" in out
    assert "difference text/final_norm: shape [65]; the model needs [384]" in out
    assert "difference ids: not in the model's inventory" in out


def test_inspect_as_json_holds_the_whole_directory(package):
    code, out, _ = ginfer("inspect", package, "--json")
    shown = json.loads(out)
    tree, _ = take_apart(package.read_bytes())
    assert code == 0
    assert shown["objects"] == tree["objects"]
    assert shown["identity"] == tree["identity"]
    assert shown["bytes"] == package.stat().st_size
    assert sum(f["bytes"] for f in shown["formats"].values()) == sum(
        o["bytes"] for o in tree["objects"] if o["kind"] == "tensor"
    )


def test_inspect_refuses_an_invalid_package_in_one_line(tmp_path, package):
    package.write_bytes(package.read_bytes()[:-1])
    code, out, err = ginfer("inspect", package)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "the file may be truncated" in err


def test_verify_says_valid_and_nothing_else(complete):
    code, out, err = ginfer("verify", complete)
    assert (code, err) == (0, "")
    assert out.startswith(f"{complete}: valid, {len(QWEN_DEMO.inventory()) + 6} objects")
    assert out.count("\n") == 1


def test_verify_prints_a_line_for_every_digest_that_is_wrong(package):
    data = bytearray(package.read_bytes())
    data[4096] ^= 1
    data[-1] ^= 1
    package.write_bytes(data)
    code, out, err = ginfer("verify", package)
    assert (code, err) == (1, "")
    first, second = out.splitlines()
    assert first.startswith(f"{package}: frontend/tokenizer.json: SHA-256 ")
    assert second.startswith(f"{package}: ids: SHA-256 ")


def test_verify_prints_a_line_for_every_structural_finding(package):
    tree, payload = take_apart(package.read_bytes())
    tree["identity"]["tp"] = 3
    tree["objects"][0]["encoding"] = "zip"
    tree["objects"][3]["format"] = "Q3"
    package.write_bytes(assemble(canonical(tree), payload))
    code, out, _ = ginfer("verify", package)
    assert code == 1
    assert len(out.splitlines()) == 3
    code, out, err = ginfer("verify", package.with_name("absent.ginfer"))
    assert code == 1
    assert (
        out == f"{package.with_name('absent.ginfer')}: file: No such file or directory; "
        "a package is a readable regular file\n"
    )
    assert err == ""


def test_verify_draws_progress_on_a_terminal_only(complete):
    leader, follower = pty.openpty()
    try:
        code, out, _ = ginfer_with_stderr(follower, "verify", complete)
        drawn = os.read(leader, 1 << 16).decode(errors="replace")  # may end within a character
    finally:
        os.close(leader)
        os.close(follower)
    assert code == 0
    assert "valid" in out
    assert "verify demo.ginfer" in drawn
    assert "valid" not in drawn


def ginfer_with_stderr(descriptor, *arguments):
    """Run the program with stderr on a terminal."""
    command = [sys.executable, "-m", "appliance.cli", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=descriptor, text=True, timeout=120, env=environment
    )
    return done.returncode, done.stdout, None
