"""Grammars of requests: compiled before they queue, masks computed beside the forward.

A grammar is llguidance text. It constrains the content channel: from the token after the reasoning
on, or from the first one. Tokens that the engine forces are no part of it. At its end only the
model's stop tokens are legal.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from dataclasses import dataclass
from threading import Event, Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from ginfer.errors import InternalError, OverloadedError, RequestError, UnavailableError
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ginfer.engine.output import Output
    from ginfer.engine.rank import Flight
    from ginfer.frontend.base import Frontend

log = logging.getLogger(__name__)

MAX_NBYTES = 1 << 20  # of one grammar's text
MAX_CACHED = 32  # compiled grammars that are kept
MAX_TOKENS = 16_384  # that a compiled grammar is used for: the library keeps every state it has met
CACHE_NBYTES = 16 << 20  # of text whose compiled grammars are kept
MAX_REASON = 300  # characters of an error of the library
MAX_COMPILING = 16  # at once, running or waiting
COMPILE_S = 10.0  # longest wait for a grammar to compile


class _Vocabulary:
    """The tokenizer as llguidance takes it. Control and reasoning tokens are no text: no grammar
    can ask for them by spelling them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, frontend: Frontend, vocab_size: int) -> None:
        self._frontend = frontend
        self.eos_token_id = frontend.stop_token_ids[0]
        self.special_token_ids = list(frontend.reserved_token_ids)
        self.tokens = [_bytes(frontend, i) for i in range(vocab_size)]

    def __call__(self, text: str) -> list[int]:
        return self._frontend.encode(text)


def _bytes(frontend: Frontend, token_id: int) -> bytes:
    try:
        return frontend.token_bytes(token_id)
    except InternalError:
        return b""  # an id without a token is never legal


@dataclass(eq=False)
class Compiled:
    """A grammar at its start: `row` is the mask of its first token. Requests share what its copies
    learn; num_tokens: how many tokens they took."""

    text: str
    matcher: LLMatcher
    row: NDArray[np.uint32]
    num_tokens: int = 0


class Constraint:
    """The grammar of one request, followed token by token.

    Read `row`, the mask of the next token, and `fault`, why the grammar cannot go on, once `ready`
    is set.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.row = compiled, compiled.row
        self.matcher = compiled.matcher.deep_copy()
        self.active = False  # the next token belongs to the content
        self.fault: str | None = None
        self.pending: list[int] = []
        self.ready = Event()
        self.ready.set()

    def error(self) -> RequestError:
        """The fault as what the request's caller sees."""
        message = f"the grammar cannot be followed any further: {self.fault}; simplify it"
        return RequestError(message, code="grammar_failed", param="grammar")

    def consume(self) -> None:
        """Take the pending tokens; one that the grammar does not admit is a fault."""
        ids, self.pending = self.pending, []
        self.compiled.num_tokens += len(ids)
        if self.fault is None and ids and not self.matcher.consume_tokens(ids):
            self.fault = _reason(self.matcher)


class RowMask:
    """Implements `TokenMask` over the rows of one selection."""

    def __init__(self, grammars: Grammars, rows: Sequence[Constraint | None]) -> None:
        self._grammars, self._rows = grammars, rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """[R, ceil(vocab / 32)], after waiting for the rows that are not ready."""
        began = perf_counter()
        mask = np.full((len(self._rows), self._grammars.num_words), 0xFFFFFFFF, np.uint32)
        for target, constraint in zip(mask, self._rows, strict=True):
            if constraint is not None and constraint.active:
                constraint.ready.wait()
                if constraint.fault is None:
                    target[:] = constraint.row
        self._grammars.wait_s += perf_counter() - began
        return mask if dtype is None else mask.astype(dtype, copy=False)


