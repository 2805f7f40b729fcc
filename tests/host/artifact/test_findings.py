"""Every class of finding, each from a crafted file, and several of them from one file."""

import copy
import os
import re
import struct

import pytest

from ginfer import errors
from ginfer.artifact import Package, diff_inventory, verify_digests
from ginfer.artifact import findings as f
from ginfer.errors import ArtifactError
from tests.packages import assemble, canonical, take_apart, write_package

MAX = (1 << 63) - 1
EMBEDDING, DOWN, NORM, SCALE, IDS = range(2, 7)  # places in the directory of tests.packages


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("good") / "p.ginfer").read_bytes()


def findings_of(path, data):
    """Open a file and verify it; return the classes found, with every message one line long."""
    path.write_bytes(data)
    try:
        with Package.open(path) as package:
            found = verify_digests(package)
    except ArtifactError as e:
        found, message, code = e.findings, e.message, e.code
    else:
        message, code = str(path), "invalid_package"
    assert (code, str(path) in message, bool(found)) == ("invalid_package", True, True)
    for finding in found:
        assert isinstance(finding, f.Finding)
        assert len(finding.message) < 600
        assert finding.message.isprintable(), finding.message
        assert finding.where in finding.message
    return [type(finding) for finding in found]


def poke(offset, fmt, *values):
    """A change of bytes at a place of the file."""

    def change(data):
        changed = bytearray(data)
        struct.pack_into(fmt, changed, offset, *values)
        return bytes(changed)

    return change


# what is done to the bytes of a file -> what must be found, exactly and in this order
RAW = {
    "ends inside the prefix": (lambda d: d[:63], [f.ShortFile]),
    "is empty": (lambda d: b"", [f.ShortFile]),
    "is short and foreign": (lambda d: b"hello", [f.ShortFile, f.BadMagic]),
    "is version 1": (lambda d: b"NINFER\0\1" + d[8:], [f.OldVersion]),
    "is version 2": (lambda d: b"NINFER\0\2" + bytes(8), [f.OldVersion]),
    "has another magic": (lambda d: b"GGUF" + d[4:], [f.BadMagic]),
    "has the magic of a later version": (poke(7, "B", 4), [f.BadMagic]),
    "has reserved bytes": (poke(63, "B", 1), [f.ReservedBytes]),
    "has no directory": (poke(8, "<Q", 0), [f.EmptyDirectory]),
    "has a directory of 2^64 - 1 bytes": (
        poke(8, "<Q", (1 << 64) - 1),
        [f.DirectoryTooLarge, f.DirectoryBeyondFile],
    ),
    "has a directory beyond its end": (
        poke(8, "<QQ", 20_000, 20_480),
        [f.DirectoryBeyondFile],
    ),
    "has its payload elsewhere": (poke(16, "<Q", 8192), [f.PayloadOffset]),
    "has its payload at 2^64 - 1": (poke(16, "<Q", (1 << 64) - 1), [f.PayloadOffset]),
    "has another directory digest": (poke(24, "<Q", 0), [f.DirectoryDigest]),
    "has bytes after the directory": (poke(4095, "B", 1), [f.PaddingNotZero]),
    "has bytes before a tensor": (poke(4096 + 400, "B", 1), [f.PaddingNotZero]),
    "has another payload": (poke(4096 + 8960, "B", 77), [f.DigestMismatch]),
    "lost a byte": (lambda d: d[:-1], [f.BeyondFile]),
    "gained a byte": (lambda d: d + b"\0", [f.TrailingBytes]),
    "ends before the payload": (lambda d: d[:4090], [f.PayloadBeyondFile] + 7 * [f.BeyondFile]),
}


@pytest.mark.parametrize(("change", "expected"), RAW.values(), ids=RAW.keys())
def test_a_file_that(good, tmp_path, change, expected):
    assert findings_of(tmp_path / "p.ginfer", change(good)) == expected


def replaced(old, new):
    return lambda text: text.replace(old, new, 1)


