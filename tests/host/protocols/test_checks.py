"""Decoding and quoting of wire values: strict, exact, bounded."""

import json

import pytest

from appliance.protocols import checks
from appliance.protocols.openai_chat import parse_request
from appliance.protocols.openai_errors import MESSAGE_CHARS, PARAM_CHARS, error_body
from ginfer.errors import RequestError
from tests.host.protocols.bodies import CALL, DEFAULTS, body, nested


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", '{"a": Infinity}', "1e999", r'"\ud800"', "\ufeff{}", "[" * 900 + "1", "{}{}"],
)
def test_what_is_not_json_is_refused(text):
    with pytest.raises(RequestError, match="body is not JSON") as caught:
        checks.decoded(text.encode())
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("data", [b"\xff", b'"\xed\xa0\x80"', '{"a": 1}'.encode("utf-16")])
def test_bytes_that_are_not_utf_8_are_refused(data):
    with pytest.raises(RequestError, match="body is not JSON"):
        checks.decoded(data)


@pytest.mark.parametrize("depth", [10, 500])
def test_nesting_is_decoded(depth):
    assert checks.decoded("[" * depth + "]" * depth) == nested(depth - 1)


@pytest.mark.parametrize("depth", [1025, 5000])
def test_nesting_without_measure_is_refused(depth):
    with pytest.raises(RequestError, match="body is not JSON"):
        checks.decoded("[" * depth + "]" * depth)


def test_members_keep_their_order_and_integers_their_digits():
    text = '{"b": 123456789012345678901234567890, "a": [1.5, "\u00e9", null, true]}'
    value = checks.decoded(text)
    assert json.dumps(value, ensure_ascii=False) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"temperature": 0, "seed": 1, "temperature": 2}', "temperature"),
        ('{"messages": [{"role": "user", "content": "a", "content": "a"}]}', "content"),
        ('{"a": 1, "\\u0061": 1}', "a"),
    ],
)
def test_a_member_that_is_given_twice_is_refused_by_name(text, name):
    with pytest.raises(RequestError, match=f"'{name}' is given twice") as caught:
        checks.decoded(text)
    assert (caught.value.code, caught.value.param) == ("duplicate_member", name)


def test_arguments_of_a_call_are_exact_or_refused_too():
    def arguments(text):
        call = {**CALL, "function": {**CALL["function"], "arguments": text}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        return parse_request(body(messages=messages), defaults=DEFAULTS).messages[1].tool_calls

    (call,) = arguments('{"n": 123456789012345678901234567890}')
    assert call.arguments == {"n": 123456789012345678901234567890}
    with pytest.raises(RequestError, match="given twice") as caught:
        arguments('{"n": 1, "n": 2}')
    assert caught.value.param == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    "value", [nested(5000), {"k" * 10_000: 1}, "x" * 1_000_000, 10**300, list(range(100_000))]
)
def test_a_quoted_value_is_short_whatever_it_holds(value):
    assert len(checks.shown(value)) <= checks.SHOWN_CHARS


def test_an_error_that_quotes_a_long_name_is_cut():
    with pytest.raises(RequestError) as caught:
        parse_request(body(**{"k" * 100_000: 1}), defaults=DEFAULTS)
    error = error_body(caught.value)["error"]
    assert len(error["message"]) == MESSAGE_CHARS
    assert len(error["param"]) == PARAM_CHARS


def test_a_name_that_is_empty_is_refused_by_name():
    with pytest.raises(RequestError) as caught:
        parse_request(body(**{"": 1}), defaults=DEFAULTS)
    assert caught.value.param == "''"
