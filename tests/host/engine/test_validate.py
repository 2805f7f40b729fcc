"""Request checks: the field is named, the limits are the model's and the capacity's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ginfer.config import EngineConfig
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.memory import plan_memory
from ginfer.engine.request import Request, SamplingParams, StopString
from ginfer.engine.validate import check_request
from ginfer.errors import ContextLengthError, RequestError
from ginfer.models.qwen import QWEN_DEMO
from ginfer.prompt import PreparedPrompt

SPEC = QWEN_DEMO.spec
CONFIG = EngineConfig(package=Path("p"), max_context=1024, kv_capacity=1024)
CAPACITY = plan_memory(CONFIG, SPEC, CpuBackend(SPEC).room(0, 1 << 40))


def prompt(ids=(1, 2, 3), **fields):
    return PreparedPrompt(token_ids=np.array(ids, np.int32), **fields)


def check(**fields):
    request = Request(**{"request_id": "r", "prompt": prompt(), "max_tokens": 8, **fields})
    check_request(request, SPEC, CAPACITY)


def test_what_is_legal_passes():
    check()
    check(max_tokens=0)
    check(max_tokens=1 << 40)
    check(prompt=prompt([4110] * 1024), max_tokens=100)
    check(prompt=prompt(positions=np.zeros((3, 3), np.int32)))
    check(reasoning_budget=0, stop_strings=(StopString(text="x"),), stop_token_ids=(4110,))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"request_id": ""}, "request_id"),
        ({"prompt": prompt([])}, "prompt"),
        ({"prompt": prompt([1, 4111])}, "prompt"),
        ({"prompt": prompt([-1])}, "prompt"),
        ({"prompt": PreparedPrompt(token_ids=np.zeros(3, np.int64))}, "prompt"),
        ({"prompt": prompt(positions=np.zeros((3, 2), np.int32))}, "prompt"),
        ({"prompt": prompt([1, 2, 3], turn_starts=(2, 2))}, "prompt"),
        ({"prompt": prompt([1, 2, 3], turn_starts=(3,))}, "prompt"),
        ({"prompt": prompt([1, 2, 3], turn_starts=(0, 1))}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_strings": (StopString(text=""),)}, "stop"),
        ({"stop_token_ids": (4111,)}, "stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias=((4111, 1.0),))}, "logit_bias"),
        (
            {"stop_token_ids": (3,), "sampling": SamplingParams(logit_bias=((-1, 1.0),))},
            "logit_bias",
        ),
        ({"reasoning_budget": -1}, "reasoning_budget"),
        ({"reasoning_budget": 1, "raw": True}, "reasoning_budget"),
    ],
)
def test_a_wrong_field_is_named(fields, param):
    with pytest.raises(RequestError) as caught:
        check(**fields)
    assert caught.value.param == param
    assert not isinstance(caught.value, ContextLengthError)


def test_a_prompt_beyond_the_context_is_a_length_error():
    with pytest.raises(ContextLengthError, match=r"1025.*1024"):
        check(prompt=prompt([1] * 1025))
