"""Model contracts: published totals come out, wrong dimensions are refused."""

from dataclasses import replace
from math import prod

import pytest

from ginfer.errors import ConfigError
from ginfer.formats import payload_nbytes
from ginfer.models.contract import PROFILES, Role
from ginfer.models.qwen import QWEN_27B, QWEN_DEMO
from ginfer.models.registry import CONTRACTS, contract_for


def numbers(contract, *roles):
    return sum(prod(t.shape) for t in contract.inventory() if not roles or t.role in roles)


def test_27b_totals_are_the_published_ones():
    text = sum(prod(t.shape) for t in QWEN_27B.inventory() if t.name.startswith("text/"))
    vision = sum(prod(t.shape) for t in QWEN_27B.inventory() if t.name.startswith("vision/"))
    assert text == 26_895_998_464
    assert vision == 460_730_096
    assert numbers(QWEN_27B, Role.MATRIX) == 24_326_963_200


def test_27b_shapes_of_fused_parents():
    shapes = {t.name: t.shape for t in QWEN_27B.inventory()}
    assert shapes["text/layers/3/attention/query_key_gate_value"] == (14336, 5120)
    assert shapes["text/layers/0/gdn/query_key_value_z"] == (16384, 5120)
    assert shapes["text/layers/0/gdn/a_b_projection"] == (96, 5120)
    assert shapes["text/layers/0/gdn/convolution"] == (4, 10240)
    assert shapes["text/layers/63/mlp/gate_up"] == (34816, 5120)


def test_demo_total_is_the_published_one():
    assert round(numbers(QWEN_DEMO) / 1e6, 1) == 23.5


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=lambda c: c.model_id)
def test_names_are_unique_and_every_role_has_a_legal_storage(contract):
    inventory = contract.inventory()
    assert len({t.name for t in inventory}) == len(inventory)
    for profile in contract.profiles:
        for t in inventory:
            assert payload_nbytes(*PROFILES[profile].storage(t.role), t.shape) > 0


def test_a_contract_that_does_not_add_up_is_refused():
    broken = replace(QWEN_DEMO.spec.attention, mrope_sections=(11, 11, 11))
    with pytest.raises(ValueError, match="M-RoPE"):
        replace(QWEN_DEMO, spec=replace(QWEN_DEMO.spec, attention=broken))


def test_unknown_identities_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"no model 'gpt'.*qwen3.8-27b"):
        contract_for("gpt", "bf16")
    with pytest.raises(ConfigError, match=r"no weight profile 'fp3'.*groupwise-int"):
        contract_for("qwen3.8-demo", "fp3")
