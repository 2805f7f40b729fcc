"""Corrupted packages by the thousand, run as a program in a process of its own.

`python -m tests.host.artifact.corruption FOLDER COUNT SEED` corrupts, opens and verifies COUNT
packages and prints one JSON line: cases, outcomes by finding, slowest case, resident memory above
the baseline. It ends with a traceback at the first case that breaks a rule:
only ArtifactError comes out; a change of a file that is not forged anew is always found; a forged
file that opens is a valid package whose bytes all lie in the file; no case takes 5 s.
"""

import copy
import json
import random
import signal
import struct
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from ginfer.artifact import Package, PlannedResource, PlannedTensor, ResourceRecord, verify_digests
from ginfer.artifact import findings as f
from ginfer.artifact.directory import encode
from ginfer.artifact.writer import lay_out
from ginfer.errors import ArtifactError
from ginfer.formats import BF16, FORMATS, FP32, Q4G64_F16S, Layout
from tests.packages import IDENTITY, PLAN, assemble, canonical, take_apart, write_package

CASE_LIMIT_S = 5
NUMBERS = [
    0, 1, 2, 3, 4, 63, 64, 255, 256, 4095, 4096, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
    1 << 32, (1 << 63) - 4096, (1 << 63) - 256, (1 << 63) - 1, 1 << 63, (1 << 64) - 256,
    (1 << 64) - 1, 1 << 64, 10**30, 10**399, -1, -(1 << 63),
]  # fmt: skip
VALUES = [
    *NUMBERS, 0.0, 1.5, 1e300, True, False, None, "", "x", "tensor", "resource", "BF16", "NVFP4",
    "tile128x64-v1", "rows-v1", "../x", "/x", "a//b", "0" * 64, "F" * 64, "\x7f", "x" * 5000,
    "\u00e9", [], {}, [[]], [{}], {"a": {}}, [0], [0, 1], [1, 0], [-1], [1 << 63] * 17,
]  # fmt: skip
TEXTS = [
    b" ", b"\n", b"\0", b"\xff", b"\xed\xa0\x80", b"\\", b"\\ud800", b'"', b"{", b"}", b"[", b"]",
    b",", b":", b"NaN", b"-Infinity", b"null", b"true", b"1e999", b"-0", b"00", b"9" * 5000,
    b"0." + b"3" * 5000, b"[" * 3, b"[" * 5000, b'{"a":' * 5000, b"[" * 5000 + b"]" * 5000,
    b'"name":"x",', b'"offset":0,', b"[]," * 3000, b"\xf0\x9f\x98\x80", b"//", b"\xef\xbb\xbf",
]  # fmt: skip


def bases(folder):
    """Return valid files: one rank with every layout, four ranks with replication, resources."""

    def tensor(name, shape, fmt, layout, *ranks):
        return PlannedTensor(name=name, shape=shape, format=fmt, layout=layout, ranks=ranks)

    ranked = (
        tensor("all", (2,), FP32, Layout.CONTIGUOUS, 0, 1, 2, 3),
        tensor("left", (3, 64), Q4G64_F16S, Layout.TILE, 0, 1),
        tensor("left/norm", (3,), BF16, Layout.CONTIGUOUS, 0, 1),
        tensor("left", (3, 64), Q4G64_F16S, Layout.TILE, 2, 3),
        PlannedResource(name="frontend/tokenizer.json", nbytes=100),
    )
    four = replace(IDENTITY, tp=4, drafter_tp=2, kv_calibration="ab" * 32, qualified=())
    small = (PlannedResource(name="r", nbytes=1), tensor("t", (), FP32, Layout.CONTIGUOUS, 0))
    return [
        write_package(folder / "base.ginfer", plan, identity).read_bytes()
        for plan, identity in ((PLAN, IDENTITY), (ranked, four), (small, IDENTITY))
    ]


# -- changes of the bytes of a file


