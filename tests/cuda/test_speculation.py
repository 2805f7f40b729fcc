"""Speculation through engines on the GPU: the answers of plain decode, whatever is drafted."""

import pytest

from tests.drafted import drafted_demo
from tests.engines import open_demo
from tests.speculation_cases import (
    CASES,
    GREEDY,
    PENALISED,
    QUICK,
    REPORTED_TOKENS,
    ROOMY,
    SEEDED,
    check_acceptance_after_a_hit,
    check_copies,
    check_golden,
    check_json,
    check_next_turns,
    check_random_prompts,
    force,
    tokens_per_round,
)

ON_GPU = {"ahead": True, "backend": "cuda", **ROOMY}


@pytest.fixture(scope="module")
def plain():
    with open_demo(**ON_GPU, spec="none") as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting():
    """The drafter's drafts, as many as there are."""
    with open_demo(**ON_GPU, package=drafted_demo()) as engine:
        force(engine)
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def copying():
    """No drafter: copies of the context, as many as there are."""
    with open_demo(**ON_GPU) as engine:
        force(engine)
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def opened_before(plain, drafting, copying):
    """The driver keeps what the graphs of engines needed, for those of the next ones."""
    options = {**ON_GPU, "package": drafted_demo()}
    with open_demo(**options), open_demo(**options):
        pass


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "all"])
def test_golden_answers_are_those_of_plain_decode(plain, drafting, copying, sampling):
    names = CASES if sampling is GREEDY else QUICK
    check_golden(plain, (drafting, copying), names, sampling)
    assert drafting.stats()["accepted"]["drafter"] > 0


def test_two_hundred_requests_are_those_of_plain_decode(plain, drafting):
    for seed in range(10):
        check_random_prompts(plain, drafting, 20, seed)


def test_a_next_turn_finds_the_state_of_a_round_that_was_cut_short(plain, drafting):
    check_next_turns(plain, drafting)


@pytest.mark.parametrize("opens_reasoning", [False, True])
def test_json_follows_its_schema_and_plain_decode(plain, drafting, copying, opens_reasoning):
    check_json(plain, (drafting, copying), opens_reasoning)


def test_copies_of_the_context_are_accepted_and_change_nothing(opened_before):
    check_copies(**ON_GPU)


def test_acceptance_after_a_hit_is_that_without_one(opened_before):
    check_acceptance_after_a_hit(**{**ON_GPU, "kv_capacity": 1 << 14})


def test_tokens_per_round_are_near_those_of_the_bf16_drafter(opened_before):
    assert tokens_per_round(**ON_GPU) >= 0.95 * REPORTED_TOKENS
