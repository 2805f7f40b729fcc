"""Compiler, cache and masks of grammars, over the demo tokenizer and without a model."""

from __future__ import annotations

import json
import time
from threading import Event, Thread

import numpy as np
import pytest

from ginfer.engine import grammar as module
from ginfer.engine.grammar import Grammars
from ginfer.engine.output import Output
from ginfer.engine.request import FinishReason
from ginfer.errors import InternalError, OverloadedError, RequestError, UnavailableError
from ginfer.frontend.grammar import json_grammar
from tests.engines import ids_prompt, make_request
from tests.frontends import demo_frontend
from tests.grammars import VOCAB, accepts, legal_ids

WORD = 'start: "ab" | "cd" "e"'


@pytest.fixture
def grammars():
    grammars = Grammars(demo_frontend(), VOCAB)
    yield grammars
    grammars.close()


def follow(grammars, row, *ids):
    row.active, row.pending = True, list(ids)
    grammars.advance([row])
    assert row.ready.wait(60)


def test_masks_follow_the_grammar_to_its_end(grammars):
    frontend = demo_frontend()
    row = grammars.open(WORD)
    texts = {frontend.token_text(i) for i in legal_ids(row)}
    assert texts <= {"a", "ab", "c", "cd", "cde"}
    assert {"a", "c"} <= texts
    follow(grammars, row, *frontend.encode("c"))
    follow(grammars, row, *frontend.encode("d"))
    assert {frontend.token_text(i) for i in legal_ids(row)} == {"e"}
    follow(grammars, row, *frontend.encode("e"))
    assert sorted(legal_ids(row)) == sorted(frontend.stop_token_ids)
    assert row.fault is None


