"""Stop strings: any split of any text into tokens agrees with a search over the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.engine.request import StopString
from ginfer.engine.stops import StopMatcher

TEXT = st.text("abc", max_size=24)
STOPS = st.lists(
    st.builds(StopString, text=st.text("abc", min_size=1, max_size=4), include=st.booleans()),
    max_size=4,
)


def naive(tokens, stops):
    """(shown text, winner) by looking at everything after each token."""
    seen = ""
    for token in tokens:
        seen += token
        found = [(seen.index(s.text), i) for i, s in enumerate(stops) if s.text in seen]
        if found:
            at, i = min(found)
            return seen[: at + len(stops[i].text) * stops[i].include], stops[i]
    return seen, None


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(tokens=st.lists(st.text("abc", max_size=5), max_size=12), stops=STOPS)
def test_any_tokens_agree_with_the_whole_text(tokens, stops):
    matcher, shown = StopMatcher(stops), ""
    expected, winner = naive(tokens, stops)
    for token in tokens:
        shown += matcher.feed(token)
        assert expected.startswith(shown), "text was shown that must be withheld"
        if matcher.match:
            break
    assert matcher.match is winner
    assert shown + matcher.flush() == expected


@settings(max_examples=500, deadline=None, derandomize=True)
@given(text=TEXT, stop=st.text("abc", min_size=1, max_size=5), data=st.data())
def test_one_stop_string_does_not_depend_on_the_split(text, stop, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    tokens = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    matcher, shown = StopMatcher([StopString(text=stop)]), ""
    for token in tokens:
        shown += matcher.feed(token)
        if matcher.match:
            break
    assert shown + matcher.flush() == text.split(stop)[0]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(text=TEXT, stops=STOPS)
def test_nothing_is_held_back_without_need(text, stops):
    matcher = StopMatcher(stops)
    shown = matcher.feed(text)
    if not matcher.match:
        held = text[len(shown) :]
        assert not held or any(s.text.startswith(held) for s in stops)


def test_fewest_tokens_then_first_byte_then_declaration():
    stops = [StopString(text="bc"), StopString(text="abcd"), StopString(text="abc")]
    for tokens, winner in ((("abcd",), 1), (("abc", "d"), 2), (("ab", "c"), 2), (("xbc",), 0)):
        matcher = StopMatcher(stops)
        for token in tokens:
            matcher.feed(token)
            if matcher.match:
                break
        assert matcher.match is stops[winner]
