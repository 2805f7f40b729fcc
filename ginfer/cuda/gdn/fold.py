"""Fold: recurrent slots after some columns of a recorded forward, all GDN layers in one launch.

Verification leaves state_in as it is, and records what each layer's recurrence read: raw and
convolved channels and gate inputs of every column. The fold replays the first columns of a row from
state_in to state_out with the device functions of the step, so the state is bit for bit that of
decoding them one by one. The history becomes the last three raw columns. A block takes a layer, a
row and half of the columns of a value head's S, which need nothing of each other; the first block
of a key head moves the history of its query and key too.

Legend as in `gdn.step`; L GDN layers. Records: mix [L][T][W], convolved [L][T][X] BF16, ab [L][T]
[2 HV] FP32, a layer's part strides apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.gdn.conv import TAPS
from ginfer.cuda.gdn.recurrence import (
    AHEAD,
    GATES,
    HELD,
    PLACE_NBYTES,
    WARPS,
    WIDTH,
    difference,
    load_column,
    load_state,
    multiply,
    offset_in_head,
    store_state,
    update,
)
from ginfer.cuda.lib.numeric import follow_late, row_of_32
from ginfer.cuda.lib.ptx import (
    div_u32,
    f32_from_bits,
    ld_global_u32,
    ld_shared_u32x4,
    shared_address,
    st_global_u32,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

HALVES = 2
THREADS = WARPS * 32 // HALVES  # small blocks: some read while others compute and write
LEFT = 0xFFFFFFFF  # columns of a row whose slot stays as it is
WORDS = WIDTH // 2  # of a head in a raw column


@kernel(*(int64,) * 14, *(uint32,) * 4)
def gdn_fold_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments state, history, gates, mix, convolved, ab, indptr, state_in, state_out, columns,
    columns of mix, bytes of a layer's mix, convolved and ab, B, HK, HV, slots.

    state: [L][slots][HV][K][V] FP32, history: [L][slots][taps - 1][X] BF16. gates: [L][2][HV]
    FP32. columns: [B] u32, of each row, LEFT to leave its slot alone.
    """
    (start, wait), place_words = follow_late(early), AHEAD * PLACE_NBYTES // 4
    resident = 2 * HALVES if early else HALVES  # as in the step

    @cuda.jit(device=True, inline="always")
    def move_history(new, old, raw, W, count, X, thread):
        """Two channels per thread: the last rows of the old history and `count` raw columns."""
        for k in range(TAPS - 1):
            at = raw + (count - (TAPS - 1) + k) * W * 2
            if count + k < TAPS - 1:
                at = old + (count + k) * X * 2
            st_global_u32(new + k * X * 2, ld_global_u32(at))

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, resident))
    def gdn_fold(
        state,
        history,
        gates,
        mix,
        convolved,
        ab,
        indptr,
        state_in,
        state_out,
        columns,
        W,
        mix_nbytes,
        convolved_nbytes,
        ab_nbytes,
        B,
        HK,
        HV,
        slots,
    ):
        places = shared_address(cuda.shared.array(place_words, float32))
        s, p = cuda.local.array(HELD, float32), cuda.local.array(4, float32)
        start()
        thread, half = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x & uint32(HALVES - 1))
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        whole = uint32(half * uint32(THREADS) + thread)  # of the threads of a head
        head = uint32(cuda.blockIdx.x >> uint32(HALVES - 1))
        item = div_u32(head, HV)
        h = uint32(head - item * HV)
        layer = div_u32(item, B)
        row = uint32(item - layer * B)
        group = div_u32(HV, HK)
        key = div_u32(h, group)
        heads, X = (h, key, HK, HV), int64(HK * uint32(2) + HV) * WIDTH
        first_slot = int64(layer) * int64(slots)
        read = first_slot + int64(ld_global_u32(row_of_32(state_in, row)))
        written = first_slot + int64(ld_global_u32(row_of_32(state_out, row)))
        share = int64(h) * (WIDTH * WIDTH * 4) + offset_in_head(whole)
        slot_nbytes = int64(HV) * (WIDTH * WIDTH * 4)
        load_state(s, state + read * slot_nbytes + share)
        first = int64(ld_global_u32(row_of_32(indptr, row)))
        rows = uint32(places + (lane >> uint32(2)) * uint32(16))
        gates += int64(layer) * int64(HV) * 8
        mix += int64(layer) * mix_nbytes + first * W * 2
        convolved += int64(layer) * convolved_nbytes + first * X * 2
        ab += int64(layer) * ab_nbytes + first * int64(HV) * 8
        wait()
        count = ld_global_u32(row_of_32(columns, row))
        t, end = uint32(0), uint32(0) if count == uint32(LEFT) else count
        while t < end:
            n, c = min(uint32(end - t), uint32(AHEAD)), warp
            while c < n:
                own, mine = int64(t + c), uint32(places + c * uint32(PLACE_NBYTES))
                at = ab + own * int64(HV) * 8
                load_column(mine, convolved + own * X * 2, at, gates, heads, lane)
                c = uint32(c + uint32(THREADS // 32))
            cuda.syncthreads()
            c = uint32(0)
            while c < n:
                skip = uint32(c * uint32(PLACE_NBYTES))
                place, at_k = uint32(places + skip), uint32(rows + skip)
                scalars = ld_shared_u32x4(uint32(place + uint32(GATES)))
                both = (f32_from_bits(scalars[0]), f32_from_bits(scalars[1]))
                difference(p, multiply(s, at_k, lane), place, both, whole)
                update(s, p, both[0], at_k)
                c = uint32(c + uint32(1))
            t = uint32(t + n)
            cuda.syncthreads()
        if count != uint32(LEFT):
            store_state(state + written * slot_nbytes + share, s)
            part = uint32(whole >> uint32(6))
            if part == uint32(0) or (part < uint32(3) and h == key * group):
                head = uint32(uint32(2) * HK + h)
                if part > uint32(0):
                    head = uint32((part - uint32(1)) * HK + key)
                at = (int64(head) * WORDS + int64(thread & uint32(WORDS - 1))) * 4
                old = history + read * X * (2 * TAPS - 2) + at
                new = history + written * X * (2 * TAPS - 2) + at
                move_history(new, old, mix + at, W, int64(count), X, thread)

    return Build(gdn_fold, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel."""
    yield gdn_fold_kernel(starts_early(capability))


@dataclass(frozen=True)
class Recorded:
    """Addresses and bytes per layer of the records [L][T][..]: mix of W columns, convolved, ab."""

    mix: int
    convolved: int
    ab: int
    W: int
    mix_nbytes: int
    convolved_nbytes: int
    ab_nbytes: int

    def layer(self, index: int) -> tuple[int, int, int]:
        """Addresses of a layer's mix, ab and convolved."""
        ab = self.ab + index * self.ab_nbytes
        return (
            self.mix + index * self.mix_nbytes,
            ab,
            self.convolved + index * self.convolved_nbytes,
        )


@dataclass(frozen=True)
class FoldLayers:
    """Addresses of states, histories and gates [2][HV] of L layers; key and value heads; slots
    per layer."""

    state: int
    history: int
    gates: int
    L: int
    HK: int
    HV: int
    slots: int


@dataclass(frozen=True)
class FoldRows:
    """Addresses of indptr [B + 1], slots read and written and columns to replay [B], all u32."""

    indptr: int
    state_in: int
    state_out: int
    columns: int
    B: int


def gdn_fold(queue: Queue, records: Recorded, *, rows: FoldRows, layers: FoldLayers) -> None:
    """Slots state_out = state and history after the first columns of each row."""
    r, f = records, layers
    queue.launch(
        gdn_fold_kernel(queue.early),
        (f.L * rows.B * f.HV * HALVES,),
        *(f.state, f.history, f.gates, r.mix, r.convolved, r.ab),
        *(rows.indptr, rows.state_in, rows.state_out, rows.columns),
        *(r.W, r.mix_nbytes, r.convolved_nbytes, r.ab_nbytes),
        *(rows.B, f.HK, f.HV, f.slots),
    )
