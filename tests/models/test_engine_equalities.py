"""Bit for bit: company, chunking, seeds and reuse do not change a response."""

from __future__ import annotations

import random
from itertools import pairwise
from threading import Timer

import numpy as np
import pytest

from ginfer.backend import MemoryPlan
from ginfer.batch import ForwardBatch, Phase, Purpose, SelectionBatch
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.loader import load_weights, open_package
from ginfer.engine.memory import page_nbytes
from ginfer.engine.request import FinishReason, StopString
from ginfer.models.qwen import forward
from ginfer.prompt import PromptOptions
from tests.engines import (
    DEMO_PACKAGE,
    complete,
    ids_prompt,
    make_request,
    on_the_cpu,
    open_demo,
    random_prompt,
    submit,
)
from tests.frontends import message

GREEDY = {"temperature": 0.0, "logprobs": 3}
SEEDED = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 11, "logprobs": 3}


@pytest.fixture(scope="module")
def engine():
    """Eight lanes, chunks of 1,024, nothing reused."""
    with open_demo(max_context=4096, prefix_reuse=False) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def reusing():
    """Chunks of 128, finished conversations are kept."""
    with open_demo(max_context=4096, prefill_chunk=128) as engine:
        yield engine
        engine.check_integrity()


def values(run):
    """What must be equal bit for bit."""
    return run.ids, run.logprobs, run.text(), run.finished.reason


def random_request(rng):
    """Company: any length, any sampling."""
    sampling = {
        "temperature": rng.choice((0.0, 0.7, 1.5)),
        "top_k": rng.choice((0, 5)),
        "presence_penalty": rng.choice((0.0, 1.0)),
        "logprobs": rng.choice((None, 0, 7)),
    }
    prompt = random_prompt(np.random.default_rng(rng.randrange(1 << 30)), rng.randrange(1, 600))
    return make_request(prompt, rng.randrange(1, 60), sampling=sampling, ignore_eos=True)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", [1, 63, 700])
def test_alone_equals_in_company_of_seven_that_come_at_random(engine, sampling, length):
    rng = random.Random(length)
    prompt = random_prompt(np.random.default_rng(length), length)
    alone = complete(engine, prompt, 40, sampling=sampling, ignore_eos=True)
    before = [submit(engine, random_request(rng)) for _ in range(rng.randrange(1, 7))]
    late = []

    def join(run, event):
        if len(before) + len(late) < 7 and rng.random() < 0.3:
            late.append(submit(engine, random_request(rng)))

    request = make_request(prompt, 40, sampling=sampling, ignore_eos=True)
    run = submit(engine, request, join).wait()
    for other in (*before, *late):
        other.wait()
    assert len(before) + len(late) == 7
    assert values(run) == values(alone)


def test_a_seed_repeats_and_its_absence_does_not(engine):
    prompt = random_prompt(np.random.default_rng(1), 50)
    runs = [complete(engine, prompt, 30, sampling=SEEDED, ignore_eos=True) for _ in range(2)]
    assert values(runs[0]) == values(runs[1])
    other = complete(engine, prompt, 30, sampling={**SEEDED, "seed": 12}, ignore_eos=True)
    assert other.ids != runs[0].ids
    free = [
        complete(engine, prompt, 30, sampling={"temperature": 1.5}, ignore_eos=True).ids
        for _ in range(2)
    ]
    assert free[0] != free[1]


@pytest.mark.parametrize("length", [129, 1000, 2047])
def test_chunks_of_128_equal_chunks_of_1024(engine, reusing, length):
    prompt = random_prompt(np.random.default_rng(length), length)
    runs = [complete(e, prompt, 12, sampling=SEEDED, ignore_eos=True) for e in (engine, reusing)]
    assert runs[1].started.cached_tokens == 0
    assert values(runs[0]) == values(runs[1])


