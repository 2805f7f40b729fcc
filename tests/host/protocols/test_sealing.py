"""Sealed texts come back whole, are unreadable, and every change is noticed."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.protocols.sealing import Seal
from ginfer.errors import RequestError

SEAL = Seal(b"k" * 32, "reasoning")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(text):
    assert SEAL.open(SEAL.seal(text), "p") == text


def test_it_is_opaque_and_never_the_same():
    first, second = SEAL.seal("secret thought"), SEAL.seal("secret thought")
    assert first != second
    assert b"secret" not in base64.urlsafe_b64decode(first)


def opened(sealed, seal=SEAL):
    with pytest.raises(RequestError) as caught:
        seal.open(sealed, "input.0.encrypted_content")
    assert caught.value.code == "invalid_encrypted_content"
    assert caught.value.param == "input.0.encrypted_content"


def test_every_changed_byte_is_noticed():
    data = base64.urlsafe_b64decode(SEAL.seal("thought"))
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1
        opened(base64.urlsafe_b64encode(bytes(changed)).decode())


@pytest.mark.parametrize("sealed", ["", "a", "gAAAAABo", "é", "AAAA" * 40, "\x00"])
def test_what_was_never_sealed_is_refused(sealed):
    opened(sealed)


def test_another_key_or_purpose_does_not_open_it():
    opened(Seal(b"x" * 32, "reasoning").seal("thought"))
    opened(Seal(b"k" * 32, "other").seal("thought"))
    sealed = SEAL.seal("thought")
    opened(sealed[:-4])
    opened(sealed, Seal(b"k" * 32, "other"))
