"""Images on disk: build, rebuild, prune, refusals at load; all without a GPU."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ginfer.cuda.runtime import manifest
from ginfer.cuda.runtime.build import build_image, prune_image
from ginfer.cuda.runtime.image import Image, native_capability
from ginfer.cuda.runtime.manifest import cubin_path, image_folder, image_state, read_manifest
from ginfer.errors import ConfigError, InternalError
from tests.cuda.kernels import double_kernel, fault_kernel, meet_kernel, scale_kernel

ROOT = Path(__file__).resolve().parents[3]
ITEMS = (scale_kernel(256, 3), fault_kernel())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Files of a finished sm_80 image of ITEMS."""
    cache = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GINFER_CACHE_DIR", str(cache))
        build_image(ITEMS, "80", processes=1)
        return {p.name: p.read_bytes() for p in image_folder("80").iterdir()}


@pytest.fixture
def folder(built, tmp_path, monkeypatch):
    """The folder of such an image in a cache of its own."""
    monkeypatch.setenv("GINFER_CACHE_DIR", str(tmp_path))
    folder = image_folder("80")
    folder.mkdir(parents=True)
    for name, data in built.items():
        (folder / name).write_bytes(data)
    return folder


class Progress(list):
    """Takes the calls of a progress callback; `compiled` is how many kernels were compiled."""

    def __call__(self, done, total, name):
        self.append((done, total, name))

    @property
    def compiled(self):
        return len(self) - 1


def rebuild(items=ITEMS):
    """Build sm_80 in one process; returns (records, number of kernels that were compiled)."""
    seen = Progress()
    records = build_image(items, "80", processes=1, progress=seen)
    return records, seen.compiled


def test_a_build_leaves_cubins_and_a_manifest_and_nothing_else(folder):
    records = read_manifest(folder)
    assert set(records) == {item.source("80") for item in ITEMS}
    names = {p.name for p in folder.iterdir()}
    assert names == {"manifest.json", ".lock", *(f"{r.key}.cubin" for r in records.values())}
    for record in records.values():
        assert cubin_path(folder, record).read_bytes()[:4] == b"\x7fELF"


def test_a_second_build_compiles_nothing(folder):
    records, compiled = rebuild((*ITEMS, *ITEMS))
    assert compiled == 0
    assert [r.name for r in records] == [item.name for item in ITEMS]


def test_only_what_is_missing_is_compiled(folder):
    (victim,) = (r for r in read_manifest(folder).values() if r.name == "fault()")
    cubin_path(folder, victim).unlink()
    assert image_state(ITEMS, "80").current == 1
    records, compiled = rebuild()
    assert compiled == 1
    assert records[1] == victim
    assert image_state(ITEMS, "80").current == 2


