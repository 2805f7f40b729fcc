"""Runs single kernels of the CPU image as its backend does, on poisoned memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import get_num_threads

from ginfer.batch import ForwardBatch, Phase, WorkUnits
from ginfer.cpu import attention, gdn
from ginfer.cpu.kv_codec import Pages
from ginfer.cpu.rope import frequency_axes, inverse_frequencies, rope_table
from ginfer.cpu.stage import Staged, stage
from ginfer.spec import BLOCK_TOKENS, KvCodec

EPS = np.float32(1e-6)
NAN = np.float32(np.nan)
F16_NAN = np.uint16(0x7E00)
BF16_NAN = np.uint16(0x7FC0)
PAGE = 64


def batch_of(
    phase: Phase,
    lengths: list[int],
    starts: list[int],
    page_table: np.ndarray,
    slots: tuple[list[int], list[int]] | None = None,
) -> ForwardBatch:
    """A batch of rows with `lengths` new columns after `starts`; token ids are zero."""
    tokens = np.concatenate([s + np.arange(n) for n, s in zip(lengths, starts)]).astype(np.int32)
    rows = list(range(len(lengths)))
    state_in, state_out = slots or (rows, rows)
    return ForwardBatch(
        phase=phase,
        token_ids=np.zeros(tokens.size, np.int32),
        positions=np.ascontiguousarray(np.tile(tokens, (3, 1))),
        row_indptr=np.cumsum([0, *lengths]).astype(np.int32),
        starts=np.array(starts, np.int32),
        page_table=page_table.astype(np.int32),
        state_in=np.array(state_in, np.int32),
        state_out=np.array(state_out, np.int32),
    )


def poisoned(*shape: int) -> np.ndarray:
    """float32 NaN."""
    return np.full(shape, NAN, np.float32)


@dataclass
class Attention:
    """Paged K/V of `pages` pages, all NaN, with two attention layers; the kernels use layer 1. kv:
    BF16 bits, or INT8 codes."""

    H: int
    G: int
    D: int
    pages: int
    rotary: int = 16
    workers: int = 1  # of decode
    num_partials: int = 1 << 30
    codec: KvCodec = KvCodec.BF16
    kv: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.heads = attention.Heads(self.H, self.G, self.D, np.float32(self.D**-0.5))
        heads = (self.pages, 2, 2, self.G)
        self.kv = np.full((*heads, PAGE * self.D), BF16_NAN, np.uint16)
        self.scales = np.full((*heads, -(-self.D // 64), PAGE), F16_NAN, np.uint16)
        if self.codec is KvCodec.INT8:
            self.kv = np.ones(self.kv.shape, np.int8)
        r = np.random.default_rng(3)
        self.w_q, self.w_k = (r.uniform(0.5, 1.5, self.D).astype(np.float32) for _ in range(2))
        half = self.rotary // 2
        self.sections = (half - 2 * (half // 3), half // 3, half // 3)

    def staged(self, batch: ForwardBatch) -> Staged:
        """The batch with its rotation table."""
        F = self.rotary // 2
        cos, sin = poisoned(batch.num_columns, F), poisoned(batch.num_columns, F)
        blocks = batch.page_table.shape[1] * PAGE // BLOCK_TOKENS + 1
        units = WorkUnits(
            batch.num_rows,
            batch.num_columns,
            blocks,
            group=attention.GROUP,
            workers=self.workers,
            num_partials=self.num_partials,
        )
        staged = stage(batch, cos, sin, units)
        axes = frequency_axes(self.sections)
        rope_table(cos, sin, staged.positions, axes, inverse_frequencies(1e4, F))
        return staged

    @property
    def planes(self) -> Pages:
        """The pages as the kernels take them."""
        empty = (0, *self.kv.shape[1:])
        if self.codec is KvCodec.INT8:
            return Pages(np.zeros(empty, np.uint16), self.kv, self.scales)
        return Pages(self.kv, np.zeros(empty, np.int8), self.scales[:0])

    def run(
        self, batch: ForwardBatch, qkgv: np.ndarray, waves: tuple[tuple[int, int], ...] = ()
    ) -> np.ndarray:
        """[T, H D] of a batch, decode in `waves` of columns; qkgv is left as it was."""
        staged, x = self.staged(batch), qkgv.copy()
        T, threads = batch.num_columns, get_num_threads()
        out = poisoned(T, self.H * self.D)
        weights = (self.w_q, self.w_k, self.heads, staged.columns)
        kv = self.planes
        rooms = np.zeros((threads, attention.room_elements(self.heads, kv)), np.uint16)
        if batch.phase is Phase.PREFILL:
            scratch = poisoned(threads, attention.prefill_scratch(self.heads))
            spaces = (staged.items, scratch, rooms, EPS)
            attention.attention_prefill(out, x, kv, 1, *weights, *spaces)
            return out
        attention.append_columns(x, kv, 1, *weights, EPS)
        scratch = poisoned(threads, attention.decode_scratch(self.heads))
        tables, first = (staged.columns, staged.work), staged.work.first
        for wave in waves or ((0, T),):
            slots = int(first[wave[1]] - first[wave[0]])
            spaces = (poisoned(slots * self.H * self.D), poisoned(2, slots * self.H))
            last = (*spaces, scratch, rooms)
            attention.attention_decode(out, x, kv, 1, self.heads, *tables, wave, *last)
        return out

    def history(self, page_table: np.ndarray, row: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values [n, G, D] of a row's first n tokens, read back from its pages."""
        if self.codec is KvCodec.INT8:
            values = self.kv.astype(np.float64) * self._factors()
        else:
            values = (self.kv.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        pages = values[page_table[row, : -(-n // PAGE)], 1]  # [P, 2, G, 64 D]
        k = pages[:, 0].reshape(len(pages), self.G, self.D, PAGE).transpose(0, 3, 1, 2)
        v = pages[:, 1].reshape(len(pages), self.G, PAGE, self.D).transpose(0, 2, 1, 3)
        flat = (-1, self.G, self.D)
        return k.reshape(flat)[:n], v.reshape(flat)[:n]

    def _factors(self) -> np.ndarray:
        """The scale of each code, in the order of the codes."""
        scales = self.scales.view(np.float16).astype(np.float64)
        wide = np.repeat(scales, 64, axis=-2)[..., : self.D, :]
        wide = wide.reshape(self.kv.shape)
        values = wide[:, :, 1].reshape(-1, self.D, PAGE).swapaxes(-1, -2)
        wide[:, :, 1] = values.reshape(wide[:, :, 1].shape)
        return wide


@dataclass
class Gdn:
    """State of `slots` slots, all NaN but those that `clear` zeroes."""

    HK: int
    HV: int
    K: int
    V: int
    slots: int = 4
    taps: int = 4

    def __post_init__(self) -> None:
        r = np.random.default_rng(4)
        self.X = 2 * self.HK * self.K + self.HV * self.V
        self.shape = gdn.Shape(self.HK, self.HV, self.K, self.V)
        self.a_log = r.uniform(-3, 1, self.HV).astype(np.float32)
        self.weights = gdn.Weights(
            r.standard_normal((self.taps, self.X)).astype(np.float32) / 2,
            (-np.exp(self.a_log.astype(np.float64))).astype(np.float32),
            r.standard_normal(self.HV).astype(np.float32),
            r.uniform(0.5, 1.5, self.V).astype(np.float32),
        )
        self.state = poisoned(self.slots, self.HV, self.K * self.V)
        self.conv = poisoned(self.slots, self.taps - 1, self.X)

    def clear(self, *slots: int) -> None:
        """The state before the first token."""
        self.state[list(slots)] = 0
        self.conv[list(slots)] = 0

    def inputs(self, T: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(mix [T, X + HV V], ab [T, 2 HV])."""
        r = np.random.default_rng(seed)
        mix = r.standard_normal((T, self.X + self.HV * self.V)).astype(np.float32)
        return mix, r.standard_normal((T, 2 * self.HV)).astype(np.float32)

    def run(self, batch: ForwardBatch, mix: np.ndarray, ab: np.ndarray) -> np.ndarray:
        """[T, HV V] of a batch."""
        T = batch.num_columns
        units = WorkUnits(
            batch.num_rows, T, 1 + int(batch.starts.max() + T) // BLOCK_TOKENS, group=16
        )
        rows = stage(batch, poisoned(0, 1), poisoned(0, 1), units).rows
        out = poisoned(T, self.HV * self.V)
        scratch = poisoned(get_num_threads(), gdn.gdn_scratch(self.shape))
        mix, ab = mix.copy(), ab.copy()
        tail = (mix, ab, self.state, self.conv, rows, self.weights, self.shape, EPS, scratch)
        if batch.phase is Phase.PREFILL:
            gdn.gdn_prefill(out, poisoned(T, self.X), *tail)
        else:
            gdn.gdn_decode(out, *tail)
        return out
