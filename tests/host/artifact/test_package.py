"""Packages written and read back: equal bytes, no copies, nothing left behind on failure."""

import hashlib
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from ginfer.artifact import (
    ExpectedTensor,
    Package,
    PackageWriter,
    PlannedResource,
    PlannedTensor,
    diff_inventory,
    verify_digests,
)
from ginfer.artifact import findings as f
from ginfer.errors import ArtifactError
from ginfer.formats import BF16, FP32, Layout
from tests.packages import IDENTITY, PLAN, payload, take_apart, write_package


def vector(name, n, *ranks):
    return PlannedTensor(
        name=name, shape=(n,), format=FP32, layout=Layout.CONTIGUOUS, ranks=ranks or (0,)
    )


def test_everything_written_is_read_back(tmp_path):
    with Package.open(write_package(tmp_path / "p.ginfer")) as package:
        assert package.identity == IDENTITY
        assert [o.name for o in package.objects] == [item.name for item in PLAN]
        for item in PLAN:
            if isinstance(item, PlannedResource):
                assert package.resource(item.name) == payload(f"{item.name}None", item.nbytes)
                continue
            tensor = package.tensor(item.name)
            assert (tensor.shape, tensor.format, tensor.layout) == (
                item.shape,
                item.format,
                item.layout,
            )
            assert tensor.data.tobytes() == payload(f"{item.name}(0,)", item.nbytes)
        assert verify_digests(package) == ()


def test_physical_order_and_alignment_follow_the_plan(tmp_path):
    plan = (
        PlannedResource(name="a", nbytes=5),
        PlannedResource(name="b", nbytes=3),
        vector("all", 3, 0, 1),
        vector("w", 65, 0),
        vector("v", 1, 0),
        vector("w", 65, 1),
        PlannedResource(name="c", nbytes=1),
    )
    path = write_package(tmp_path / "p.ginfer", plan, replace(IDENTITY, tp=2))
    with Package.open(path) as package:
        assert [o.offset for o in package.objects] == [0, 5, 4096, 8192, 8704, 12288, 12548]
        assert package.payload_offset % 4096 == 0
        assert package.nbytes == package.payload_offset + 12549
        assert list(package.rank_tensors(0)) == ["all", "w", "v"]
        assert list(package.rank_tensors(1)) == ["all", "w"]
        assert package.tensor("w", 0).data.tobytes() == payload("w(0,)", 260)
        assert package.tensor("w", 1).data.tobytes() == payload("w(1,)", 260)
        assert package.tensor("all", 0).data.tobytes() == package.tensor("all", 1).data.tobytes()


def test_same_inputs_give_the_same_file_in_any_write_order(tmp_path):
    first = write_package(tmp_path / "a.ginfer").read_bytes()
    with PackageWriter(tmp_path / "b.ginfer", IDENTITY, PLAN) as w:
        for item in reversed(PLAN):
            ranks = item.ranks if isinstance(item, PlannedTensor) else None
            data = payload(f"{item.name}{ranks}", item.nbytes)
            w.write(item.name, (data[i : i + 3] for i in range(0, len(data), 3)))
    assert (tmp_path / "b.ginfer").read_bytes() == first
    tree, blob = take_apart(first)
    for entry in tree["objects"]:
        data = blob[entry["offset"] : entry["offset"] + entry["bytes"]]
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()


