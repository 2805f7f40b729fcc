"""Eight lanes under load with cancels: right answers, and nothing taken, loaded or captured."""

import random
import signal
import time
from collections import Counter

import numpy as np
import pytest

from ginfer.cuda.runtime.driver import TAKEN
from ginfer.engine.request import Failed, Finished, FinishReason
from ginfer.errors import OverloadedError
from tests.engines import complete, make_request, open_demo, random_prompt, submit


def sampling(rng):
    """Of every kind that selects its own kernels or graphs."""
    return rng.choice(
        (
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": rng.randrange(99)},
            {"temperature": 0.0, "logprobs": 4},
            {"temperature": 0.7, "presence_penalty": 0.5, "logit_bias": ((7, 2.0),)},
        )
    )


@pytest.mark.parametrize("seconds", [8.0, pytest.param(300.0, marks=pytest.mark.long)])
def test_nothing_is_taken_loaded_or_captured_under_load(device, seconds):
    signal.alarm(int(seconds) + 120)
    rng, numbers = random.Random(7), np.random.default_rng(7)
    prompts = [random_prompt(numbers, n) for n in (5, 64, 200, 700, 1500)]
    with open_demo(backend="cuda", max_context=4096, kv_capacity=32_768, max_pending=8) as engine:
        alone = [complete(engine, p, 30, ignore_eos=True).ids for p in prompts]
        free, before, ends, live = device.free_nbytes(), TAKEN.copy(), Counter(), []
        until = time.monotonic() + seconds
        while time.monotonic() < until or live:
            if time.monotonic() < until:
                which, plain = rng.randrange(len(prompts)), rng.random() < 0.5
                how = {"temperature": 0.0} if plain else sampling(rng)
                tokens = 30 if plain else rng.randrange(1, 300)
                request = make_request(prompts[which], tokens, sampling=how, ignore_eos=True)
                try:
                    live.append((which, plain, submit(engine, request)))
                except OverloadedError:
                    time.sleep(0.002)
            for entry in list(live):
                which, plain, run = entry
                if rng.random() < (0.0 if plain else 0.02):
                    engine.cancel(run.request.request_id)
                if run.events and isinstance(run.events[-1], Finished | Failed):
                    live.remove(entry)
                    reason = run.finished.reason
                    ends[reason] += 1
                    if plain:
                        assert run.ids == alone[which]
        assert ends[FinishReason.CANCELLED] > 5, ends
        assert ends[FinishReason.OUTPUT_LIMIT] > 20, ends
        assert before == TAKEN
        assert device.free_nbytes() == free
        engine.check_integrity()