def flip_bits(rng, data):
    """Flip 1 to 8 bits of the prefix, the directory or anywhere."""
    changed = bytearray(data)
    end = min(rng.choice((64, 64 + struct.unpack_from("<Q", data, 8)[0], len(data))), len(data))
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng, data):
    return data[: rng.choice((rng.randrange(len(data)), rng.randrange(80), len(data) - 1))]


def extend(rng, data):
    return data + rng.choice((b"\0", bytes(4096), rng.randbytes(rng.randrange(1, 300)), data))


def forge_prefix(rng, data):
    """Write another length or offset into the prefix."""
    changed = bytearray(data)
    at = rng.choice((8, 16))
    (now,) = struct.unpack_from("<Q", data, at)
    number = rng.choice((*NUMBERS, now + 1, now - 1, now ^ 4096, len(data), rng.getrandbits(64)))
    struct.pack_into("<Q", changed, at, number % (1 << 64))
    return bytes(changed)


def splice(rng, data):
    """Overwrite, insert or remove a piece."""
    a, b, n = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(1, 600)
    how = rng.randrange(3)
    if how == 0:
        return data[:a] + data[b : b + n] + data[a + n :]
    return data[:a] + data[b : b + n] + data[a:] if how == 1 else data[:a] + data[a + n :]


# -- changes of the directory, under a prefix that is forged to match


def places(node, path=()):
    """Yield the path of every value."""
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in children:
        if isinstance(child, (dict, list)):
            yield from places(child, (*path, key))
        else:
            yield (*path, key)


def replace_value(rng, tree):
    """Put a hostile value at any place."""
    path = rng.choice([p for p in places(tree) if p])
    node = tree
    for key in path[:-1]:
        node = node[key]
    now = node[path[-1]]
    near = [now + 1, now - 1, now * 2, now + 256, now + 4096] if type(now) is int else []
    node[path[-1]] = copy.deepcopy(rng.choice(near * 8 + VALUES))


def change_members(rng, tree):
    """Remove, add or rename a member."""
    nodes = [tree, tree["identity"], tree["identity"]["producer"], *tree["objects"]]
    node = rng.choice([n for n in nodes if isinstance(n, dict) and n])
    key = rng.choice(list(node))
    how = rng.randrange(3)
    if how == 0:
        del node[key]
    elif how == 1:
        node[rng.choice(("extra", "ranks", "encoding", "shape", "x" * 300))] = rng.choice(VALUES)
    else:
        node[key.upper()] = node.pop(key)


def change_objects(rng, tree):
    """Repeat, remove, swap or empty objects, or give one the name, place or ranks of another."""
    objects = tree["objects"]
    a, b = (rng.randrange(len(objects)) for _ in range(2))
    how = rng.randrange(6)
    if how == 0:
        objects.insert(b, copy.deepcopy(objects[a]))
    elif how == 1:
        del objects[a]
    elif how == 2:
        objects[a], objects[b] = objects[b], objects[a]
    elif how == 3:
        objects.extend(copy.deepcopy(objects[a]) for _ in range(rng.randrange(300)))
    elif how == 4:
        key = rng.choice(("name", "offset", "bytes", "ranks", "shape", "sha256"))
        if key in objects[b]:
            objects[a][key] = copy.deepcopy(objects[b][key])
    else:
        tree["objects"] = []


def shift(rng, tree):
    """Move all objects from one on by a constant."""
    step = rng.choice((-4096, -256, -1, 1, 256, 4096, 1 << 62, 1 << 63))
    for entry in tree["objects"][rng.randrange(len(tree["objects"])) :]:
        entry["offset"] += step


def hostile_text(rng, text):
    """Insert, overwrite or cut text of the directory."""
    a = rng.randrange(len(text))
    piece = rng.choice(TEXTS)
    how = rng.randrange(4)
    if how == 0:
        return text[:a] + piece + text[a:]
    if how == 1:
        return text[:a] + piece + text[a + len(piece) :]
    if how == 2:
        return text[:a] + text[a + rng.randrange(1, 40) :]
    changed = bytearray(text)
    changed[a] ^= 1 << rng.randrange(8)
    return bytes(changed)