TEXT = {
    "is not UTF-8": (replaced(b"tests", b"te\xffts"), [f.NotUtf8]),
    "is not ASCII": (replaced(b"tests", "tésts".encode()), [f.NotCanonical]),
    "is cut": (lambda t: t[:-1], [f.NotJson]),
    "is followed by another value": (lambda t: t + b"1", [f.NotJson]),
    "holds NaN": (replaced(b":null", b":NaN"), [f.NotJson]),
    "holds Infinity": (replaced(b":null", b":-Infinity"), [f.NotJson]),
    "holds a control character": (replaced(b"tests", b"te\nts"), [f.NotJson]),
    "holds a number of 100,000 digits": (replaced(b":400", b":" + b"4" * 100_000), [f.NotJson]),
    "holds a float of 100,000 digits": (replaced(b":400", b":4." + b"4" * 100_000), [f.NotJson]),
    "is nested 5 deep": (replaced(b"[0]", b"[[0]]"), [f.NestedTooDeep]),
    "is nested a million deep": (lambda t: b"[" * 1_000_000, [f.DirectoryTooLarge]),
    "is nested 10,000 deep": (lambda t: b"[" * 10_000, [f.NestedTooDeep]),
    "hides its depth in strings": (
        lambda t: b'{"a":[[["]]]]",[[[[[0]]]]]]]]}',
        [f.NestedTooDeep],
    ),
    "holds white space": (replaced(b'"tp":', b'"tp": '), [f.NotCanonical]),
    "ends with a line feed": (lambda t: t + b"\n", [f.NotCanonical]),
    "holds an escape": (replaced(b"tests", b"te\\u0073ts"), [f.NotCanonical]),
    "holds a surrogate": (replaced(b"tests", b"\\ud800"), [f.NotCanonical]),
    "starts with a byte order mark": (lambda t: b"\xef\xbb\xbf" + t, [f.NotCanonical]),
    "holds a leading zero": (replaced(b":400", b":0400"), [f.NotJson]),
    "holds a negative zero": (replaced(b'"offset":0', b'"offset":-0'), [f.NotCanonical]),
    "has unsorted members": (
        lambda t: b"{" + t[t.index(b'"obj') : -1] + b"," + t[1 : t.index(b',"obj')] + b"}",
        [f.NotCanonical],
    ),
    "has a member twice": (replaced(b'"tp":1', b'"tp":1,"tp":1'), [f.DuplicateMember]),
    "has a million parts": (lambda t: b"[" + b"1," * 1_000_000 + b"1]", [f.DirectoryTooLarge]),
    "is null": (lambda t: b"null", [f.WrongType]),
    "is a number": (lambda t: b"1", [f.WrongType]),
    "is an array": (lambda t: b"[]", [f.WrongType]),
    "is an empty object": (lambda t: b"{}", [f.MissingMember, f.MissingMember]),
}  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), TEXT.values(), ids=TEXT.keys())
def test_a_directory_that(good, tmp_path, change, expected):
    tree, payload = take_apart(good)
    forged = assemble(change(canonical(tree)), payload)
    assert findings_of(tmp_path / "p.ginfer", forged) == expected


def put(*path_and_value):
    """A change of one value of the directory; ... removes it."""
    *path, last, value = path_and_value

    def change(tree):
        node = tree
        for step in path:
            node = node[step]
        if value is ...:
            del node[last]
        else:
            node[last] = value

    return change


def at(idx, **members):
    """A change of members of object idx."""
    return lambda tree: tree["objects"][idx].update(members)


def swap(tree):
    tree["objects"][NORM], tree["objects"][SCALE] = tree["objects"][SCALE], tree["objects"][NORM]


def split_group(tree):
    tree["identity"]["tp"] = 2
    for idx, ranks in ((EMBEDDING, [0]), (DOWN, [1]), (NORM, [0]), (SCALE, [0]), (IDS, [0])):
        tree["objects"][idx]["ranks"] = ranks
    offset = 4096
    for idx, step in ((EMBEDDING, 4096), (DOWN, 8192), (NORM, 256), (SCALE, 256), (IDS, 0)):
        tree["objects"][idx]["offset"] = offset
        offset += step


