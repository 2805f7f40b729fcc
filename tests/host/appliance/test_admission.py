"""What arrives is bounded by number and by bytes, and everything is given back."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from appliance.admission import Admission
from ginfer.errors import OverloadedError


def test_places_are_bounded_and_given_back() -> None:
    admission = Admission(num_places=2, max_nbytes=100)
    with ExitStack() as stack:
        stack.enter_context(admission.place())
        stack.enter_context(admission.place())
        with pytest.raises(OverloadedError), admission.place():
            pass
        assert admission.num_taken == 2
    assert admission.num_taken == 0


def test_bytes_of_all_requests_are_bounded_and_given_back() -> None:
    admission = Admission(num_places=3, max_nbytes=100)
    with admission.place() as first:
        first.grow(60)
        with admission.place() as second:
            second.grow(40)
            with pytest.raises(OverloadedError):
                second.grow(1)
        assert admission.nbytes == 60
        first.grow(40)
    assert admission.nbytes == 0


def test_a_failed_request_gives_back_what_it_took() -> None:
    admission = Admission(num_places=1, max_nbytes=10)

    def fail() -> None:
        with admission.place() as place:
            place.grow(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (admission.num_taken, admission.nbytes) == (0, 0)
