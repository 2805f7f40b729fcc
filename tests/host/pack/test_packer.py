"""The packer: name map, every fault at once, deterministic bytes, bounded memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ginfer.artifact.reader import Package
from ginfer.env import DEMO_CHECKPOINT
from ginfer.models.contract import PROFILES
from ginfer.models.qwen import QWEN_27B, QWEN_DEMO
from ginfer.models.registry import CONTRACTS
from scripts.make_fixture import checkpoint_shapes, random_arrays, write_checkpoint
from scripts.pack.__main__ import main
from tests.checkpoints import full_27b_shapes
from tests.oracles.formats import decode

TEXT = "model.language_model."
SMALL = replace(
    QWEN_DEMO,
    model_id="small",
    spec=replace(QWEN_DEMO.spec, hidden_size=96, mlp_width=80, vocab_size=160, num_token_ids=131),
    vision=replace(
        QWEN_DEMO.vision, depth=1, hidden_size=32, mlp_width=48, num_positions=4, out_size=96
    ),
    drafter=None,
)


@pytest.fixture(scope="module", autouse=True)
def _small_model():
    CONTRACTS[SMALL.model_id] = SMALL
    yield
    del CONTRACTS[SMALL.model_id]


@pytest.fixture(scope="module")
def arrays():
    return random_arrays(checkpoint_shapes(SMALL), seed=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, arrays):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, SMALL, arrays)
    return folder


def run(*arguments):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def pack(checkpoint, out, weights="bf16", model="small"):
    result = run(checkpoint, out, "--model", model, "--weights", weights)
    assert result.exit_code == 0, result.output
    return out


def faults(checkpoint, *options, model="small"):
    result = run(checkpoint, *options, "--model", model, "--weights", "bf16")
    assert result.exit_code == 1
    return result.output.splitlines()


@pytest.fixture(scope="module")
def package(checkpoint, tmp_path_factory):
    with Package.open(pack(checkpoint, tmp_path_factory.mktemp("out") / "p.ginfer")) as p:
        yield p


def values(package, name):
    t = package.tensor(name)
    return decode(t.format, t.layout, t.shape, t.data)


def test_package_has_exactly_the_contracts_objects(package):
    assert [t.name for t in package.tensors] == [t.name for t in SMALL.inventory()]
    assert {t.name: t.shape for t in package.tensors} == {
        t.name: t.shape for t in SMALL.inventory()
    }
    for name in SMALL.resources:
        assert package.resource(name) == f"content of {name}\n".encode()
    assert [o.name for o in package.objects][: len(SMALL.resources)] == list(SMALL.resources)


def test_query_and_gate_rows_are_taken_apart_per_head(package, arrays):
    prefix = TEXT + "layers.3.self_attn."
    q = arrays[prefix + "q_proj.weight"]
    got = values(package, "text/layers/3/attention/query_key_gate_value")
    a = SMALL.spec.attention
    for head in range(a.num_q_heads):
        for row in (0, 1, 255):
            np.testing.assert_array_equal(got[head * 256 + row], q[head * 512 + row])
            gate = a.q_width + a.kv_width + head * 256 + row
            np.testing.assert_array_equal(got[gate], q[head * 512 + 256 + row])
    np.testing.assert_array_equal(
        got[a.q_width : a.q_width + a.kv_width], arrays[prefix + "k_proj.weight"]
    )
    np.testing.assert_array_equal(got[-a.kv_width :], arrays[prefix + "v_proj.weight"])
    wrong = np.concatenate([q[: a.q_width], arrays[prefix + "k_proj.weight"], q[a.q_width :]])
    assert not np.array_equal(got[: len(wrong)], wrong)


def test_gate_and_up_alternate_in_row_tiles(package, arrays):
    got = values(package, "text/layers/0/mlp/gate_up")
    for row in range(SMALL.spec.mlp_width):
        at = row // 16 * 32 + row % 16
        np.testing.assert_array_equal(got[at], arrays[TEXT + "layers.0.mlp.gate_proj.weight"][row])
        np.testing.assert_array_equal(
            got[at + 16], arrays[TEXT + "layers.0.mlp.up_proj.weight"][row]
        )


def test_gated_deltanet_tensors_are_fused_in_order_and_tap_major(package, arrays):
    prefix, ours = TEXT + "layers.0.linear_attn.", "text/layers/0/gdn/"
    g = SMALL.spec.gdn
    fused = values(package, ours + "query_key_value_z")
    np.testing.assert_array_equal(fused[: g.conv_channels], arrays[prefix + "in_proj_qkv.weight"])
    np.testing.assert_array_equal(fused[g.conv_channels :], arrays[prefix + "in_proj_z.weight"])
    ab = values(package, ours + "a_b_projection")
    np.testing.assert_array_equal(ab[: g.num_v_heads], arrays[prefix + "in_proj_a.weight"])
    np.testing.assert_array_equal(ab[g.num_v_heads :], arrays[prefix + "in_proj_b.weight"])
    convolution = values(package, ours + "convolution")
    for tap in range(4):
        np.testing.assert_array_equal(convolution[tap], arrays[prefix + "conv1d.weight"][:, 0, tap])
    for name, theirs in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("norm", "norm.weight")):
        np.testing.assert_array_equal(values(package, ours + name), arrays[prefix + theirs])
    assert package.tensor(ours + "a_log").format.name == "FP32"


def test_every_other_tensor_keeps_its_rows(package, arrays):
    fused = {"gate_up", "query_key_gate_value", "query_key_value_z", "a_b_projection"}
    rest = [
        t.name
        for t in SMALL.inventory()
        if t.name.rpartition("/")[2] not in fused | {"convolution"}
    ]
    sources = {a.tobytes(): name for name, a in arrays.items() if a.size}
    used = {sources[values(package, name).tobytes()] for name in rest}
    assert len(used) == len(rest)
    kinds = r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|in_proj_\w+|conv1d)\."
    assert used == {name for name in arrays if not re.search(kinds, name)}


def test_formats_follow_the_profile(checkpoint, tmp_path):
    with Package.open(pack(checkpoint, tmp_path / "q.ginfer", "groupwise-int")) as p:
        profile = PROFILES["groupwise-int"]
        for target in SMALL.inventory():
            t = p.tensor(target.name)
            assert (t.format, t.layout) == profile.storage(target.role)
        assert p.identity.weights_id == "groupwise-int"


def test_second_pack_gives_identical_bytes_and_a_digest_file(checkpoint, package, tmp_path):
    again = pack(checkpoint, tmp_path / "again.ginfer")
    assert again.read_bytes() == package.path.read_bytes()
    digest = hashlib.sha256(again.read_bytes()).hexdigest()
    assert (tmp_path / "again.ginfer.sha256").read_text() == f"{digest}  again.ginfer\n"
    assert sorted(os.listdir(tmp_path)) == ["again.ginfer", "again.ginfer.sha256"]


def test_one_changed_weight_changes_the_source_digest(arrays, package, tmp_path):
    changed = dict(arrays)
    name = TEXT + "norm.weight"
    changed[name] = arrays[name] + 1
    write_checkpoint(tmp_path / "c", SMALL, changed)
    with Package.open(pack(tmp_path / "c", tmp_path / "p.ginfer")) as other:
        ours, theirs = package.identity.producer, other.identity.producer
        assert ours.source_sha256 != theirs.source_sha256
        assert ours.recipe_sha256 == theirs.recipe_sha256


@pytest.mark.parametrize(
    "replacements",
    [
        {TEXT: "language_model.model.", "lm_head.": "language_model.lm_head."},
        {TEXT: "model.", "model.visual.": "visual."},
    ],
)
def test_prefix_variants_of_exports_are_read(arrays, package, tmp_path, replacements):
    renamed = {}
    for name, array in arrays.items():
        new = name
        for old, prefix in replacements.items():
            if name.startswith(old):
                new = prefix + name.removeprefix(old)
        renamed[new] = array
    write_checkpoint(tmp_path / "c", SMALL, renamed)
    with Package.open(pack(tmp_path / "c", tmp_path / "p.ginfer")) as other:
        for t in package.tensors:
            np.testing.assert_array_equal(other.tensor(t.name).data, package.tensor(t.name).data)


def test_mtp_tensors_are_accepted_and_left_out(arrays, package, tmp_path):
    extra = {"mtp.fc.weight": np.ones((3, 3), np.float32), "mtp.norm.weight": np.ones(7, "f4")}
    write_checkpoint(tmp_path / "c", SMALL, arrays | extra)
    with Package.open(pack(tmp_path / "c", tmp_path / "p.ginfer")) as other:
        assert [t.name for t in other.tensors] == [t.name for t in package.tensors]


def test_every_missing_extra_and_misshapen_tensor_is_listed_at_once(arrays, tmp_path):
    broken = dict(arrays)
    del broken[TEXT + "layers.2.mlp.up_proj.weight"]
    del broken["model.visual.merger.norm.bias"]
    broken[TEXT + "layers.9.input_layernorm.weight"] = np.ones(96, np.float32)
    broken["rotary.inv_freq"] = np.ones(3, np.float32)
    broken["lm_head.weight"] = np.ones((160, 64), np.float32)
    broken["model.norm.weight"] = np.ones(96, np.float32)
    write_checkpoint(tmp_path / "c", SMALL, broken)
    (tmp_path / "c" / "tokenizer.json").unlink()
    out = tmp_path / "p.ginfer"
    assert set(faults(tmp_path / "c", out)) == {
        f"error: missing tensor {TEXT}layers.2.mlp.up_proj.weight [80, 96]",
        "error: missing tensor model.visual.merger.norm.bias [32]",
        f"error: extra tensor {TEXT}layers.9.input_layernorm.weight [96]",
        "error: extra tensor rotary.inv_freq [3]",
        "error: tensor lm_head.weight has shape [160, 64], [160, 96] expected",
        f"error: tensor {TEXT}norm.weight is the same as model.norm.weight",
        "error: missing file tokenizer.json",
    }
    assert not out.exists()


def test_files_that_are_no_safetensors_are_all_named(checkpoint, tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    index = {"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(4)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "0.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    (folder / "1.safetensors").write_bytes(b"\xff" * 16)
    entry = {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}
    header = json.dumps({"t": entry}).encode()
    (folder / "2.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    lines = faults(folder, tmp_path / "p.ginfer")
    assert [line.split()[1] for line in lines] == [f"{n}.safetensors:" for n in (3, 0, 1, 2)]
    assert "outside the file" in lines[-1]
    assert "no safetensors" in faults(tmp_path, tmp_path / "p.ginfer")[0]


def test_value_that_no_scale_holds_names_the_tensor_and_leaves_no_file(arrays, tmp_path):
    name = TEXT + "layers.1.mlp.down_proj.weight"
    write_checkpoint(tmp_path / "c", SMALL, arrays | {name: np.full_like(arrays[name], np.inf)})
    out = tmp_path / "out" / "p.ginfer"
    out.parent.mkdir()
    (line,) = faults(tmp_path / "c", out)
    assert line.startswith(f"error: text/layers/1/mlp/down (from {name}): ")
    assert list(out.parent.iterdir()) == []


def test_dry_run_takes_the_names_and_shapes_of_the_full_checkpoint(tmp_path):
    shapes = full_27b_shapes()
    assert len(shapes) == 1199
    assert sum(int(np.prod(s)) for s in shapes.values()) == 27_781_427_952
    listing = [{"name": name, "shape": shape} for name, shape in shapes.items()]
    path = tmp_path / "names.json"
    path.write_text(json.dumps(listing))
    options = ("--dry-run", "--model", QWEN_27B.model_id, "--weights", "groupwise-int")
    result = run(path, *options)
    assert result.exit_code == 0
    assert result.output == ("1199 tensors fit qwen3.8-27b: 1184 used, 15 left out\n")
    listing[7]["shape"] = (1, 2)
    gone = listing.pop(500)["name"]
    path.write_text(json.dumps(listing))
    lines = faults(path, "--dry-run", model=QWEN_27B.model_id)
    assert len(lines) == 2
    assert listing[7]["name"] in lines[0]
    assert gone in lines[1]


def test_dry_run_checks_a_folder_and_writes_nothing(checkpoint):
    before = sorted(os.listdir(checkpoint))
    result = run(checkpoint, "--dry-run", "--model", "small", "--weights", "bf16")
    assert result.exit_code == 0
    assert "fit small" in result.output
    assert sorted(os.listdir(checkpoint)) == before


MEASURE = """
import resource, sys
from pathlib import Path
import numpy as np
from ginfer.formats import Q4G64_F16S, Layout
from scripts.pack import codecs, packer
from scripts.pack.recipe import Source
from scripts.pack.sources import Checkpoint
rows = int(sys.argv[2])
source = Source("w", (131072, 4096))
with Checkpoint(Path(sys.argv[1])) as checkpoint:
    def run(stop):
        for block in packer.blocks(checkpoint, {"w": "w"}, (source.rows(0, stop),)):
            codecs.encode(Q4G64_F16S, Layout.TILE, block)
    run(256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(rows)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_matrix(tmp_path):
    shape, rows = (131072, 4096), 16384  # 1 GiB, sparse; an eighth of it is read
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 * shape[0] * shape[1]]}}
    ).encode()
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2 * shape[0] * shape[1])
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(rows)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(result.stdout) < 16 * 1024  # KiB; the rows read are 128 MiB


@pytest.mark.skipif(not DEMO_CHECKPOINT.read(), reason=f"{DEMO_CHECKPOINT.name} is not set")
def test_demo_package_in_the_repository_is_what_the_packer_makes(tmp_path, request):
    name = "qwen3.8-demo-groupwise-int.ginfer"
    out = pack(DEMO_CHECKPOINT.read(), tmp_path / name, "groupwise-int", QWEN_DEMO.model_id)
    committed = request.config.rootpath / "appliance" / "demo" / name
    assert out.read_bytes() == committed.read_bytes()


def test_demo_package_has_the_digest_beside_it(request):
    folder = request.config.rootpath / "appliance" / "demo"
    digest, name = next(folder.glob("*.sha256")).read_text().split()
    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