TREE = {
    "root gains a member": (put("extra", 1), [f.ExtraMember]),
    "root loses the identity": (put("identity", ...), [f.MissingMember]),
    "root loses the objects": (put("objects", ...), [f.MissingMember]),
    "identity is a string": (put("identity", "qwen"), [f.WrongType]),
    "identity loses a member": (put("identity", "tp", ...), [f.MissingMember]),
    "identity gains a member": (put("identity", "rank", 0), [f.ExtraMember]),
    "model id is empty": (put("identity", "model_id", ""), [f.BadString]),
    "model id is a path": (put("identity", "model_id", "../x"), [f.BadString]),
    "model id is a number": (put("identity", "model_id", 3), [f.WrongType]),
    "weights id is too long": (put("identity", "weights_id", "w" * 129), [f.BadString]),
    "tp is 3": (put("identity", "tp", 3), [f.IllegalDegree]),
    "tp is true": (put("identity", "tp", True), [f.WrongType]),
    "tp is 1.0": (put("identity", "tp", 1.0), [f.WrongType]),
    "drafter_tp is above tp": (put("identity", "drafter_tp", 2), [f.IllegalDegree]),
    "tp is 2 for one rank": (put("identity", "tp", 2), [f.RankWithoutTensors]),
    "calibration is no digest": (put("identity", "kv_calibration", "ab"), [f.BadString]),
    "qualified is null": (put("identity", "qualified", None), [f.WrongType]),
    "qualified holds an array": (put("identity", "qualified", [[]]), [f.WrongType]),
    "producer is null": (put("identity", "producer", None), [f.WrongType]),
    "recipe digest is upper case": (
        put("identity", "producer", "recipe_sha256", "A" * 64),
        [f.BadString],
    ),
    "objects are an object": (put("objects", {}), [f.WrongType]),
    "objects are empty": (put("objects", []), [f.NoObjects]),
    "an object is a number": (put("objects", IDS, 7), [f.WrongType]),
    "kind is unknown": (at(IDS, kind="weights"), [f.UnknownKind]),
    "kind is an array": (at(IDS, kind=[]), [f.UnknownKind]),
    "kind is absent": (put("objects", IDS, "kind", ...), [f.MissingMember]),
    "a tensor has an encoding": (at(IDS, encoding="raw-bytes-v1"), [f.ExtraMember]),
    "a resource has a shape": (at(0, shape=[301]), [f.ExtraMember]),
    "a tensor lacks a digest": (put("objects", IDS, "sha256", ...), [f.MissingMember]),
    "a name is empty": (at(IDS, name=""), [f.BadString]),
    "a name climbs": (at(IDS, name="a/../../b"), [f.BadString]),
    "a name is absolute": (at(IDS, name="/etc/passwd"), [f.BadString]),
    "a name is a megabyte": (at(IDS, name="x" * 1_000_000), [f.BadString]),
    "an offset is negative": (at(IDS, offset=-1), [f.NumberRange]),
    "an offset is 2^63": (at(IDS, offset=1 << 63), [f.NumberRange]),
    "an offset is 2^64": (at(IDS, offset=1 << 64), [f.NumberRange]),
    "an offset has 300 digits": (at(IDS, offset=10**300), [f.NumberRange]),
    "an offset is a float": (at(IDS, offset=9472.5), [f.WrongType]),
    "an offset is a string": (at(IDS, offset="9472"), [f.WrongType]),
    "a shape is a number": (at(IDS, shape=12), [f.WrongType]),
    "a shape holds a float": (at(IDS, shape=[2, 3, 2.0]), [f.WrongType]),
    "a shape holds true": (at(NORM, shape=[True]), [f.WrongType]),
    "a shape holds 0": (at(IDS, shape=[0, 3, 2]), [f.IllegalDimension]),
    "a shape has 17 dimensions": (at(IDS, shape=[1] * 16 + [12]), [f.IllegalShape]),
    "a matrix has one dimension": (at(DOWN, shape=[15]), [f.IllegalShape]),
    "rows do not divide by the group": (at(EMBEDDING, shape=[5, 65]), [f.IllegalShape]),
    "a size exceeds 64 bits": (at(IDS, shape=[MAX, MAX]), [f.SizeOverflow]),
    "a size is wrong": (at(NORM, shape=[66]), [f.SizeMismatch]),
    "a format is unknown": (at(IDS, format="Q3"), [f.UnknownFormat]),
    "a layout is unknown": (at(IDS, layout="tile"), [f.UnknownLayout]),
    "format and layout are unknown": (
        at(IDS, format="Q3", layout="tile"),
        [f.UnknownFormat, f.UnknownLayout],
    ),
    "a format lacks the layout": (at(DOWN, layout="rows-v1"), [f.IllegalLayout]),
    "a registered format has no layout": (at(DOWN, format="NVFP4"), [f.IllegalLayout]),
    "an encoding is unknown": (at(0, encoding="gzip"), [f.UnknownEncoding]),
    "a resource is empty": (at(1, bytes=0), [f.EmptyObject]),
    "ranks are empty": (at(IDS, ranks=[]), [f.IllegalRanks, f.Misaligned]),
    "ranks fall": (at(IDS, ranks=[1, 0]), [f.IllegalRanks, f.Misaligned]),
    "a rank is beyond tp": (at(IDS, ranks=[1]), [f.IllegalRanks, f.Misaligned]),
    "a name occurs twice": (at(IDS, name="scale"), [f.DuplicateName]),
    "a tensor is named like a resource": (
        at(IDS, name="frontend/tokenizer.json"),
        [f.DuplicateName],
    ),
    "an offset is odd": (at(IDS, offset=9473), [f.Misaligned, f.Gap, f.BeyondFile]),
    "an offset is near 2^63": (at(IDS, offset=MAX - 255), [f.Gap, f.BeyondFile]),
    "an end exceeds 64 bits": (at(IDS, offset=MAX), [f.Misaligned, f.Gap, f.SizeOverflow]),
    "objects overlap": (at(IDS, offset=9216), [f.Overlap, f.TrailingBytes]),
    "objects are out of order": (swap, [f.Gap, f.Overlap]),
    "the first object starts late": (at(0, offset=1), [f.Gap, f.Overlap]),
    "a group is split": (split_group, [f.BeyondFile, f.SplitGroup] + 3 * [f.BeyondFile]),
    "a digest is wrong": (at(IDS, sha256="0" * 64), [f.DigestMismatch]),
}


