"""Hypothesis strategies for requests and events."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ginfer.engine.request import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    Started,
    StopString,
    Timings,
    TokenLogprob,
    Usage,
)
from ginfer.errors import ContextLengthError, QueueTimeoutError, RequestError
from ginfer.prompt import Channel, PreparedPrompt

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TOKEN = st.integers(0, (1 << 31) - 1)
COUNT = st.integers(0, 1 << 20)
SECONDS = st.floats(0, 1e6)
CHANNEL = st.sampled_from(Channel)


@st.composite
def prompts(draw: st.DrawFn) -> PreparedPrompt:
    """With and without positions."""
    ids = np.array(draw(st.lists(TOKEN, max_size=8)), np.int32)
    positions = None
    if draw(st.booleans()):
        positions = np.arange(3 * len(ids), dtype=np.int32).reshape(3, -1) - 5
    return PreparedPrompt(
        token_ids=ids,
        positions=positions,
        rope_delta=draw(st.integers(-9, 9)),
        opens_reasoning=draw(st.booleans()),
        turn_starts=tuple(draw(st.lists(TOKEN, max_size=3))),
    )


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, (1 << 31) - 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.lists(st.tuples(TOKEN, st.floats(-100, 100)), max_size=3).map(tuple),
)
REQUESTS = st.builds(
    Request,
    request_id=TEXT,
    prompt=prompts(),
    max_tokens=COUNT,
    sampling=SAMPLING,
    stop_token_ids=st.lists(TOKEN, max_size=3).map(tuple),
    stop_strings=st.lists(
        st.builds(StopString, text=TEXT, channel=CHANNEL, include=st.booleans()), max_size=2
    ).map(tuple),
    reasoning_budget=st.none() | COUNT,
    raw=st.booleans(),
    keep_special_tokens=st.booleans(),
    ignore_eos=st.booleans(),
    grammar=st.none() | TEXT,
)
LOGPROB = st.floats(max_value=0, allow_nan=False)
DELTAS = st.builds(
    Delta,
    request_id=st.just("r"),
    channel=CHANNEL,
    text=TEXT,
    token_ids=st.lists(TOKEN, max_size=4).map(tuple),
    logprobs=st.lists(
        st.builds(
            TokenLogprob,
            token_id=TOKEN,
            logprob=LOGPROB,
            top=st.lists(st.tuples(TOKEN, LOGPROB), max_size=3).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
)
ENDS = st.builds(
    Finished,
    request_id=st.just("r"),
    reason=st.sampled_from(FinishReason),
    usage=st.builds(Usage, **dict.fromkeys(Usage.__dataclass_fields__, COUNT)),
    timings=st.builds(Timings, **dict.fromkeys(Timings.__dataclass_fields__, SECONDS)),
    stop=st.none() | TEXT,
    stop_token_id=st.none() | TOKEN,
)
STARTS = st.builds(
    Started,
    request_id=st.just("r"),
    prompt_tokens=COUNT,
    cached_tokens=COUNT,
    reuse_path=st.sampled_from(["none", "append", "snapshot"]),
    recomputed_tokens=COUNT,
)
ERRORS = st.sampled_from([RequestError, ContextLengthError, QueueTimeoutError]).flatmap(
    lambda kind: st.builds(kind, TEXT, code=TEXT, param=st.none() | TEXT)
)
FAILURES = st.builds(Failed, request_id=st.just("r"), error=ERRORS)
EVENTS = DELTAS | ENDS | STARTS | FAILURES