def age(folder):
    """Make the cubins of an image those of other compilers."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("numba-cuda 0", "numba-cuda 9"))
    text = json.loads(path.read_text())
    for row in text["kernels"]:
        (folder / f"{row['key']}.cubin").rename(folder / f"old{row['key']}.cubin")
        row["key"] = f"old{row['key']}"
    path.write_text(json.dumps(text))


def test_cubins_of_other_compilers_are_renewed_and_still_load_until_then(folder):
    age(folder)
    state = image_state(ITEMS, "80")
    assert state.current == 2
    assert "numba-cuda 9" in state.compilers[0]
    records, compiled = rebuild()
    assert compiled == 2
    assert not any("numba-cuda 9" in r.compilers for r in records)
    assert prune_image(ITEMS, "80") == 2
    assert image_state(ITEMS, "80").current == 2


def test_the_largest_kernels_are_renewed_first(folder):
    items = (fault_kernel(), meet_kernel())
    rebuild(items)
    age(folder)
    records, compiled = rebuild(items)
    assert compiled == 2
    paths = [cubin_path(folder, record) for record in records]
    small, large = (path.stat() for path in paths)
    assert small.st_size < large.st_size
    assert small.st_mtime_ns > large.st_mtime_ns


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "ginfer-image-v0"}'])
def test_a_manifest_of_another_form_is_no_image(folder, text):
    (folder / "manifest.json").write_text(text)
    assert read_manifest(folder) == {}


def test_progress_starts_at_zero_and_names_each_kernel(folder):
    for path in folder.glob("*.cubin"):
        path.unlink()
    seen = Progress()
    build_image(ITEMS, "80", processes=2, progress=seen)
    assert seen[0] == (0, 2, "")
    assert [done for done, _, _ in seen] == [0, 1, 2]
    assert {name for _, _, name in seen[1:]} == {item.name for item in ITEMS}


def test_a_kernel_that_fails_is_named_and_the_others_are_kept(folder):
    with pytest.raises(InternalError, match=r"double\(\) computes in float64"):
        rebuild((*ITEMS, double_kernel(), meet_kernel()))
    assert image_state((*ITEMS, meet_kernel()), "80").current == 3
    assert not list(folder.glob(".*.cubin*"))


def test_builds_at_the_same_time_keep_the_kernels_of_both(folder):
    more = (meet_kernel(), scale_kernel(128, 5))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda item: build_image([item], "80", processes=1), more))
    assert image_state((*ITEMS, *more), "80").current == 4


def test_a_source_that_changes_during_the_build_is_named(folder, monkeypatch):
    monkeypatch.setattr("ginfer.cuda.runtime.jit.sources_digest", lambda *_: "older")
    monkeypatch.setattr("ginfer.cuda.runtime.jit._source", _uncached_source())
    with pytest.raises(InternalError, match=r"the source of fault\(\) changed during the build"):
        rebuild((fault_kernel(),))


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    manifest.write_atomically(path, b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        manifest.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_prune_removes_what_nobody_wants(folder):
    (folder / ".0123.cubin.77").write_bytes(b"half")
    (folder / "0123.cubin").write_bytes(b"unknown")
    assert image_state(ITEMS[:1], "80").stale == 1
    assert prune_image(ITEMS[:1], "80") == 3
    assert {r.name for r in read_manifest(folder).values()} == {"scale(256, 3)"}
    assert len(list(folder.glob("*.cubin"))) == 1
    assert prune_image(ITEMS[:1], "80") == 0


def test_loading_refuses_another_capability_with_the_build_to_run(folder):
    with pytest.raises(ConfigError, match=r"sm_80 image .* ginfer image build --sm 90a") as caught:
        Image.open("80", ITEMS, device_capability=(9, 0))
    assert "\n" not in str(caught.value)


def test_loading_refuses_a_missing_kernel_with_the_build_to_run(folder):
    wanted = (*ITEMS, meet_kernel(), scale_kernel(64, 2))
    with pytest.raises(
        ConfigError, match=r"sm_80 image has no current cubin of meet\(\) and 1 more"
    ):
        Image.open("80", wanted, device_capability=(8, 0))
    with pytest.raises(ConfigError, match=r"run: ginfer image build --sm 86"):
        Image.open("86", ITEMS, device_capability=(8, 6))


def test_loading_refuses_a_kernel_whose_source_has_changed(folder, monkeypatch):
    monkeypatch.setattr("ginfer.cuda.runtime.jit.sources_digest", lambda *_: "edited")
    monkeypatch.setattr("ginfer.cuda.runtime.jit._source", _uncached_source())
    with pytest.raises(ConfigError, match=r"no current cubin of scale\(256, 3\) and 1 more; run:"):
        Image.open("80", ITEMS, device_capability=(8, 0))


def _uncached_source():
    from ginfer.cuda.runtime import jit

    return jit._source.__wrapped__


def test_native_capability_is_the_most_specific_one():
    assert [native_capability(cc) for cc in ((8, 0), (8, 9), (9, 0), (12, 0))] == [
        "80",
        "89",
        "90a",
        "120a",
    ]
    with pytest.raises(ConfigError, match="the GPU is sm_75; there are kernels for sm_80, "):
        native_capability((7, 5))


def test_after_seal_nothing_is_compiled_and_nothing_loaded(folder):
    code = """
from ginfer.cuda.runtime.compiler import compile_ptx
from ginfer.cuda.runtime.image import Image
from ginfer.cuda.runtime.jit import SealedError, seal
from ginfer.errors import InternalError
from tests.cuda.kernels import scale_kernel
assert issubclass(SealedError, InternalError)
compile_ptx(scale_kernel(256, 3), "80")
seal()
for work in (
    lambda: compile_ptx(scale_kernel(256, 3), "80"),
    lambda: Image.open("80", [scale_kernel(256, 3)], device_capability=(8, 0)),
):
    try:
        work()
    except SealedError as error:
        assert "scale(256, 3)" in str(error), error
    else:
        raise SystemExit("not refused")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