def test_a_hit_on_a_prefill_made_history_equals_no_hit(engine, reusing):
    rng = np.random.default_rng(7)
    prompt = random_prompt(rng, 64 * 5)
    longer = ids_prompt([*prompt.token_ids, *rng.integers(0, 4096, 333)])
    complete(reusing, prompt, 1, ignore_eos=True)
    runs = [complete(e, longer, 20, sampling=GREEDY, ignore_eos=True) for e in (engine, reusing)]
    assert [r.started.cached_tokens for r in runs] == [0, 320]
    assert values(runs[0]) == values(runs[1])


class Uninterrupted:
    """One conversation on a bare backend, token by token: the naive reference of reuse."""

    def __init__(self):
        bound = open_package(DEMO_PACKAGE, verify=False, progress=lambda *call: None)
        self.spec = bound.contract.spec
        self.backend = CpuBackend(self.spec, threads=2)
        load_weights(bound, self.backend, lambda *call: None)
        self.backend.allocate(
            MemoryPlan(
                num_rows=1,
                num_units=64,
                unit_nbytes=page_nbytes(self.spec),
                num_slots=1,
                max_columns=64,
                max_pages_per_row=64,
            )
        )
        self.num_tokens = 0

    def feed(self, phase, ids):
        """Append tokens; the greedy choice after them and its logprob."""
        n, zeros = len(ids), np.zeros(1, np.float32)
        start = np.array([self.num_tokens], np.int32)
        ints = np.zeros(1, np.int32)
        selection = SelectionBatch(
            columns=ints + n - 1,
            rows=ints,
            temperature=zeros,
            top_k=ints,
            top_p=zeros + 1,
            min_p=zeros,
            presence=zeros,
            frequency=zeros,
            seeds=np.zeros(1, np.uint64),
            positions=start + n,
            purposes=ints + Purpose.DECODE,
            forced=ints - 1,
            bias_indptr=np.zeros(2, np.int32),
            bias_ids=ints[:0],
            bias_values=zeros[:0],
            num_top=0,
        )
        batch = ForwardBatch(
            phase=phase,
            token_ids=np.array(ids, np.int32),
            positions=np.tile(start + np.arange(n, dtype=np.int32), (3, 1)),
            row_indptr=np.array([0, n], np.int32),
            starts=start,
            page_table=np.arange(64, dtype=np.int32)[None],
            state_in=ints,
            state_out=ints,
            selection=selection,
        )
        chosen = self.backend.select(forward(self.spec, self.backend, batch), batch).read()
        self.num_tokens += n
        return int(chosen.token_ids[0]), float(chosen.logprobs[0])

    def prompt(self, ids):
        """Prefill in blocks of 64 on absolute borders."""
        while len(ids):
            n = min(len(ids), 64 - self.num_tokens % 64)
            result = self.feed(Phase.PREFILL, ids[:n])
            ids = ids[n:]
        return result

    def continue_greedily(self, first, count):
        """Decode: (ids, logprobs) of `count` tokens, `first` included."""
        drawn = [first]
        while len(drawn) < count:
            drawn.append(self.feed(Phase.DECODE, [drawn[-1][0]]))
        return [i for i, _ in drawn], [p for _, p in drawn]


@on_the_cpu
def test_a_continued_conversation_equals_the_uninterrupted_one(reusing):
    """Two turns through reuse; the reference never lets go of its state. The model's own ids come
    back exactly, so the second turn begins where the first one stopped."""
    rng = np.random.default_rng(21)
    first, news = rng.integers(0, 4096, 150), [rng.integers(0, 4096, n) for n in (1, 200, 77)]
    plain = Uninterrupted()
    history, new = [], first
    for news_i in (*news, None):
        run = complete(reusing, ids_prompt([*history, *new]), 30, sampling=GREEDY, ignore_eos=True)
        assert run.started.cached_tokens == max(len(history) - 1, 0)
        assert run.started.reuse_path == ("append" if history else "none")
        assert run.finished.usage.cached_tokens == run.started.cached_tokens
        rest = ([history[-1]] if history else []) + list(new)
        ids, logprobs = plain.continue_greedily(plain.prompt(rest), 30)
        assert run.ids == ids
        assert [p.logprob for p in run.logprobs] == logprobs
        history, new = [*history, *new, *ids], news_i
    plain.backend.close()


