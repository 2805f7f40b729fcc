"""The packer with a drafter: its tensors beside the model's, each allocation a profile."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from ginfer.artifact.reader import Package
from ginfer.models.contract import PROFILES
from ginfer.models.qwen import QWEN_27B, QWEN_DEMO
from ginfer.models.registry import CONTRACTS
from scripts.make_fixture import (
    checkpoint_shapes,
    drafter_shapes,
    random_arrays,
    write_checkpoint,
    write_safetensors,
)
from scripts.pack.__main__ import main
from scripts.pack.codecs import absmax_codes
from tests.checkpoints import drafter_27b_shapes, full_27b_shapes
from tests.oracles.formats import decode

ALLOCATIONS = {"q4": (4, 4), "q4w8": (8, 4), "w8": (8, 8)}  # bits of fc and attention, of the MLP
SMALL = replace(
    QWEN_DEMO,
    model_id="small-drafted",
    spec=replace(
        QWEN_DEMO.spec,
        hidden_size=96,
        mlp_width=80,
        vocab_size=160,
        num_token_ids=131,
        layers=QWEN_DEMO.spec.layers[:4],
    ),
    vision=replace(
        QWEN_DEMO.vision, depth=1, hidden_size=32, mlp_width=48, num_positions=4, out_size=96
    ),
    drafter=replace(
        QWEN_DEMO.drafter,
        num_layers=2,
        hidden_size=96,
        vocab_size=160,
        mlp_width=112,
        head_dim=16,
        mask_id=130,
        tapped_layers=(1, 3),
        selector_rank=8,
    ),
    profiles=("bf16", *(f"groupwise-int-dflash2-{name}" for name in ALLOCATIONS)),
)


@pytest.fixture(scope="module", autouse=True)
def _small_model():
    CONTRACTS[SMALL.model_id] = SMALL
    yield
    del CONTRACTS[SMALL.model_id]


@pytest.fixture(scope="module")
def arrays():
    return random_arrays(drafter_shapes(SMALL.drafter), seed=9)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, arrays):
    root = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(root / "model", SMALL, random_arrays(checkpoint_shapes(SMALL), seed=5))
    (root / "drafter").mkdir()
    write_safetensors(root / "drafter" / "model.safetensors", arrays)
    return root


def run(*arguments):
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def pack(folders, out, weights, drafter="drafter", model="model"):
    options = ("--model", SMALL.model_id, "--weights", f"groupwise-int-dflash2-{weights}")
    return run(folders / model, out, *options, "--drafter", folders / drafter)


@pytest.mark.parametrize("weights", ALLOCATIONS)
def test_package_holds_the_drafter_in_the_allocation_of_its_name(
    folders, arrays, tmp_path, weights
):
    result = pack(folders, tmp_path / "p.ginfer", weights)
    assert result.exit_code == 0, result.output
    wide, mlp = ALLOCATIONS[weights]
    with Package.open(tmp_path / "p.ginfer") as package:
        assert package.identity.drafter_tp == 1
        names = [t.name for t in package.tensors if t.name.startswith("dflash2/")]
        assert len(names) == len(arrays)
        for name in names:
            t = package.tensor(name)
            source = name.removeprefix("dflash2/").replace("/", ".")
            want = arrays.get(source, arrays.get(source + ".weight"))
            got = decode(t.format, t.layout, t.shape, t.data)
            if name.endswith(("_proj", "/fc")):
                bits = mlp if "/mlp/" in name else wide
                assert t.format is {4: PROFILES["groupwise-int"].matrix, 8: HEAD}[bits]
                padded = np.pad(want, ((0, 0), (0, -want.shape[1] % 64)))
                coarse = represented(*absmax_codes(padded, *{4: (64, 7), 8: (32, 127)}[bits]))
                error = np.square(got - want).sum() / np.square(coarse - padded).sum()
                assert error < 0.85 if bits == 4 else error == pytest.approx(1)
            else:
                np.testing.assert_array_equal(got.reshape(want.shape), want)


def represented(codes, scales):
    """Weights of codes [N, K] with a scale per group."""
    groups = codes.reshape(*scales.shape, -1) * scales.astype(np.float32)[..., None]
    return groups.reshape(codes.shape)


HEAD = PROFILES["groupwise-int"].head


def test_weights_and_checkpoints_of_a_drafter_come_together(folders, tmp_path):
    plain = ("--model", SMALL.model_id, "--weights", "bf16", "--drafter", folders / "drafter")
    result = run(folders / "model", tmp_path / "p.ginfer", *plain)
    assert (result.exit_code, "bf16 has no drafter" in result.output) == (2, True)
    drafted = ("--model", SMALL.model_id, "--weights", "groupwise-int-dflash2-w8")
    result = run(folders / "model", tmp_path / "p.ginfer", *drafted)
    assert (result.exit_code, "dflash2-w8 needs a drafter" in result.output) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_faults_of_a_drafter_are_all_named(folders, arrays, tmp_path):
    broken = dict(arrays)
    del broken["layers.1.mlp_conv.base_kernel"]
    broken["fc.weight"] = np.ones((96, 96), np.float32)
    broken["lm_head.weight"] = np.ones((160, 96), np.float32)
    write_safetensors(tmp_path / "model.safetensors", broken)
    result = pack(folders, tmp_path / "p.ginfer", "q4", drafter=tmp_path)
    assert result.exit_code == 1
    assert set(result.output.splitlines()) == {
        "error: missing tensor dflash2.layers.1.mlp_conv.base_kernel [2, 2, 96]",
        "error: tensor dflash2.fc.weight has shape [96, 96], [96, 192] expected",
        "error: extra tensor dflash2.lm_head.weight [160, 96]",
    }


def test_another_drafter_is_another_source(folders, arrays, tmp_path):
    write_safetensors(
        tmp_path / "model.safetensors", arrays | {"norm.weight": arrays["norm.weight"] + 1}
    )
    digests = []
    for n, drafter in enumerate(("drafter", tmp_path)):
        assert pack(folders, tmp_path / f"{n}.ginfer", "q4", drafter=drafter).exit_code == 0
        with Package.open(tmp_path / f"{n}.ginfer") as package:
            digests.append(package.identity.producer.source_sha256)
    assert digests[0] != digests[1]


def test_dry_run_takes_the_names_and_shapes_of_the_full_drafter(tmp_path):
    drafter = drafter_27b_shapes()
    assert len(drafter) == 81
    total = sum(int(np.prod(shape)) for shape in drafter.values())
    layer, fc, selector = 332_974_336, 131_072_000, 127_139_840 + 256 * 5120
    assert total == 5 * layer + fc + selector + 2 * 5120
    listing = [{"name": name, "shape": shape} for name, shape in full_27b_shapes().items()]
    listing += [{"name": f"dflash2.{name}", "shape": shape} for name, shape in drafter.items()]
    path = tmp_path / "names.json"
    path.write_text(json.dumps(listing))
    options = ("--model", QWEN_27B.model_id, "--weights", "groupwise-int-dflash2-q4w8")
    result = run(path, "--dry-run", *options, "--drafter", tmp_path)
    assert result.output == "1280 tensors fit qwen3.8-27b: 1265 used, 15 left out\n"
