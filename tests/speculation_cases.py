"""Speculation through engines: checks against plain decode, for whatever image runs them."""

import json
import random
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from ginfer.engine.request import FinishReason, StopString
from tests.drafted import drafted_demo
from tests.engines import complete, ids_prompt, make_request, open_demo, submit

GOLDEN = Path(__file__).parent / "golden" / "chat_groupwise_int.json"
CASES = {c["name"]: c for c in json.loads(GOLDEN.read_text())["cases"]}
QUICK = [name for name, case in CASES.items() if len(case["prompt_ids"]) < 400][::4]
GREEDY = {"temperature": 0.0, "logprobs": 2}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 20, "seed": 3, "logprobs": 2}
PENALISED = {
    **SEEDED,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "min_p": 0.02,
    "logit_bias": ((260, 3.0), (300, -5.0)),
}
# What is evicted follows from times, and what is found changes the last bits of an answer.
ROOMY = {"max_context": 4096, "kv_capacity": 1 << 17}
REPORTED_TOKENS = 3.59  # per round, of the BF16 drafter on the golden prompts
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def force(engine, choose=lambda limit: limit):
    """Have every row draft `choose(limit)` tokens of what it is offered."""
    widths = engine._loop._drafting.widths
    widths.plan = lambda offers: {lane: choose(offer.limit) for lane, offer in offers.items()}
    widths.may_draft = lambda lanes, origin, rows: set(lanes)  # whatever rounds cost here
    engine._loop._drafting.costs.known = lambda rows: True


def values(run):
    """What must be equal bit for bit."""
    return run.ids, run.logprobs, run.text(), run.finished.reason


def golden_runs(engines, names, **fields):
    for name in names:
        prompt = ids_prompt(CASES[name]["prompt_ids"])
        yield name, [values(complete(engine, prompt, 96, **fields)) for engine in engines]


def check_golden(plain, others, names, sampling):
    """Answers to golden prompts."""
    for name, (wanted, *drafted) in golden_runs((plain, *others), names, sampling=sampling):
        for got in drafted:
            assert got == wanted, name


def check_random_prompts(plain, drafting, count, seed):
    """Requests of all kinds at once, of random widths, against plain decode."""
    rng, nrng = random.Random(seed), np.random.default_rng(seed)
    force(drafting, lambda limit: rng.randint(0, limit))
    requests = []
    for _ in range(count):
        ids = nrng.integers(0, 4096, rng.randrange(1, 40))
        prompt = ids_prompt([*ids, *ids[: rng.randrange(40)]] * rng.randrange(1, 4))
        fields = {"sampling": rng.choice((GREEDY, SEEDED, PENALISED)), "ignore_eos": True}
        if rng.random() < 0.3:
            fields["stop_strings"] = (StopString(text=rng.choice(("e", "the", " a"))),)
        requests.append((prompt, rng.randrange(1, 50), fields))
    runs = [submit(drafting, make_request(p, n, **fields)) for p, n, fields in requests]
    for run, (prompt, n, fields) in zip(runs, requests):
        assert values(run.wait()) == values(complete(plain, prompt, n, **fields))
    drafting.check_integrity()
    force(drafting)


def check_next_turns(plain, drafting):
    """Stop tokens, stop strings and limits end answers inside rounds; what the cache keeps then is
    what plain decode would have kept, drafter context included."""
    rng = np.random.default_rng(8)
    for engine in (plain, drafting):  # a full cache may drop what is short, at different times
        engine.between_rounds(lambda cache, backend: cache.clear())
    for i, name in enumerate(QUICK[:6]):
        ids = CASES[name]["prompt_ids"]
        limit = (96, 7, 12)[i % 3]
        longer, seen = None, []
        for engine in (plain, drafting):
            first = complete(engine, ids_prompt(ids), limit, sampling=GREEDY)
            if longer is None:
                longer = ids_prompt([*ids, *first.ids, *rng.integers(0, 4096, 9)])
            again = complete(engine, longer, 20, sampling=GREEDY, ignore_eos=True)
            seen.append((values(first), again.started.cached_tokens, values(again)))
        assert seen[0] == seen[1], name
        assert seen[0][1] >= len(ids)


def check_acceptance_after_a_hit(**options):
    """The drafter's context comes back with a prefix."""
    ids = [*CASES[QUICK[0]]["prompt_ids"]]
    base = ids_prompt([*np.random.default_rng(5).integers(0, 4096, 266 - len(ids) % 64), *ids])
    cut = base.num_tokens // 64 * 64
    counts = []
    for warm in (False, True):
        with open_demo(**options, package=drafted_demo(), max_concurrency=2) as engine:
            force(engine)
            if warm:
                complete(engine, ids_prompt(base.token_ids[:cut]), 1)
            run = complete(engine, base, 60, sampling=GREEDY, ignore_eos=True)
            assert run.started.cached_tokens == (cut if warm else 0)
            stats = engine.stats()
            counts.append((values(run), stats["drafted"], stats["accepted_at"]))
    assert counts[0] == counts[1]
    assert sum(counts[0][2].values()) > 0


def check_copies(**options):
    """Questions that were answered before in the same conversation."""
    alone = {**options, "prefix_reuse": False}
    with open_demo(**alone, spec="none") as plain, open_demo(**alone) as copying:
        force(copying)
        before = copying.stats()
        for name in ("count", "code", "kv_cache", "tool_parallel"):
            question = CASES[name]["prompt_ids"]
            answer = complete(plain, ids_prompt(question), 96, sampling=GREEDY).ids
            prompt = ids_prompt([*question, *answer, *question])
            runs = [complete(e, prompt, 96, sampling=GREEDY) for e in (plain, copying)]
            assert values(runs[0]) == values(runs[1])
        after = copying.stats()
        changed = {k: after[k]["copy"] - before[k].get("copy", 0) for k in ("drafted", "accepted")}
        assert changed["accepted"] >= 0.8 * changed["drafted"] > 0
        assert after["expanded_rounds"] > before["expanded_rounds"]
        rows = after["row_rounds"] - before["row_rounds"]
        assert changed["accepted"] > 2 * rows


def tokens_per_round(**options):
    """Of the demo's drafter on the golden prompts, every draft verified."""
    with open_demo(**options, package=drafted_demo(), max_concurrency=1) as engine:
        drafting = engine._loop._drafting
        drafting._copy = lambda *_: []
        force(engine)
        for case in CASES.values():
            complete(engine, ids_prompt(case["prompt_ids"]), len(case["greedy_ids"]))
        stats = engine.stats()
    first = len(CASES)  # tokens that prompts draw
    return (stats["completion_tokens"] - first) / stats["row_rounds"]


def check_json(plain, others, opens_reasoning, names=QUICK):
    """Answers that a schema constrains, reasoning in front of them or not."""
    grammar, complete_ones = json.dumps({"grammars": [{"json_schema": SCHEMA}]}), 0
    assert not LLMatcher.validate_grammar(grammar)
    for name in names:
        prompt = ids_prompt(CASES[name]["prompt_ids"], opens_reasoning=opens_reasoning)
        for sampling in (GREEDY, SEEDED):
            fields = {"sampling": sampling, "grammar": grammar}
            if opens_reasoning:
                fields["reasoning_budget"] = 11
            runs = [complete(e, prompt, 80, **fields) for e in (plain, *others)]
            for run in runs[1:]:
                assert values(run) == values(runs[0])
            if runs[0].finished.reason is FinishReason.STOP_TOKEN and runs[0].text():
                assert set(json.loads(runs[0].text())) == {"name", "n"}
                complete_ones += 1
    assert complete_ones >= len(names) / 2