RAW = (flip_bits, flip_bits, truncate, extend, forge_prefix, splice)
TREES = (replace_value, replace_value, replace_value, change_members, change_objects, shift)


def corrupt(rng, data):
    """Return a corrupted file, and whether its directory digest was forged to match."""
    if rng.random() < 0.35:
        return rng.choice(RAW)(rng, data), False
    tree, payload = take_apart(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.75:
            try:
                rng.choice(TREES)(rng, tree)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                break  # an earlier change left nothing to change here
    text = canonical(tree)
    if rng.random() < 0.4:
        text = hostile_text(rng, text)
    forged = assemble(text, payload)
    return (
        rng.choice((truncate, extend, splice))(rng, forged) if rng.random() < 0.1 else forged
    ), True


def examine(path, data, forged):
    """Open and verify one file; return the classes of its findings. Raises on a broken rule."""
    path.write_bytes(data)
    try:
        package = Package.open(path)
    except ArtifactError as e:
        findings = e.findings
    else:
        return examine_opened(package, data, forged)
    assert findings
    assert all(isinstance(x, f.Finding) and x.message.isprintable() for x in findings)
    return [type(x).__name__ for x in findings]


def planned(record):
    """Return the plan of an object as the writer takes it."""
    if isinstance(record, ResourceRecord):
        return PlannedResource(name=record.name, nbytes=record.bytes)
    return PlannedTensor(
        name=record.name,
        shape=record.shape,
        format=FORMATS[record.format],
        layout=Layout(record.layout),
        ranks=record.ranks,
    )


def examine_opened(package, data, forged):
    """Verify a file that opened, and compare all that it gives out with its bytes."""
    with package:
        found = verify_digests(package)
        assert forged or found, "a change was not found"
        directory = encode(package.identity, package.objects)
        assert data[64 : 64 + len(directory)] == directory
        rewritten = lay_out([planned(record) for record in package.objects])
        assert [r.offset for r in rewritten] == [r.offset for r in package.objects]
        for record in package.objects:
            start = package.payload_offset + record.offset
            stored = data[start : start + record.bytes]
            assert len(stored) == record.bytes
            if record.name in package.resources:
                assert package.resource(record.name) == stored
            else:
                assert package.tensor(record.name, record.ranks[0]).data.tobytes() == stored
        return [type(x).__name__ for x in found] or ["valid"]


def too_slow(signum, frame):
    raise TimeoutError(f"a case took more than {CASE_LIMIT_S} s")


def resident_nbytes(field):
    """Resident memory of this process: now (VmRSS) or at its peak (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def run(folder, count, seed):
    """Examine `count` corrupted files; return what the module promises."""
    rng = random.Random(seed)
    valid = bases(folder)
    path = folder / "case.ginfer"
    for data in valid:
        assert examine(path, data, True) == ["valid"]
    outcomes = Counter()
    slowest = 0.0
    baseline = resident_nbytes("VmRSS")
    signal.signal(signal.SIGALRM, too_slow)
    for case in range(count):
        base = data = rng.choice(valid)
        while data == base:
            data, forged = corrupt(rng, base)
        signal.setitimer(signal.ITIMER_REAL, CASE_LIMIT_S)
        start = time.perf_counter()
        try:
            outcomes.update(set(examine(path, data, forged)))
        except BaseException:
            (folder / "failed.ginfer").write_bytes(data)
            print(f"seed {seed} case {case}: see {folder / 'failed.ginfer'}", file=sys.stderr)
            raise
        slowest = max(slowest, time.perf_counter() - start)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {
        "cases": count,
        "outcomes": dict(outcomes.most_common()),
        "slowest_s": round(slowest, 3),
        "memory_nbytes": resident_nbytes("VmHWM") - baseline,
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
