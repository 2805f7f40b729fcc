"""Tokenizer, piece cache and detokeniser against the library and Python's own decoder."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from unicodedata import normalize

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from ginfer.errors import ArtifactError, InternalError, RequestError
from ginfer.frontend.detokenizer import Detokenizer
from ginfer.frontend.piece_cache import PieceCache
from ginfer.frontend.tokenizer import MARK, Tokenizer
from tests.frontends import demo_frontend, demo_resources

PROPERTY = settings(derandomize=True, deadline=None, database=None, max_examples=400)
TOKENS = json.loads(demo_resources()["tokenizer.json"])["added_tokens"]
CONTROL = [t["content"] for t in TOKENS if t["special"]]
ADDED = [t["content"] for t in TOKENS]
FRAGMENTS = [*ADDED, "<|", "|>", "<|im_", "im_end|>", "<", " ", "\n", "e\u0301", "\u212b", MARK]
TEXT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=8)), max_size=12).map(
    "".join
)


@pytest.fixture(scope="module")
def library() -> LibraryTokenizer:
    return LibraryTokenizer.from_str(demo_resources()["tokenizer.json"].decode())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo_frontend().tokenizer


def test_encode_equals_the_library(library: LibraryTokenizer, tokenizer: Tokenizer) -> None:
    @PROPERTY
    @given(TEXT)
    def check(text: str) -> None:
        want = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == want  # cold or warm
        assert tokenizer.encode(text).tolist() == want  # warm

    check()


def test_escaped_text_is_ordinary_text_wherever_it_stands(tokenizer: Tokenizer) -> None:
    @PROPERTY
    @given(TEXT, st.sampled_from(["", ">", "|>", "|im_end|>", "<|im_end|>", "_start|>", "\n"]))
    @example("a<|im_end|", ">")
    @example("<|im_start ", "|>")
    def check(text: str, after: str) -> None:
        escaped = tokenizer.escape(text)
        assert tokenizer.unescape(escaped) == text
        for inner in (escaped, escaped.strip()):
            whole = "<|im_start|>" + inner + after + "<|im_end|>"
            ids = tokenizer.encode(whole, escaped=True).tolist()
            num_control = sum(i in tokenizer.control_ids for i in ids)
            assert num_control == 2 + (after == "<|im_end|>")
            spelled = tokenizer.decode_bytes(ids).decode()
            plain = tokenizer.unescape(inner)
            want = [plain, after] if after == "<|im_end|>" else [plain + after]
            assert spelled == "<|im_start|>" + "".join(map(_normalised, want)) + "<|im_end|>"

    check()


def _normalised(text: str) -> str:
    """Text as the tokenizer's normaliser leaves it: NFC between markup tokens."""
    markup = "|".join(re.escape(t) for t in ADDED if t not in CONTROL)
    parts = re.split(f"({markup})", text)
    return "".join(p if i % 2 else normalize("NFC", p) for i, p in enumerate(parts))


def test_config_tokens_missing_in_the_tokenizer_file_are_added(library: LibraryTokenizer) -> None:
    config = {
        "added_tokens_decoder": {
            "4111": {"content": "<|audio_pad|>", "special": True},
            "4112": {"content": "<note>", "special": False},
        }
    }
    ours = Tokenizer(demo_resources()["tokenizer.json"], json.dumps(config).encode())
    extended = LibraryTokenizer.from_str(library.to_str())
    extended.add_special_tokens([AddedToken("<|audio_pad|>", normalized=False, special=True)])
    extended.add_tokens([AddedToken("<note>", normalized=False)])
    text = "x<note>y<|audio_pad|>z<|im_end|>"
    assert ours.encode(text).tolist() == extended.encode(text, add_special_tokens=False).ids
    assert ours.added_token_id("<|audio_pad|>") == 4111
    assert ours.token_bytes(4112) == b"<note>"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"truncation": {"max_length": 2048}}, "truncation"),
        ({"added_tokens": [{"id": 1, "content": "<a>", "lstrip": True}]}, "<a>"),
        ({"added_tokens": [{"id": 1, "content": "<a>"}, {"id": 2, "content": "x<a>"}]}, "overlap"),
        ({"added_tokens": [{"id": 1, "content": "<a"}, {"id": 2, "content": "a>"}]}, "overlap"),
        ({"added_tokens": [{"id": 1, "content": "aba"}]}, "overlap"),
        ({"model": {"type": "None"}}, "not a usable tokenizer"),
    ],
)
def test_unusable_tokenizer_file_is_refused(change: dict[str, object], words: str) -> None:
    document = json.loads(demo_resources()["tokenizer.json"]) | change
    with pytest.raises(ArtifactError, match=words):
        Tokenizer(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000])
def test_tokenizer_file_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer(data)


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D800"):
        tokenizer.encode("a\ud800b")


def test_id_outside_the_vocabulary_is_an_internal_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(InternalError, match="4111"):
        tokenizer.token_bytes(4111)


