"""The tuner without a GPU: what it tries, what it compares with, the table that it writes."""

import numpy as np
import pytest

from ginfer.cuda.linear.prefill_launch import LinearPrefillPlan
from ginfer.cuda.runtime.catalog import kernels_of
from ginfer.cuda.runtime.jit import CAPABILITIES
from ginfer.formats import FORMATS, Layout
from scripts import tune
from tests.oracles.formats import decode


def test_the_rows_that_results_are_compared_with_are_those_of_the_payload():
    N, K = 384, 192
    payload = tune.Payload(N, K, np.random.default_rng(1))
    values = decode(FORMATS[tune.FMT], Layout.TILE, (N, K), payload.bytes.reshape(-1))
    assert np.isfinite(values).all()
    assert (values[128:256] != 0).any()
    assert (payload.rows == [*range(128), *range(256, 384)]).all()
    assert (values[payload.rows] == payload.values).all()


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_candidate_is_legal_and_in_the_full_matrix(capability):
    every = set(kernels_of(capability, every=True))
    for case in tune.OPS.values():
        for shape in tune.matrices():
            for T in case.buckets:
                bucket = case.bucket(shape, T)
                for plan in case.family.candidates(capability, bucket):
                    assert plan.supports(capability, bucket)
                    assert case.kernel(capability, plan, bucket) in every


def test_the_table_names_the_fastest_plan_that_an_image_holds():
    bucket = tune.PrefillCase.bucket((34816, 5120), 2048)
    wide, narrow, other = (LinearPrefillPlan(n, 2) for n in (256, 160, 224))
    row = tune.Row(tune.PrefillCase, bucket, narrow, {wide: 3.0, narrow: 4.0, other: 2.0})
    found: dict = {}
    exec(tune.table([row], "90a", "a device"), found)
    assert found["PLANS"] == {("linear_prefill", bucket): wide}


@pytest.mark.parametrize(("time", "named"), [(9.9, "default"), (9.7, "other")])
def test_the_table_of_decode_names_what_is_clearly_faster(time, named):
    case, T = tune.DecodeBulkCase, 64
    bucket = case.bucket((34816, 5120), T)
    default = case.family.default("90a", bucket)
    plans = {"default": default}
    plans["other"] = next(p for p in case.family.candidates("90a", bucket) if p != default)
    row = tune.Row(case, bucket, default, {default: 10.0, plans["other"]: time})
    found: dict = {}
    exec(tune.table([row], "90a", "a device"), found)
    assert found["PLANS"] == {("linear_decode", bucket): plans[named]}


def test_a_capability_has_one_decode_linear():
    assert tune.ops("90a") == ["linear_prefill", "linear_decode"]
    assert tune.ops("80") == ["linear_prefill", "linear_decode_mma"]