def test_write_takes_arrays_of_any_type(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    plan = (
        PlannedTensor(name="w", shape=(2, 3), format=FP32, layout=Layout.CONTIGUOUS),
        PlannedTensor(name="v", shape=(2, 3), format=FP32, layout=Layout.CONTIGUOUS),
    )
    with PackageWriter(tmp_path / "p.ginfer", IDENTITY, plan) as w:
        w.write("w", values)
        w.write("v", (row for row in values))
    with Package.open(tmp_path / "p.ginfer") as package:
        for name in ("w", "v"):
            assert np.array_equal(package.tensor(name).data.view(np.float32), values.reshape(-1))


def test_views_are_read_only_share_the_mapping_and_outlive_close(tmp_path):
    package = Package.open(write_package(tmp_path / "p.ginfer"))
    one, two = (package.tensor("ids").data for _ in range(2))
    assert one.ctypes.data == two.ctypes.data
    assert not one.flags.writeable
    assert not one.flags.owndata
    with pytest.raises(ValueError, match="WRITEABLE"):
        one.flags.writeable = True
    before = one.tobytes()
    package.close()
    package.close()
    assert one.tobytes() == before
    with pytest.raises(ValueError, match="closed"):
        package.tensor("ids")


def test_opening_leaves_no_descriptor_behind(tmp_path):
    good = write_package(tmp_path / "p.ginfer")
    bad = tmp_path / "bad.ginfer"
    bad.write_bytes(good.read_bytes()[:-1])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Package.open(good).close()
        with pytest.raises(ArtifactError):
            Package.open(bad)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("data", [b"x" * 47, b"x" * 49, b""])
def test_wrong_payload_size_leaves_no_file(tmp_path, data):
    with pytest.raises(f.SizeMismatch, match="the plan says 48"), open_writer(tmp_path) as w:
        w.write("ids", data)
    assert list(tmp_path.iterdir()) == []


def open_writer(folder):
    return PackageWriter(folder / "p.ginfer", IDENTITY, PLAN)


def test_a_failing_source_leaves_the_old_file(tmp_path):
    old = write_package(tmp_path / "p.ginfer").read_bytes()

    def source():
        yield b"x"
        raise OSError("source is gone")

    with pytest.raises(OSError, match="source is gone"), open_writer(tmp_path) as w:
        w.write("ids", source())
    assert [p.name for p in tmp_path.iterdir()] == ["p.ginfer"]
    assert (tmp_path / "p.ginfer").read_bytes() == old


def test_unwritten_unknown_and_repeated_objects_are_refused(tmp_path):
    with pytest.raises(ValueError, match="7 objects are not written"), open_writer(tmp_path):
        pass
    with open_writer(tmp_path) as w:
        for item in PLAN:
            w.write(item.name, bytes(item.nbytes))
        with pytest.raises(ValueError, match="already written"):
            w.write("ids", bytes(48))
        with pytest.raises(ValueError, match="not planned"):
            w.write("nobody", b"")
    assert [p.name for p in tmp_path.iterdir()] == ["p.ginfer"]


def test_an_illegal_plan_is_refused_with_all_findings_before_writing(tmp_path):
    plan = (vector("w", 3, 0), vector("v", 3, 1), vector("u", 3, 0), vector("../t", 3, 0))
    with pytest.raises(ArtifactError) as caught:
        PackageWriter(tmp_path / "p.ginfer", replace(IDENTITY, tp=3), plan)
    kinds = {type(finding) for finding in caught.value.findings}
    assert kinds >= {f.IllegalDegree, f.SplitGroup, f.BadString}
    assert list(tmp_path.iterdir()) == []


def test_write_streams_more_than_it_holds(tmp_path):
    plan = (PlannedTensor(name="w", shape=(32 << 20,), format=BF16, layout=Layout.CONTIGUOUS),)
    chunk = bytes(1 << 20)
    tracemalloc.start()
    try:
        with PackageWriter(tmp_path / "p.ginfer", IDENTITY, plan) as w:
            w.write("w", (chunk for _ in range(64)))
        with Package.open(tmp_path / "p.ginfer") as package:
            assert package.tensor("w").data.nbytes == 64 << 20
            assert verify_digests(package) == ()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_progress_counts_every_payload_byte(tmp_path):
    seen = []
    with Package.open(write_package(tmp_path / "p.ginfer")) as package:
        verify_digests(package, lambda done, total: seen.append((done, total)))
        total = package.nbytes - package.payload_offset
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)
    assert seen[-1] == (total, total)


def test_the_difference_to_a_model_names_every_object(tmp_path):
    have = {
        item.name: ExpectedTensor(shape=item.shape, format=item.format, layout=item.layout)
        for item in PLAN
        if isinstance(item, PlannedTensor)
    }
    resources = [item.name for item in PLAN if isinstance(item, PlannedResource)]
    with Package.open(write_package(tmp_path / "p.ginfer")) as package:
        assert diff_inventory(package, have, resources) == ()
        want = {
            **have,
            "text/final_norm": replace(have["text/final_norm"], shape=(64,)),
            "ids": replace(have["ids"], format=FP32),
            "text/output_head": have["text/token_embedding"],
            resources[0]: have["ids"],
        }
        del want["scale"]
        found = diff_inventory(package, want, [resources[1], "text/final_norm", "frontend/more"])
    assert [(type(x), x.where) for x in found] == [
        (f.ShapeMismatch, "text/final_norm"),
        (f.StorageMismatch, "ids"),
        (f.MissingObject, "text/output_head"),
        (f.KindMismatch, resources[0]),
        (f.KindMismatch, "text/final_norm"),
        (f.MissingObject, "frontend/more"),
        (f.UnexpectedObject, "scale"),
    ]