def test_a_chat_is_continued_by_its_next_turn(reusing):
    messages = [message("user", "Hello!")]
    cached = []
    for text in ("What can you do?", "What is 2 + 3?", ""):
        prompt = reusing.frontend.prepare(messages, (), PromptOptions(thinking=False))
        run = complete(reusing, prompt, 100)
        assert run.finished.reason is FinishReason.STOP_TOKEN
        cached.append((run.started.cached_tokens, prompt.num_tokens))
        messages += [message("assistant", run.text()), message("user", text)]
    assert cached[0][0] == 0
    for (_, before), (hit, _) in pairwise(cached):
        assert hit > before, "the history of the turn before is not reused"


def test_a_hit_is_lost_to_pressure_not_to_correctness(engine):
    """More conversations than snapshots: whatever is still kept, answers are those without
    reuse."""
    rng = np.random.default_rng(9)
    prompts = [random_prompt(rng, 64 * int(rng.integers(1, 4)) + 1) for _ in range(20)]
    hits = 0
    with open_demo(max_context=1024, max_concurrency=1, kv_capacity=1024) as pressed:
        for prompt in prompts:
            complete(pressed, prompt, 1, ignore_eos=True)
        for prompt in reversed(prompts):
            longer = ids_prompt([*prompt.token_ids, 5, 6, 7])
            run = complete(pressed, longer, 5, sampling=GREEDY, ignore_eos=True)
            hits += run.started.cached_tokens > 0
            cold = complete(engine, longer, 5, sampling=GREEDY, ignore_eos=True)
            assert values(run) == values(cold)
            pressed.check_integrity()
        assert pressed.stats()["evicted_snapshots"] > 0
    assert 0 < hits < 20


def random_load(engine, count, seed):
    """`count` requests, at most 20 at a time, cancelled at random moments from two threads."""
    rng, nrng = random.Random(seed), np.random.default_rng(seed)
    running, ends, history = [], [], []
    for i in range(count):
        while len(running) >= 20:
            ends.append(running.pop(0).wait().finished)
        base = rng.choice(history) if history and rng.random() < 0.5 else []
        ids = [*base, *nrng.integers(0, 4096, rng.randrange(1, 150))][:600]
        request = make_request(
            ids_prompt(ids),
            rng.randrange(0, 30),
            sampling={"temperature": rng.choice((0.0, 1.0))},
            stop_strings=(StopString(text="e "),) if rng.random() < 0.2 else (),
        )
        when = rng.randrange(1, 20)

        def maybe_cancel(run, event, when=when):
            if len(run.events) == when:
                engine.cancel(run.request.request_id)

        run = submit(engine, request, maybe_cancel if rng.random() < 0.4 else None)
        running.append(run)
        if rng.random() < 0.2:
            Timer(rng.random() * 0.1, engine.cancel, (request.request_id,)).start()
        history.append([*ids, *run.ids])
        if i % 10 == 0:
            engine.check_integrity()
    return ends + [run.wait().finished for run in running]


def test_finished_chunks_of_a_cancelled_prompt_are_reused(reusing):
    prompt = random_prompt(np.random.default_rng(31), 700)

    def cancel(run, event):
        reusing.cancel(run.request.request_id)

    submit(reusing, make_request(prompt, 5), cancel).wait()
    assert complete(reusing, prompt, 5).started.cached_tokens == 128


@pytest.mark.long
def test_nothing_leaks_under_long_random_load(reusing):
    for seed in range(2, 12):
        assert len(random_load(reusing, 1000, seed)) == 1000
        reusing.check_integrity()


def test_nothing_leaks_under_random_load_with_random_cancels(reusing):
    ends = random_load(reusing, 200, seed=1)
    assert len(ends) == 200
    assert {e.reason for e in ends} >= {FinishReason.CANCELLED, FinishReason.OUTPUT_LIMIT}
    reusing.check_integrity()
    stats = reusing.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["promised_pages"] == 0
    assert stats["free_slots"] == 8
    assert stats["cached_tokens"] > 0
    assert not reusing.between_rounds(lambda cache, _: cache._expected), "nobody waits"