@pytest.mark.parametrize(("change", "expected"), TREE.values(), ids=TREE.keys())
def test_when(good, tmp_path, change, expected):
    tree, payload = take_apart(good)
    change(tree)
    assert findings_of(tmp_path / "p.ginfer", assemble(canonical(tree), payload)) == expected


def test_all_findings_come_at_once_and_name_their_objects(good, tmp_path):
    tree, payload = take_apart(good)
    tree["identity"]["tp"] = 7
    tree["objects"][1]["encoding"] = "zip"
    tree["objects"][DOWN]["layout"] = "rows-v1"
    tree["objects"][NORM]["bytes"] = 131
    tree["objects"][SCALE]["ranks"] = [0, 0]
    del tree["objects"][IDS]["format"]
    forged = bytearray(assemble(canonical(tree), payload))
    forged[24] ^= 1
    forged[60] ^= 1
    (tmp_path / "p.ginfer").write_bytes(forged)
    with pytest.raises(ArtifactError, match="and 8 more findings") as caught:
        Package.open(tmp_path / "p.ginfer")
    assert [(type(x), x.where) for x in caught.value.findings] == [
        (f.ReservedBytes, "prefix"),
        (f.DirectoryDigest, "directory"),
        (f.IllegalDegree, "identity.tp"),
        (f.MissingMember, f"objects[{IDS}] 'ids'"),
        (f.UnknownEncoding, "frontend/chat_template.jinja"),
        (f.IllegalLayout, "text/layers/0/mlp/down"),
        (f.SizeMismatch, "text/final_norm"),
        (f.IllegalRanks, "scale"),
        (f.Misaligned, "scale"),
    ]


def test_findings_beyond_the_limit_are_counted(good, tmp_path):
    tree, payload = take_apart(good)
    tree["objects"] = [1] * 2500
    path = tmp_path / "p.ginfer"
    path.write_bytes(assemble(canonical(tree), payload))
    with pytest.raises(ArtifactError) as caught:
        Package.open(path)
    *listed, last = caught.value.findings
    assert len(listed) == f.MAX_LISTED
    assert isinstance(last, f.MoreFindings)
    assert f"{2500 - f.MAX_LISTED} further" in last.message


def test_paths_that_are_no_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", "/dev/zero", "a\0b"):
        with pytest.raises(ArtifactError) as caught:
            Package.open(path)
        assert [type(x) for x in caught.value.findings] == [f.NotAFile]


def test_old_versions_get_a_hint(tmp_path):
    for version in (1, 2):
        (tmp_path / "p").write_bytes(b"NINFER\0" + bytes([version]) + bytes(100))
        with pytest.raises(ArtifactError, match=rf"version {version}; .*pack the checkpoint again"):
            Package.open(tmp_path / "p")


def test_every_class_of_finding_is_produced_here(good, tmp_path):
    seen = {kind for _, kinds in (*RAW.values(), *TEXT.values(), *TREE.values()) for kind in kinds}
    seen |= {f.NotAFile, f.MoreFindings}
    path = tmp_path / "p.ginfer"
    path.write_bytes(good)
    with Package.open(path) as package:
        seen |= {type(x) for x in diff_inventory(package, {}, ["frontend/x", "ids"])}
    binding_in_test_package = {f.ShapeMismatch, f.StorageMismatch}
    assert set(f.Finding.__subclasses__()) == seen | binding_in_test_package
    drawn = set(re.findall(r"\w+", errors.__doc__))
    assert {kind.__name__ for kind in f.Finding.__subclasses__()} <= drawn
    codes = [kind.code for kind in f.Finding.__subclasses__()]
    assert len(set(codes)) == len(codes)


def test_the_directory_of_the_fixture_is_what_the_tables_say(good):
    tree, _ = take_apart(good)
    assert assemble(canonical(copy.deepcopy(tree)), take_apart(good)[1]) == good
    names = [tree["objects"][i]["name"] for i in (EMBEDDING, DOWN, NORM, SCALE, IDS)]
    assert [n.rsplit("/")[-1] for n in names] == [
        "token_embedding", "down", "final_norm", "scale", "ids",
    ]  # fmt: skip
