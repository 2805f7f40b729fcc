"""Corrupted packages give typed errors only, in bounded time and memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import assemble, canonical, take_apart, write_package

ROOT = Path(__file__).resolve().parents[3]
MEMORY_LIMIT = 64 << 20
LARGEST = 4 << 20  # bytes of a directory

OPEN_AND_MEASURE = """
import json, sys, time
from ginfer.artifact import Package
from ginfer.errors import ArtifactError
from tests.host.artifact.corruption import resident_nbytes
good, *hostile = sys.argv[1:]
Package.open(good).close()
baseline = resident_nbytes("VmRSS")
for path in hostile:
    start = time.process_time()
    kinds = set()
    try:
        Package.open(path)
    except ArtifactError as e:
        kinds = {type(x).__name__ for x in e.findings}
        del e
    nbytes = resident_nbytes("VmHWM") - baseline
    print(json.dumps([path, sorted(kinds), time.process_time() - start, nbytes]))
"""


def run(*arguments):
    """Run Python and return the JSON lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_corruption(folder, count, seed):
    (result,) = run("-m", "tests.host.artifact.corruption", folder, count, seed)
    assert result["cases"] == count
    assert result["slowest_s"] < 5
    assert result["memory_nbytes"] < MEMORY_LIMIT
    assert len(result["outcomes"]) >= 35, "the corruption reaches too few checks"
    return result


def test_5000_corrupted_packages_give_typed_errors_only(tmp_path):
    check_corruption(tmp_path, 5000, 20260811)


@pytest.mark.long
def test_100000_corrupted_packages_give_typed_errors_only(tmp_path):
    print(check_corruption(tmp_path, 100_000, 3))


def fill(start, piece, end):
    """A text of nearly the largest length: start, piece again and again, end."""
    n = (LARGEST - len(start) - len(end)) // len(piece)
    return start + piece * n + end


def many_objects(tree, change):
    objects = []
    for i in range(8000):
        objects.append({**tree["objects"][6], "name": f"t/{i}"})
        change(i, objects[-1])
    return canonical({**tree, "objects": objects})


def many_members(num_members):
    members = b",".join(b'"%d":%d' % (i, i + 1000) for i in range(num_members))
    return b'{"objects":[{' + members + b"}]}"


HOSTILE = {
    "brackets": lambda tree: b"[" * LARGEST,
    "closing brackets": lambda tree: b"[" + b"]" * (LARGEST - 1),
    "members in members": lambda tree: fill(b"", b'{"a":', b""),
    "empty arrays": lambda tree: fill(b"[", b"[],", b"1]"),
    "empty arrays up to the limit": lambda tree: b"[" + b"[]," * 16_000 + b"1]",
    "empty objects": lambda tree: fill(b"[", b"{},", b"1]"),
    "numbers": lambda tree: fill(b"[", b"999,", b"1]"),
    "numbers up to the limit": lambda tree: b"[" + b"99999999," * 190_000 + b"1]",
    "strings": lambda tree: fill(b"[", b'"ab",', b"1]"),
    "strings up to the limit": lambda tree: b"[" + b'"abcdefghij",' * 140_000 + b"1]",
    "members": lambda tree: many_members(250_000),
    "members up to the limit": lambda tree: many_members(145_000),
    "one member again and again": lambda tree: b'{"a":[{' + b'"a":1,' * 145_000 + b'"a":1}]}',
    "one string": lambda tree: fill(b'["', b"x", b'"]'),
    "quotes": lambda tree: b'"' * LARGEST,
    "wide characters": lambda tree: fill(b'["', "\U0001f600".encode(), b'"]'),
    "one number": lambda tree: fill(b"[", b"9", b"]"),
    "white space": lambda tree: fill(b"[", b" ", b"]"),
    "objects of wrong types": lambda tree: many_objects(
        tree, lambda i, o: o.update(shape="x", offset=None, bytes=True)
    ),
    "objects that overlap": lambda tree: many_objects(
        tree, lambda i, o: o.update(offset=0, format="", layout="", ranks=[9])
    ),
    "objects far outside": lambda tree: many_objects(
        tree, lambda i, o: o.update(offset=(1 << 63) - 256 - i, shape=[1 << 62] * 8)
    ),
}


def test_the_largest_hostile_directories_cost_little(tmp_path):
    good = write_package(tmp_path / "good.ginfer")
    tree, payload = take_apart(good.read_bytes())
    for name, make in HOSTILE.items():
        directory = make(tree)
        assert 40_000 <= len(directory) <= LARGEST
        (tmp_path / name).write_bytes(assemble(directory, payload))
    results = run("-c", OPEN_AND_MEASURE, good, *(tmp_path / name for name in HOSTILE))
    assert len(results) == len(HOSTILE)
    for path, found, seconds, peak in results:
        name = Path(path).name
        print(f"{name}: {', '.join(found)}, {seconds:.2f} s, peak so far {peak >> 20} MiB")
        assert found
        assert "NotAFile" not in found
        assert seconds < 5, name
        assert peak < MEMORY_LIMIT, name
