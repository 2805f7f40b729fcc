"""The golden files are what Transformers says now about the committed package and random models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ginfer.artifact.reader import Package
from ginfer.models.qwen import QWEN_DEMO
from scripts.random_models import MODELS

pytestmark = pytest.mark.oracle

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def recorder():
    pytest.importorskip("transformers")
    from scripts import golden

    golden.torch.set_num_threads(1)
    return golden


def test_greedy_continuation_of_the_committed_package(recorder):
    path = ROOT / "appliance" / "demo" / "qwen3.8-demo-groupwise-int.ginfer"
    with Package.open(path) as package:
        weights = recorder.package_weights(package, QWEN_DEMO)
    model = recorder.transformers_model(QWEN_DEMO.spec, weights)
    cases = json.loads((GOLDEN / "chat_groupwise_int.json").read_text())["cases"]
    for name in ("hello", "multi_turn"):
        recorded = next(case for case in cases if case["name"] == name)
        got = recorder.greedy(model, recorded["prompt_ids"], QWEN_DEMO)
        assert got["greedy_ids"] == recorded["greedy_ids"]
        assert got["min_top2_margin"] == pytest.approx(recorded["min_top2_margin"], abs=1e-3)
        for key in ("top20_logits", "hidden_norms"):
            np.testing.assert_allclose(
                got["last_position"][key], recorded["last_position"][key], rtol=1e-4
            )


def test_logits_of_a_random_model(recorder):
    recorded = json.loads((GOLDEN / "random_configs.json").read_text())["models"][1]
    got = recorder.random_case(MODELS[1])
    assert recorded["name"] == MODELS[1].name
    for length, logits in got["last"].items():
        np.testing.assert_allclose(logits, recorded["last"][str(length)], atol=1e-3)
