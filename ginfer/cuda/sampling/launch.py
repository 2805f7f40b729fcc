"""Selection: host records of draws and results, which kernels an image holds, the launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ginfer.cuda.runtime.memory import Slice, set_bytes
from ginfer.cuda.runtime.queue import starts_early
from ginfer.cuda.sampling.choose import FEW, selection_choose_kernel, selection_top_kernel
from ginfer.cuda.sampling.keys import STATE_NBYTES, selection_keys_kernel
from ginfer.cuda.sampling.sift import selection_bins_kernel, selection_sift_kernel
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ginfer.batch import SelectionBatch
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

BLOCKS, LEAST_BLOCKS = 256, 16  # of the passes over many blocks: of all rows, of one
UNIT = 2.0**40
DRAW = np.dtype(  # as `sampling.keys` reads it
    [
        ("row", "<i4"),
        ("top_k", "<i4"),
        ("temperature", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("forced", "<i4"),
        ("position", "<i4"),
        ("purpose", "<i4"),
        ("seed", "<u8"),
        ("top_p", "<u8"),
        ("least", "<u8"),
        ("cuts", "<u4"),
        ("bias", "<i4", 2),
        ("path", "<i4"),
        ("how", "<u4"),
        ("rest", "<i4"),
    ]
)
RESULT = np.dtype(  # as `sampling.choose` writes it
    [
        ("token", "<i4"),
        ("sound", "<u4"),
        ("logit", "<f4"),
        ("best", "<u4"),
        ("mass", "<u8"),
        ("accepted", "<i4"),
        ("rest", "<i4"),
    ]
)


def draw_records(s: SelectionBatch) -> NDArray[Any]:
    """One record per selected column. Fractions become integers in units of 2^-40 here, where
    float64 is at hand."""
    records = np.zeros(len(s.columns), DRAW)
    for field, values in (
        ("row", s.rows),
        ("top_k", s.top_k),
        ("temperature", s.temperature),
        ("presence", s.presence),
        ("frequency", s.frequency),
        ("forced", s.forced),
        ("position", s.positions),
        ("purpose", s.purposes),
        ("seed", s.seeds),
    ):
        records[field] = values
    records["top_p"] = np.minimum(s.top_p, 1.0).astype(np.float64) * UNIT + 0.5
    records["least"] = np.ceil(s.min_p.astype(np.float64) * UNIT)
    records["cuts"] = s.top_p < 1
    records["bias"][:, 0], records["bias"][:, 1] = s.bias_indptr[:-1], s.bias_indptr[1:]
    return records


def key_values(keys: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The values of keys, as `sampling.exact.value_of`."""
    keys = keys.astype(np.uint32)
    high = keys >> np.uint32(31) == 1
    bits = np.where(high, keys ^ np.uint32(0x80000000), keys ^ np.uint32(0xFFFFFFFF))
    return bits.astype(np.uint32).view(np.float32)


def logprob(value: Any, best: Any, mass: Any) -> NDArray[np.float32]:
    """Log-softmax of FP32 logits, given the best legal ones and the masses of all."""
    share = np.asarray(mass, np.float64) / UNIT
    return np.asarray(np.subtract(value, best).astype(np.float64) - np.log(share), np.float32)


def best_ids(top: NDArray[np.uint64]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and raw logits of a row of `selection_top`, best first, ties to the lower id."""
    legal = top[top != 0]
    keys, ids = (legal >> np.uint64(32)).astype(np.uint32), (legal & np.uint64(0xFFFFFFFF))
    order = np.lexsort((ids, -keys.astype(np.int64)))
    return ids[order].astype(np.int32), key_values(keys[order])


@dataclass(frozen=True)
class SelectionScratch:
    """Device memory of a selection of at most R rows of V ids: keys and what blocks exchange."""

    states: Slice
    raw: Slice
    adjusted: Slice
    few: Slice
    top: Slice


def scratch_nbytes(R: int, V: int, most_top: int) -> dict[str, int]:
    """Bytes of each part of `SelectionScratch`."""
    S = align_up(V, 4)
    return {
        "states": R * STATE_NBYTES,
        "raw": R * S * 4,
        "adjusted": R * S * 4,
        "few": R * FEW * 4,
        "top": R * max(most_top, 1) * 8,
    }


@dataclass(frozen=True)
class SelectionTables:
    """Device addresses: draws [R] records, mask [R][ceil(V / 32)] or 0, bias ids and values, counts
    [lanes][V] u32, results [R] records, tokens [lanes] u32; ids [R] of the columns where they have
    a path."""

    draws: int
    mask: int
    bias_ids: int
    bias_values: int
    counts: int
    results: int
    tokens: int
    ids: int = 0


@dataclass(frozen=True)
class SelectionShape:
    """R rows of V legal ids; bytes of a row of logits; best ids wanted (0: none); whether all that
    is wanted are the best ids of rows of temperature 0, without log-probabilities; whether some row
    follows the rejection rule."""

    R: int
    V: int
    logits_nbytes: int
    num_top: int = 0
    greedy: bool = False
    rejects: bool = False


def blocks_of_row(R: int) -> int:
    """Blocks of a row in passes over many blocks."""
    return max(BLOCKS // R, LEAST_BLOCKS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """Every step."""
    early = starts_early(capability)
    yield selection_keys_kernel(early)
    yield selection_bins_kernel(early)
    yield selection_sift_kernel(early)
    yield selection_choose_kernel(early)
    yield selection_top_kernel(early)


def select(
    queue: Queue,
    logits: int,
    *,
    tables: SelectionTables,
    scratch: SelectionScratch,
    shape: SelectionShape,
) -> None:
    """Choose one id for each of R rows of logits [R] FP32."""
    t, s, R, S, early = tables, scratch, shape.R, align_up(shape.V, 4), queue.early
    blocks = blocks_of_row(R)
    set_bytes(s.states.part(0, R * STATE_NBYTES), 0, queue.stream)
    queue.launch(
        selection_keys_kernel(early),
        (R * blocks,),
        *(s.raw.address, s.adjusted.address, s.states.address, logits, t.draws, t.mask),
        *(
            t.bias_ids,
            t.bias_values,
            t.counts,
            t.ids,
            t.tokens,
            shape.V,
            shape.logits_nbytes,
            blocks,
            not shape.greedy,
        ),
    )
    if not shape.greedy:
        share, keys = (t.draws, S, blocks), s.adjusted.address
        bins = (s.states.address, s.raw.address, keys, *share)
        queue.launch(selection_bins_kernel(early), (R * blocks,), *bins)
        sift = (s.states.address, s.few.address, keys, *share)
        queue.launch(selection_sift_kernel(early), (R * blocks,), *sift)
    queue.launch(
        selection_choose_kernel(early),
        (R,),
        *(t.results, t.tokens, s.states.address, s.adjusted.address, s.few.address, logits),
        *(t.draws, t.counts, shape.V, S, shape.logits_nbytes),
    )
    if shape.num_top:
        top = (s.top.address, s.raw.address, S, shape.num_top)
        queue.launch(selection_top_kernel(early), (R,), *top)