class PathMask:
    """Implements `TokenMask` over the columns of rows that verify drafts: column i of a row is
    legal behind its first i drafts. What follows an illegal draft is not reached."""

    def __init__(self, grammars: Grammars, rows: Sequence[tuple[Constraint | None, list[int]]]):
        self._grammars, self._rows = grammars, rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """[T, ceil(vocab / 32)], after waiting for what is not ready."""
        began = perf_counter()
        T = sum(len(drafts) + 1 for _, drafts in self._rows)
        mask, at = np.full((T, self._grammars.num_words), 0xFFFFFFFF, np.uint32), 0
        for constraint, drafts in self._rows:
            if constraint is not None and constraint.active:
                constraint.ready.wait()
                if constraint.fault is None:
                    self._grammars.fill_path(constraint, drafts, mask[at : at + len(drafts) + 1])
            at += len(drafts) + 1
        self._grammars.wait_s += perf_counter() - began
        return mask if dtype is None else mask.astype(dtype, copy=False)


class Grammars:
    """Compiler, cache and mask workers of one engine.

    mask_s: seconds workers spent; wait_s: seconds the loop spent on masks or waiting for them;
    compile_s: seconds of compilation, num_compiled of them, num_cached found ready.
    """

    def __init__(self, frontend: Frontend, vocab_size: int) -> None:
        self._frontend, self._vocab_size = frontend, vocab_size
        self.num_words = div_ceil(vocab_size, 32)
        self.mask_s = self.wait_s = self.compile_s = 0.0
        self.num_compiled = self.num_cached = 0
        self._lock = Lock()  # guards the cache and the counters of compilation
        self._cache: OrderedDict[str, Compiled] = OrderedDict()
        self._compiling: dict[str, Future[Compiled]] = {}
        self._closed = False
        self._limits = LLParserLimits(verbose_errors=False)
        self._compilers = ThreadPoolExecutor(2, "ginfer-compile")
        self._tokenizer = self._compilers.submit(self._open_tokenizer)
        self._workers = ThreadPoolExecutor(2, "ginfer-mask")
        self._executor = LLExecutor(max(1, min(8, (os.cpu_count() or 1) // 2)))

    # -- before a request queues: any thread -------------------------------------------------------

    def open(self, text: str) -> Constraint:
        """A fresh constraint by the grammar `text`. Raises RequestError when it does not compile,
        matches nothing or takes too long; OverloadedError when too many compile at once."""
        if len(text) > MAX_NBYTES:
            raise RequestError(
                f"the grammar has {len(text)} characters; legal: up to {MAX_NBYTES}",
                param="grammar",
            )
        with self._lock:
            found = self._cache.get(text)
            if found is not None:
                self._cache.move_to_end(text)
                self.num_cached += 1
                return Constraint(found)
            pending = self._compiling.get(text)
            if pending is None:
                if len(self._compiling) >= MAX_COMPILING:
                    raise OverloadedError("too many grammars are being compiled; try again later")
                if self._closed:
                    raise UnavailableError("the engine is closed")
                pending = self._compilers.submit(self._compile, text)
                self._compiling[text] = pending
        try:
            return Constraint(pending.result(COMPILE_S))
        except WaitTimeoutError:
            raise RequestError(
                f"the grammar takes longer than {COMPILE_S:g} s to compile; simplify it",
                param="grammar",
            ) from None

    def _compile(self, text: str) -> Compiled:
        began = perf_counter()
        try:
            matcher = LLMatcher(self._tokenizer.result(), text, log_level=0, limits=self._limits)
            row = np.zeros(self.num_words, np.uint32)
            if not matcher.is_error():
                self._fill([(matcher, 0)], row[None])
            if matcher.is_error():
                raise RequestError(
                    f"the grammar does not compile: {_reason(matcher)}", param="grammar"
                )
            compiled = Compiled(text, matcher, row)
        except RequestError:
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            log.exception("a grammar cannot be compiled")
            raise InternalError(f"the grammar cannot be compiled: {error!r}") from None
        finally:
            with self._lock:
                del self._compiling[text]
                self.num_compiled += 1
                self.compile_s += perf_counter() - began
        with self._lock:
            self._cache[text] = compiled
            while len(self._cache) > MAX_CACHED or sum(map(len, self._cache)) > CACHE_NBYTES:
                self._cache.popitem(last=False)
        return compiled

    def _open_tokenizer(self) -> LLTokenizer:
        """Takes a second or two for a large vocabulary: begun at start, before it is needed."""
        return LLTokenizer(
            _Vocabulary(self._frontend, self._vocab_size),  # type: ignore[arg-type]
            n_vocab=self._vocab_size,
            eos_token=list(self._frontend.stop_token_ids),
        )

    # -- while it runs: the loop thread ------------------------------------------------------------

    def mask(self, rows: Sequence[Constraint | None]) -> RowMask | None:
        """Masks for the rows of a selection; None when no row is constrained."""
        if any(row is not None and row.active for row in rows):
            return RowMask(self, rows)
        return None

    def path_mask(self, rows: Sequence[Constraint | None], flight: Flight) -> PathMask | None:
        """Masks for the columns of rows that verify drafts; None when no row is constrained."""
        assert flight.plan is not None
        if not any(row is not None and row.active for row in rows):
            return None
        paths = (
            flight.drafts(i) if row is not None and row.active else [0] * width
            for i, (row, width) in enumerate(zip(rows, flight.plan.widths, strict=True))
        )
        return PathMask(self, list(zip(rows, paths)))

    def fill_path(self, row: Constraint, drafts: list[int], masks: NDArray[np.uint32]) -> None:
        """Masks of the next token and of those behind each draft, [drafts + 1, words]."""
        masks[0] = row.row
        if drafts:
            size = masks.shape[1] * 4
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                [(row.matcher, 0, drafts)], masks.ctypes.data, size, len(masks)
            )

    def follow(self, row: Constraint, output: Output, token_id: int, *, forced: bool) -> None:
        """Note the token that `output` has just committed."""
        if row.active:
            if not forced:
                row.pending.append(token_id)
        elif output.in_content:
            row.active = True
            row.pending += self._frontend.encode(output.content_began)

    def advance(self, rows: Sequence[Constraint]) -> None:
        """Have a worker take the pending tokens and compute the next masks."""
        began = perf_counter()
        rows = [row for row in rows if row.pending]
        if rows:
            for row in rows:
                row.ready.clear()
            self._workers.submit(self._advance, rows)
            self.wait_s += perf_counter() - began

    def _advance(self, rows: Sequence[Constraint]) -> None:
        began = perf_counter()
        try:
            for row in rows:
                row.consume()
            live = [row for row in rows if row.fault is None]
            masks = np.zeros((len(live), self.num_words), np.uint32)
            self._fill([(row.matcher, i) for i, row in enumerate(live)], masks)
            for row, mask in zip(live, masks, strict=True):
                row.row = mask
                if row.matcher.is_error():
                    row.fault = _reason(row.matcher)
        except BaseException as error:  # a panic of the library is not an Exception
            log.exception("masks cannot be computed")
            for row in rows:
                row.fault = repr(error)
        finally:
            self.mask_s += perf_counter() - began
            for row in rows:
                row.ready.set()
                if row.fault is not None or row.compiled.num_tokens >= MAX_TOKENS:
                    self._retire(row.compiled)

    def _retire(self, compiled: Compiled) -> None:
        """Compile a grammar afresh for those that come next."""
        with self._lock:
            if self._cache.get(compiled.text) is compiled:
                del self._cache[compiled.text]

    def _fill(self, matchers: list[tuple[LLMatcher, int]], rows: NDArray[np.uint32]) -> None:
        """Masks of matchers into rows [N, words]."""
        if matchers:
            size = rows.shape[1] * 4
            self._executor.unsafe_compute_mask_ptr(matchers, rows.ctypes.data, size, len(rows))

    def stats(self) -> dict[str, float]:
        """Counters as plain values."""
        return {
            "mask_s": self.mask_s,
            "wait_s": self.wait_s,
            "compile_s": self.compile_s,
            "compiled": self.num_compiled,
            "cached": self.num_cached,
        }

    def close(self) -> None:
        """End the workers; no grammar is compiled any more."""
        with self._lock:
            self._closed = True
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._workers.shutdown()


def _reason(matcher: LLMatcher) -> str:
    """Why a matcher gave up, in one line."""
    return matcher.get_error().partition("\n")[0][:MAX_REASON] or str(matcher.stop_reason())
