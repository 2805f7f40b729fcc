"""The engine on the GPU: recorded answers, and the same tokens however its rounds are run."""

import json
import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from ginfer.cuda.backend import CudaBackend
from ginfer.cuda.embedding import embedding_kernel
from ginfer.cuda.runtime.driver import TAKEN
from ginfer.cuda.runtime.jit import SealedError
from ginfer.engine.request import FinishReason, StopString
from ginfer.frontend.grammar import json_grammar
from tests.cuda.conftest import TOLERATED_NBYTES
from tests.engines import complete, ids_prompt, make_request, open_demo, random_prompt, submit

GOLDEN = Path(__file__).parents[1] / "golden" / "chat_groupwise_int.json"
CASES = {case["name"]: case for case in json.loads(GOLDEN.read_text())["cases"]}
GRAMMAR = json_grammar({"type": "array", "items": {"type": "integer"}, "maxItems": 5})
NOISE = 0.25  # a gap of two logits above it decides a token: BF16 activations through all layers
SEEDED = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 11}
SAMPLINGS = [
    {"temperature": 0.0},
    SEEDED,
    {**SEEDED, "logprobs": 3},
    {"temperature": 0.7, "seed": 5, "min_p": 0.01, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": ((77, 4.0), (9, -50.0))},
]


def open_gpu(**options):
    return open_demo(ahead=True, backend="cuda", max_context=4096, kv_capacity=16384, **options)


@pytest.fixture(scope="module")
def engine():
    with open_gpu() as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def eager():
    """No graphs."""
    with open_gpu(cuda_graphs=False, prefix_reuse=False) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def not_ahead():
    """Every round is read before the next."""
    with patch.object(CudaBackend, "runs_ahead", False):
        engine = open_gpu(prefix_reuse=False)
    with engine:
        yield engine
        engine.check_integrity()


def values(run):
    return run.ids, run.logprobs, run.text(), run.finished.reason


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_recorded_ones_wherever_the_gap_exceeds_the_noise(engine, name):
    case = CASES[name]
    wanted = case["greedy_ids"]
    sampling = {"temperature": 0.0, "logprobs": 2}
    prompt = ids_prompt(case["prompt_ids"])
    run = complete(engine, prompt, len(wanted), sampling=sampling, raw=True, ignore_eos=True)
    pairs = enumerate(zip(run.ids, wanted))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is not None:
        best, second = run.logprobs[at].top
        assert best[1] - second[1] < NOISE, f"token {at} is {run.ids[at]}, not {wanted[at]}"


def test_rounds_without_graphs_or_read_at_once_answer_the_same(engine, eager, not_ahead):
    rng = np.random.default_rng(3)
    requests = []
    for i, sampling in enumerate(SAMPLINGS):
        for length in (1, 65, 300):
            stops = (StopString(text="e "),) if i == 1 else ()
            fields = {"sampling": sampling, "stop_strings": stops, "ignore_eos": i != 0}
            requests.append((random_prompt(rng, length), fields))
    wanted = [values(complete(engine, prompt, 30, **fields)) for prompt, fields in requests]
    assert any(reason is FinishReason.STOP_STRING for *_, reason in wanted)
    for name, other in (("eager", eager), ("not ahead", not_ahead)):
        runs = [submit(other, make_request(prompt, 30, **f)) for prompt, f in requests]
        for run, want in zip(runs, wanted):
            assert values(run.wait(120)) == want, name


def test_serving_takes_nothing(engine):
    """No kernel, graph, event or memory after the start, whatever comes."""
    rng, queue = np.random.default_rng(5), engine._rank.backend._queue
    before = TAKEN.copy()
    fields = [{"sampling": sampling} for sampling in SAMPLINGS] + [{"grammar": GRAMMAR}] * 3
    requests = [
        make_request(random_prompt(rng, int(rng.integers(1, 2000))), 40, **fields[i % 8])
        for i in range(40)
    ]
    runs = []
    for i, request in enumerate(requests):
        if len(runs) > 12:
            runs[i - 13].wait(120)
        runs.append(submit(engine, request))
        if i % 5 == 2:
            engine.cancel(request.request_id)
    for run in runs:
        run.wait(120)
    assert before == TAKEN
    with pytest.raises(SealedError):
        queue.image.load([embedding_kernel("BF16", 1 - int(queue.early))])
    engine.check_integrity()


def test_alone_equals_in_company_that_comes_and_goes(engine):
    rng, nrng = random.Random(1), np.random.default_rng(1)
    prompt = random_prompt(nrng, 200)
    alone = complete(engine, prompt, 60, sampling=SEEDED, ignore_eos=True)
    others = []

    def join(run, event):
        if len(others) < 12 and rng.random() < 0.4:
            sampling = {"temperature": rng.choice((0.0, 1.0)), "logprobs": rng.choice((None, 4))}
            request = make_request(
                random_prompt(nrng, rng.randrange(1, 400)), rng.randrange(1, 40), sampling=sampling
            )
            others.append(submit(engine, request))
            if rng.random() < 0.3:
                engine.cancel(request.request_id)

    run = submit(engine, make_request(prompt, 60, sampling=SEEDED, ignore_eos=True), join).wait(120)
    for other in others:
        other.wait(120)
    assert len(others) == 12
    assert values(run) == values(alone)
    engine.check_integrity()
    stats = engine.stats()
    assert (stats["running"], stats["promised_pages"], stats["free_slots"]) == (0, 0, 8)
    assert stats["failed"] == {}


def test_a_continued_conversation_equals_the_uninterrupted_one(engine):
    """A response's end is kept in whichever slot held it: both parities."""
    rng = np.random.default_rng(8)
    engine._command(engine._loop.cache.clear)  # nothing has to give way
    for count in (20, 21):
        first, more = rng.integers(0, 4096, 70).tolist(), rng.integers(0, 4096, 5).tolist()
        one = complete(engine, ids_prompt(first), count, ignore_eos=True)
        longer = complete(engine, ids_prompt(first), count + 8, ignore_eos=True)
        assert longer.ids[:count] == one.ids
        history = [*first, *one.ids]
        sampling = {"temperature": 0.0, "logprobs": 1}
        runs = [
            complete(engine, ids_prompt([*history, *more]), 8, sampling=sampling, ignore_eos=True)
            for _ in range(2)
        ]
        assert [run.started.cached_tokens for run in runs] == [len(history) - 1] * 2
        assert values(runs[0]) == values(runs[1])


@pytest.fixture(scope="module")
def opened_before():
    """The driver keeps what the graphs of an engine needed, for those of the next one."""
    with open_gpu():
        pass


def test_an_engine_gives_back_what_it_took(device, opened_before):
    free = device.free_nbytes()
    for _ in range(2):
        with open_gpu() as engine:
            complete(engine, random_prompt(np.random.default_rng(1), 100), 20)
        assert free - device.free_nbytes() <= TOLERATED_NBYTES
