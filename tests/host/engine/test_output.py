"""Output of one response, token by token, with the real decoder: text, ids, stops, budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.engine.output import Ending, Output
from ginfer.engine.request import FinishReason, StopString
from ginfer.prompt import Channel
from tests.engines import ids_prompt, make_request
from tests.frontends import demo_frontend

FRONTEND = demo_frontend()


def run(ids, *, limit=10_000, opens_reasoning=False, **fields):
    """Commit tokens as the loop does (forced ones replace the model's) until the response ends."""
    prompt = ids_prompt([1], opens_reasoning=opens_reasoning)
    request = make_request(prompt, limit, **fields)
    output = Output(request, FRONTEND, limit, FinishReason.OUTPUT_LIMIT)
    deltas = []
    queue = list(ids)
    while output.ending is None and (queue or output.forced >= 0):
        token_id = output.forced if output.forced >= 0 else queue.pop(0)
        deltas += output.commit(token_id, None)
    if output.ending is None:
        deltas += output.end(Ending(reason=FinishReason.CANCELLED))
    return output, deltas


def text(deltas, channel=Channel.CONTENT):
    return "".join(d.text for d in deltas if d.channel is channel)


def ids_of(deltas, channel=None):
    return [i for d in deltas if channel in (None, d.channel) for i in d.token_ids]


def naive_text(ids, opens_reasoning):
    """Channel texts of a whole response, decoded at once."""
    decoder = FRONTEND.stream_decoder(opens_reasoning=opens_reasoning)
    pieces = [p for i in ids for p in decoder.feed(i)] + decoder.finish()
    return {c: "".join(t for channel, t in pieces if channel is c) for c in Channel}


CLOSE_ID = FRONTEND.encode("</think>")[0]
TOKENS = st.lists(
    st.one_of(st.integers(0, 4095), st.sampled_from([CLOSE_ID, *FRONTEND.encode("\n\nWell, <")])),
    max_size=40,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=TOKENS, opens_reasoning=st.booleans())
def test_deltas_joined_are_the_whole_text_and_all_ids(ids, opens_reasoning):
    output, deltas = run(ids, opens_reasoning=opens_reasoning)
    assert ids_of(deltas) == ids
    assert {c: text(deltas, c) for c in Channel} == naive_text(ids, opens_reasoning)
    assert output.completion_tokens == len(ids)
    assert output.reasoning_tokens == len(ids_of(deltas, Channel.REASONING))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=TOKENS, opens_reasoning=st.booleans(), data=st.data())
def test_a_stop_string_cuts_its_channel_wherever_tokens_end(ids, opens_reasoning, data):
    whole = naive_text(ids, opens_reasoning)
    channel = Channel.REASONING if opens_reasoning and whole[Channel.REASONING] else Channel.CONTENT
    shown = whole[channel]
    start = data.draw(st.integers(0, max(len(shown) - 1, 0)))
    stop = StopString(text=shown[start : start + data.draw(st.integers(1, 6))] or "none")
    stop = StopString(text=stop.text, channel=channel)
    output, deltas = run(ids, opens_reasoning=opens_reasoning, stop_strings=(stop,))
    assert text(deltas, channel) == shown.split(stop.text)[0]
    stopped = stop.text in shown
    assert (output.ending.reason is FinishReason.STOP_STRING) == stopped
    assert output.ending.stop == (stop.text if stopped else None)
    if channel is Channel.REASONING and stopped:
        assert text(deltas) == ""


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 4095), max_size=30), budget=st.integers(0, 40))
def test_a_spent_budget_closes_the_block_and_shows_nothing_of_it(ids, budget):
    output, deltas = run(ids, opens_reasoning=True, reasoning_budget=budget)
    close = list(FRONTEND.reasoning_close_ids)
    thought = ids[:budget]
    plain = naive_text(thought, opens_reasoning=True)
    if plain[Channel.CONTENT] or "</think" in plain[Channel.REASONING]:
        return  # the random text closes the block on its own
    spent = len(ids) >= budget
    assert ids_of(deltas) == (thought + close + ids[budget:] if spent else ids)
    assert text(deltas, Channel.REASONING) == plain[Channel.REASONING]
    assert output.completion_tokens == len(ids) + spent * len(close)


def test_stop_tokens_are_counted_and_not_shown():
    stop_id = FRONTEND.stop_token_ids[0]
    output, deltas = run([*FRONTEND.encode("yes"), stop_id, 5])
    assert text(deltas) == "yes"
    assert stop_id not in ids_of(deltas)
    assert output.completion_tokens == len(FRONTEND.encode("yes")) + 1
    assert output.ending == Ending(
        reason=FinishReason.STOP_TOKEN, stop=FRONTEND.token_text(stop_id), stop_token_id=stop_id
    )
    output, deltas = run([stop_id, *FRONTEND.encode("on")], ignore_eos=True)
    assert text(deltas) == "on"


def test_text_held_back_at_the_end_still_meets_its_stop_string():
    """An incomplete character becomes U+FFFD only when the response ends."""
    incomplete = FRONTEND.encode("é")[:1]
    assert FRONTEND.token_bytes(incomplete[0]) == b"\xc3"
    stop = StopString(text="\ufffd")
    output, deltas = run([*FRONTEND.encode("a"), *incomplete, FRONTEND.stop_token_ids[0]])
    assert (text(deltas), output.ending.reason) == ("a\ufffd", FinishReason.STOP_TOKEN)
    ids = [*FRONTEND.encode("a"), *incomplete, FRONTEND.stop_token_ids[0]]
    output, deltas = run(ids, stop_strings=(stop,))
    assert (text(deltas), output.ending.reason) == ("a", FinishReason.STOP_STRING)


def test_the_limit_ends_the_response_in_the_round_that_reaches_it():
    output, deltas = run(np.arange(100).tolist(), limit=7)
    assert output.ending.reason is FinishReason.OUTPUT_LIMIT
    assert len(ids_of(deltas)) == 7
