"""Random small models on the CPU image against recorded float32 logits of Transformers.

The bound is the GDN output row of the operator criteria: three of four layers are GDN, and its L2
bound is the widest of the operators that work in float32 and BF16 K/V here, so a whole model that
stays within the criterion of one such operator has no layer that breaks its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.random_models import DENSE_LENGTHS, LENGTHS, MODELS
from tests.models.program import Program

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "random_configs.json"
RECORDED = {m["name"]: m for m in json.loads(GOLDEN.read_text())["models"]}
L2, ABSOLUTE, RELATIVE = 4.1e-3, 5e-6, 5.5e-3


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: m.name)
def case(request):
    model = request.param
    program = Program(model.spec, model.packed(), max_tokens=320, chunk=128)
    yield model, program, RECORDED[model.name]
    program.backend.close()


def assert_close(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - wanted) <= L2 * np.linalg.norm(wanted)
    assert np.abs(got - wanted).max() <= ABSOLUTE + RELATIVE * np.abs(wanted).max()


@pytest.mark.parametrize("length", LENGTHS)
def test_last_logits_of_a_prompt(case, length):
    model, program, recorded = case
    assert_close(program.prefill(model.prompt(length)), recorded["last"][str(length)])


@pytest.mark.parametrize("length", DENSE_LENGTHS)
def test_logits_at_every_position(case, length):
    model, program, recorded = case
    got = program.prefill_logits(model.prompt(length), range(length))[:, model.dense_ids()]
    assert_close(got, recorded["dense"][str(length)])


def test_decoding_token_by_token_gives_the_prompts_logits(case):
    model, program, recorded = case
    ids = model.prompt(130)
    program.prefill(ids[:60])
    for token in ids[60:-1]:
        program.decode(int(token))
    assert_close(program.decode(int(ids[-1])), recorded["last"]["130"])