def test_rows_without_a_grammar_and_before_the_content_are_free(grammars):
    active, waiting = grammars.open(WORD), grammars.open(WORD)
    assert grammars.mask([None, waiting]) is None
    active.active = True
    mask = np.asarray(grammars.mask([None, active, waiting]))
    assert (mask.shape, mask.dtype) == ((3, VOCAB // 32), np.uint32)
    assert (mask[[0, 2]] == 0xFFFFFFFF).all()
    assert (mask[1] == active.row).all()
    assert (mask[1] != 0xFFFFFFFF).all()


def test_a_mask_waits_for_its_worker(grammars):
    row = grammars.open(WORD)
    row.active = True
    row.ready.clear()
    mask, got = grammars.mask([row]), Event()
    reader = Thread(target=lambda: (np.asarray(mask), got.set()))
    reader.start()
    assert not got.wait(0.05)
    row.ready.set()
    assert got.wait(60)
    reader.join()
    assert grammars.wait_s >= 0.04


def test_control_and_reasoning_tokens_are_no_text(grammars):
    frontend = demo_frontend()
    row = grammars.open("start: /(?s:.*)/")
    assert not set(frontend.reserved_token_ids) - set(frontend.stop_token_ids) & set(legal_ids(row))
    (close,) = frontend.encode("</think>")
    (call,) = frontend.encode("<tool_call>")
    assert close not in legal_ids(row)
    assert call in legal_ids(row)
    assert max(legal_ids(row)) < 4111


def test_a_token_outside_the_grammar_is_a_fault_of_its_row_alone(grammars):
    one, other = grammars.open(WORD), grammars.open(WORD)
    one.active = other.active = True
    one.pending, other.pending = demo_frontend().encode("x"), demo_frontend().encode("c")
    grammars.advance([one, other])
    mask = np.asarray(grammars.mask([one, other]))
    assert one.fault is not None
    assert other.fault is None
    assert (mask[0] == 0xFFFFFFFF).all()
    assert (one.error().code, one.error().param) == ("grammar_failed", "grammar")


def test_content_begins_after_the_reasoning(grammars):
    frontend = demo_frontend()
    request = make_request(ids_prompt([1], opens_reasoning=True), reasoning_budget=2)
    output = Output(request, frontend, 100, FinishReason.OUTPUT_LIMIT)
    row = grammars.open(WORD)
    for token in frontend.encode("x\n")[:2]:
        output.commit(token, None)
        grammars.follow(row, output, token, forced=False)
    while not row.active or output.forced >= 0:
        token = output.forced
        output.commit(token, None)
        grammars.follow(row, output, token, forced=True)
    assert row.pending == []
    output.commit(token := frontend.encode("c")[0], None)
    grammars.follow(row, output, token, forced=False)
    assert row.pending == [token]


def test_content_that_shares_a_token_with_the_closing_tag_counts(grammars):
    frontend = demo_frontend()
    shared = next(
        i for i in range(4096) if frontend.token_text(i)[:1] == ">" != frontend.token_text(i)
    )
    rest = frontend.token_text(shared)[1:].lstrip("\n")
    request = make_request(ids_prompt([1], opens_reasoning=True))
    output = Output(request, frontend, 100, FinishReason.OUTPUT_LIMIT)
    row = grammars.open(f"start: {json.dumps(rest + 'b')}")
    for token in [*(frontend.encode(c)[0] for c in "</think"), shared]:
        assert not row.active
        output.commit(token, None)
        grammars.follow(row, output, token, forced=False)
    assert row.active
    assert row.pending == frontend.encode(rest)
    follow(grammars, row, *row.pending)
    assert frontend.encode("b")[0] in legal_ids(row)


@pytest.mark.parametrize(
    "text",
    [
        "start: nothing",
        "",
        "{",
        'start: "a"\nstart: "b"',
        "start: /(/",
        'start: %json {"type": 3}',
        'start: %json {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
        "x" * (module.MAX_NBYTES + 1),
        "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    ],
)
def test_what_does_not_compile_is_refused(grammars, text):
    with pytest.raises(RequestError) as caught:
        grammars.open(text)
    assert caught.value.param == "grammar"
    assert len(caught.value.message) < 1000
    assert grammars.open(WORD).fault is None


HOSTILE = [
    {"type": "string", "pattern": "(a|a)*" * 20 + "b$"},
    {"type": "string", "pattern": "(a?){200}a{200}"},
    {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    {"type": "string", "allOf": [{"pattern": f"{c}.{{12}}{c}"} for c in "abcdefgh"]},
    {"type": "string", "maxLength": 1_000_000, "minLength": 999_999},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    {"type": "integer", "multipleOf": 7919, "minimum": -(10**15), "maximum": 10**15},
    {"enum": [f"value {i}" for i in range(4096)]},
    {"allOf": [{"anyOf": [{"required": [f"a{i}{j}"]} for j in range(4)]} for i in range(8)]},
    {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(16)}
        | {"d16": {"type": "integer"}},
        "$ref": "#/$defs/d0",
    },
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(256)},
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("schema", HOSTILE)
def test_hostile_schemas_cost_little(grammars, schema):
    """Each compiles or is refused; either way it takes no more than the limits allow."""
    began = time.process_time()
    try:
        row = grammars.open(json_grammar(schema))
    except RequestError:
        row = None
    for token in demo_frontend().encode('"aab{"a'):
        if row is not None and row.fault is None and token in legal_ids(row):
            follow(grammars, row, token)
    assert time.process_time() - began < 10


def test_compiled_grammars_are_kept_within_bounds(grammars, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    for text in (WORD, WORD, 'start: "1"', 'start: "2"', WORD):
        grammars.open(text)
    stats = grammars.stats()
    assert (stats["compiled"], stats["cached"]) == (4, 1)
    assert stats["compile_s"] > 0


def test_a_grammar_is_compiled_afresh_after_some_use(grammars, monkeypatch):
    """What the library learns of a grammar grows with use; at its limit the grammar would fail."""
    monkeypatch.setattr(module, "MAX_TOKENS", 3)
    row = grammars.open('start: "a"*')
    (a,) = demo_frontend().encode("a")
    for _ in range(2):
        follow(grammars, row, a)
    grammars.open('start: "a"*')
    assert grammars.stats()["compiled"] == 1
    follow(grammars, row, a)
    grammars.close()
    assert 'start: "a"*' not in grammars._cache


def test_a_grammar_that_failed_is_compiled_afresh(grammars):
    row = grammars.open(WORD)
    follow(grammars, row, *demo_frontend().encode("x"))
    assert row.fault is not None
    grammars.close()
    assert WORD not in grammars._cache
    with pytest.raises(UnavailableError):
        grammars.open(WORD)


def test_a_panic_of_the_library_costs_one_request(grammars, monkeypatch):
    class PanicError(BaseException):
        pass

    def panic(*args):
        raise PanicError("no such state")

    monkeypatch.setattr(grammars, "_fill", panic)
    with pytest.raises(InternalError, match="no such state"):
        grammars.open(WORD)
    monkeypatch.undo()
    row = grammars.open(WORD)
    monkeypatch.setattr(grammars, "_fill", panic)
    follow(grammars, row, *demo_frontend().encode("c"))
    assert row.error().code == "grammar_failed"


def test_opened_grammars_do_not_share_their_place(grammars):
    one, other = grammars.open(WORD), grammars.open(WORD)
    follow(grammars, one, *demo_frontend().encode("c"))
    assert not np.array_equal(one.row, other.row)
    assert np.array_equal(other.row, grammars.open(WORD).row)


def test_too_many_at_once_and_too_slow(grammars, monkeypatch):
    release = Event()
    compile_one = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda text: release.wait(60) and compile_one(text))
    monkeypatch.setattr(module, "MAX_COMPILING", 2)
    monkeypatch.setattr(module, "COMPILE_S", 0.01)
    for text in (WORD, 'start: "1"', WORD):
        with pytest.raises(RequestError, match="takes longer"):
            grammars.open(text)
    with pytest.raises(OverloadedError):
        grammars.open('start: "2"')
    release.set()
    monkeypatch.setattr(module, "COMPILE_S", 60)
    assert grammars.open(WORD).fault is None


def test_agent_tool_sets_are_cached(grammars):
    assert accepts(WORD, "cde")
    text = json_grammar({"type": "object", "properties": {f"p{i}": {} for i in range(50)}})
    grammars.open(text)
    began = time.process_time()
    for _ in range(100):
        grammars.open(text)
    assert time.process_time() - began < 5  # 50 ms each