def test_remembered_piece_is_replayed(library: LibraryTokenizer) -> None:
    tokenizer = Tokenizer(demo_resources()["tokenizer.json"])
    text = "assistant\nhello there"
    canonical = tokenizer.encode(text).tolist()
    spelled = [i for b in text for i in tokenizer.encode(b).tolist()]  # one token per character
    assert spelled != canonical
    assert tokenizer.remember(text, spelled)
    whole = f"<|im_start|>{text}<|im_end|>"
    start, end = (tokenizer.added_token_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert tokenizer.encode(whole).tolist() == [start, *spelled, end]
    other = f"<|im_start|>{text}!<|im_end|>"
    assert tokenizer.encode(other).tolist() == library.encode(other).ids
    assert not tokenizer.remember("hello", canonical)
    assert not tokenizer.remember(whole, [start, *spelled, end])
    assert not tokenizer.remember("", [])


@settings(PROPERTY, max_examples=100)
@given(
    st.lists(st.tuples(st.text(max_size=5), st.integers(0, 40), st.booleans()), max_size=60),
    st.integers(0, 3000),
)
def test_piece_cache_is_bounded_and_evicts_the_oldest(
    steps: list[tuple[str, int, bool]], limit: int
) -> None:
    cache = PieceCache(limit)
    for piece, n, read in steps:
        if read:
            (ids,) = cache.get_many([piece])
            assert ids is None or ids[:1].tolist() == [len(piece)]
        else:
            cache.put(piece, np.full(max(n, 1), len(piece), np.int32))
        cache.check_integrity()


def test_piece_cache_keeps_what_was_used_last() -> None:
    cache = PieceCache(1200)
    ids = np.zeros(1, np.int32)
    cache.put("a", ids)
    cache.put("b", ids)
    assert cache.get_many("a") != [None]
    cache.put("c", ids)
    assert [x is None for x in cache.get_many("abc")] == [False, True, False]
    cache.put("d", np.zeros(1000, np.int32))  # above the limit: not kept, and evicts nothing
    assert len(cache) == 2


def test_detokenizer_pieces_join_to_the_whole(tokenizer: Tokenizer) -> None:
    num_ids = max(t["id"] for t in TOKENS) + 1
    of_byte = {tokenizer.token_bytes(i): i for i in range(4096)}

    def joined(ids: list[int]) -> str:
        stream = Detokenizer(tokenizer)
        return "".join([*map(stream.feed, ids), stream.finish()])

    @PROPERTY
    @given(st.lists(st.integers(0, num_ids - 1), max_size=20), st.binary(max_size=12))
    @example([], "€".encode()[:2])
    @example([], b"\xf0\x9f\x98\xc3\xa9\xed\xa0\x80\xff")
    def check(ids: list[int], raw: bytes) -> None:
        ids = ids + [of_byte[bytes([b])] for b in raw]
        want = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        assert joined(ids) == want

    check()


def test_halves_of_characters_do_not_mix_between_streams(tokenizer: Tokenizer) -> None:
    of_byte = {tokenizer.token_bytes(i): i for i in range(4096)}
    euro = [of_byte[bytes([b])] for b in "€".encode()]
    for _ in range(2):  # texts of tokens that stood alone are kept from stream to stream
        whole, broken = Detokenizer(tokenizer), Detokenizer(tokenizer)
        assert [broken.feed(i) for i in euro[1:]] == ["\ufffd", "\ufffd"]
        assert [whole.feed(i) for i in euro] == ["", "", "€"]
        assert [broken.feed(i) for i in euro[:2]] == ["", ""]
        assert broken.finish() == "\ufffd"
        assert broken.feed(euro[1]) == "\ufffd"


@settings(PROPERTY, max_examples=200)
@given(st.text(max_size=40))
def test_detokenizer_never_shows_half_a_character(text: str) -> None:
    tokenizer = demo_frontend().tokenizer
    ids = tokenizer.encode(text).tolist()
    stream = Detokenizer(tokenizer)
    parts = [*map(stream.feed, ids), stream.finish()]
    whole = tokenizer.decode_bytes(ids).decode()
    assert "".join(parts) == whole
    assert parts[-1] == ""


def test_detokenizer_hides_what_it_is_told_to(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b<think>c").tolist()
    hidden = Detokenizer(tokenizer, hidden=tokenizer.control_ids)
    assert "".join(map(hidden.feed, ids)) == "ab<think>c"
    shown = Detokenizer(tokenizer)
    assert "".join(map(shown.feed, ids)) == "a<|im_end|>b<think>c"


def test_encode_is_safe_between_threads() -> None:
    tokenizer = Tokenizer(demo_resources()["tokenizer.json"], cache_nbytes=4000)
    texts = [f"turn {i}<|im_end|>tail {i % 3}" for i in range(40)]
    want = [tokenizer.encode(t).tolist() for t in texts]
    with ThreadPoolExecutor(min(4, (os.cpu_count() or 1) * 2)) as pool:
        got = list(pool.map(lambda t: tokenizer.encode(t).tolist(), texts * 10))
    assert got == want * 10
    tokenizer.cache.check_integrity()
