"""Context copy: drafts taken from where the last tokens of a request occurred before.

The longest match of the suffix wins, 6 to 12 tokens, then the most recent one. Windows of the
prompt are sorted once, those of generated tokens lie in a dictionary; hashes only find candidates,
tokens decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ginfer.config import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    I32 = NDArray[np.int32]
    U64 = NDArray[np.uint64]

SHORTEST, LONGEST = 6, 12  # tokens of a match
MAX_DRAFTS = MAX_DRAFT_TOKENS
MAX_CANDIDATES = 1024  # occurrences looked at, the most recent ones: bounds the work of a round

_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_OLDEST = pow(_FACTOR, SHORTEST - 1, 1 << 64)  # of the first token of a window


def _window_hashes(tokens: I32) -> U64:
    """Hash of each window of SHORTEST tokens, [len - SHORTEST + 1]: a polynomial modulo 2^64."""
    count = max(len(tokens) - SHORTEST + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for i in range(SHORTEST):
        hashes = hashes * np.uint64(_FACTOR) + tokens[i : i + count].astype(np.uint64)
    return hashes


class ContextCopy:
    """Tokens of one request and their index."""

    def __init__(self, prompt: Sequence[int] | I32, capacity: int) -> None:
        """capacity: most tokens that the request can have, prompt included."""
        self._tokens: I32 = np.zeros(capacity, np.int32)
        self._length = self._prompt_length = len(prompt)
        self._tokens[: self._length] = prompt
        hashes = _window_hashes(self._tokens[: self._length])
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._ends = hashes[order], (order + SHORTEST).astype(np.int64)
        self._generated: dict[int, list[int]] = {}
        tail: list[int] = self._tokens[: self._length][-SHORTEST:].tolist()
        self._ids, self._skipped = tail, self._length - len(tail)  # tokens behind so many others
        self._copied = self._length  # tokens that are in the array
        size = 1 << (8 * len(hashes)).bit_length()
        flags = np.zeros(size, np.uint8)
        flags[hashes & np.uint64(size - 1)] = 1
        self._flags = flags.tobytes()  # [hash % size]: whether a window of the prompt may have it
        self._last_hash = 0  # of the last window
        for token in tail:
            self._last_hash = (self._last_hash * _FACTOR + token) & _WORD
        self._is_likely = True  # whether an earlier window may have the last one's hash

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._length

    def follow(self, generated: Sequence[int]) -> bool:
        """Have all tokens that the request was given so far; whether `propose` may find any."""
        token_ids = generated[self._length - self._prompt_length :]
        ids, windows, value = self._ids, self._generated, self._last_hash
        flags, last = self._flags, len(self._flags) - 1
        n, first = self._length, self._length - self._skipped - SHORTEST  # of the window before
        for token in token_ids:
            n, first = n + 1, first + 1
            if first > 0:
                value -= ids[first - 1] * _OLDEST
            ids.append(token)
            value = (value * _FACTOR + token) & _WORD
            if first >= 0:
                ends = windows.get(value)
                if ends is None:
                    windows[value] = [n]
                    self._is_likely = flags[value & last] == 1
                else:
                    ends.append(n)
                    self._is_likely = True
        self._length, self._last_hash = n, value
        return self._is_likely

    def propose(self, limit: int = MAX_DRAFTS) -> list[int]:
        """Up to `limit` tokens that followed the best match, none without one. A match that
        overlaps the suffix goes on with its own tokens."""
        if limit < 1 or not self._may_match():
            return []
        self._tokens[self._copied : self._length] = self._ids[self._copied - self._skipped :]
        self._copied = self._length
        ends = self._candidates()
        if not ends.size:
            return []
        end = self._longest(ends)
        after = self._tokens[end : min(end + limit, self._length)].tolist()
        return (
            [after[i % len(after)] for i in range(limit)] if end + limit > self._length else after
        )

    def _may_match(self) -> bool:
        """Whether an earlier window may equal the last one: seldom in text that is new."""
        n, value = self._length, self._last_hash
        if n <= SHORTEST:
            return False
        if self._flags[value & (len(self._flags) - 1)]:
            at = int(self._hashes.searchsorted(np.uint64(value)))
            if at < len(self._hashes) and int(self._hashes[at]) == value:
                return True
        generated = self._generated.get(value)
        return generated is not None and generated[0] < n

    def _candidates(self) -> NDArray[np.int64]:
        """Ends of earlier windows equal to the last one, ascending, the most recent ones."""
        n, value = self._length, self._last_hash
        generated = self._generated.get(value, [])
        low = np.searchsorted(self._hashes, np.uint64(value), "left")
        high = np.searchsorted(self._hashes, np.uint64(value), "right")
        ends = np.concatenate([self._ends[low:high], np.array(generated, np.int64)])
        ends = ends[ends < n][-MAX_CANDIDATES:]
        windows = self._tokens[ends[:, None] - np.arange(SHORTEST, 0, -1)]
        same: NDArray[np.bool_] = (windows == self._tokens[n - SHORTEST : n]).all(axis=1)
        return ends[same]

    def _longest(self, ends: NDArray[np.int64]) -> int:
        """The end whose match is longest; of equals the last."""
        back = np.arange(SHORTEST + 1, LONGEST + 1)
        back = back[back <= self._length]
        places = ends[:, None] - back
        same = self._tokens[places] == self._tokens[self._length - back]
        lengths = np.logical_and.accumulate(same & (places >= 0), axis=1).sum(axis=1)
        return int(ends[len(ends) - 1 - int(np.argmax(lengths[::-1]))])
