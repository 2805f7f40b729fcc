"""The engine with K/V in INT8: near BF16, and the equalities of reuse, parking and company."""

import numpy as np
import pytest

from tests.engines import complete, ids_prompt, open_demo, random_prompt

FIXED = {"ignore_eos": True, "sampling": {"temperature": 0.0, "logprobs": 0}}


@pytest.fixture(scope="module")
def engine():
    with open_demo(
        kv_dtype="int8", max_context=1024, kv_capacity=1024, max_concurrency=1, park_mib=256
    ) as engine:
        yield engine


def logprobs(engine, prompt, n):
    run = complete(engine, prompt, n, **FIXED)
    return run.started.cached_tokens, [(p.token_id, p.logprob) for p in run.logprobs]


def test_answers_are_near_those_of_bf16(engine):
    prompt = random_prompt(np.random.default_rng(1), 700)
    with open_demo(max_context=1024) as plain:
        _, want = logprobs(plain, prompt, 1)
    _, got = logprobs(engine, prompt, 1)
    assert got[0][0] == want[0][0]
    assert 0 < abs(got[0][1] - want[0][1]) < 0.1


def test_hits_chunks_and_parked_pages_change_no_bit(engine):
    rng = np.random.default_rng(2)
    prompt = random_prompt(rng, 320)
    longer = ids_prompt([*prompt.token_ids, *rng.integers(0, 4096, 99)])
    with open_demo(
        kv_dtype="int8", max_context=1024, prefill_chunk=128, prefix_reuse=False
    ) as fresh:
        _, want = logprobs(fresh, longer, 12)
    logprobs(engine, prompt, 1)
    for other in range(8):  # so much that the prefix leaves the arena
        logprobs(engine, random_prompt(rng, 300 + other), 1)
    assert logprobs(engine, longer, 12) == (320, want)
    assert engine.stats()["unparked_pages"] > 0
