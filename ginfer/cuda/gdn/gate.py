"""Gated norm of the results of a GDN layer: y[t, h] = o[t, h] / rms(o[t, h]) * w * silu(z[t, h]).

Half a warp per head, eight columns per lane. Sums are FP32, in one order for every T.

Legend: T tokens, HV value heads, V = 128, W columns of `mix`, z the last HV V of them. Oracle:
tests.oracles.norm.gated_rms_norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int64, uint32

from ginfer.cuda.gdn.recurrence import WIDTH
from ginfer.cuda.lib.numeric import follow, load_bf16x8, load_f32x8, pack_bf16, silu
from ginfer.cuda.lib.ptx import (
    div_u32,
    fma_f32,
    rsqrt_approx,
    shfl_xor_f32,
    st_global_u32x4,
)
from ginfer.cuda.runtime.jit import Build, kernel
from ginfer.cuda.runtime.queue import starts_early
from ginfer.sizes import div_ceil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ginfer.cuda.gdn.step import GdnLayer
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.queue import Queue

THREADS, LANES = 256, 16


@kernel(*(int64,) * 4, *(uint32,) * 3, float32)
def gated_norm_kernel(early: int):  # type: ignore[no-untyped-def]
    """Arguments y, o, mix, w, T, HV, W, eps. y: [T][HV V] BF16, o: FP32. w: [V] FP32."""
    start, heads = follow(early), THREADS // LANES

    @cuda.jit(fastmath=True, launch_bounds=THREADS)
    def gated_norm(y, o, mix, w, T, HV, W, eps):
        v, z = cuda.local.array(8, float32), cuda.local.array(8, float32)
        f = cuda.local.array(8, float32)
        start()
        thread = uint32(cuda.threadIdx.x)
        lane = int64(thread & uint32(LANES - 1))
        item = uint32(uint32(cuda.blockIdx.x) * uint32(heads) + (thread >> uint32(4)))
        t = div_u32(item, HV)
        h = uint32(item - t * HV)
        there = t < T
        load_f32x8(f, w + lane * 32)
        column = int64(W) - int64(HV) * WIDTH + int64(h) * WIDTH + lane * 8
        if there:
            load_f32x8(v, o + int64(item) * (4 * WIDTH) + lane * 32)
            load_bf16x8(z, mix + (int64(t) * int64(W) + column) * 2)
        else:
            for i in range(8):
                v[i], z[i] = float32(0.0), float32(0.0)
        total = float32(0.0)
        for i in range(8):
            total = fma_f32(v[i], v[i], total)
        total = total + shfl_xor_f32(total, uint32(8))
        total = total + shfl_xor_f32(total, uint32(4))
        total = total + shfl_xor_f32(total, uint32(2))
        total = total + shfl_xor_f32(total, uint32(1))
        inv = rsqrt_approx(total / float32(WIDTH) + eps)
        for i in range(8):
            v[i] = v[i] * inv * f[i] * silu(z[i])
        if there:
            st_global_u32x4(
                y + int64(item) * (2 * WIDTH) + lane * 16,
                pack_bf16(v[0], v[1]),
                pack_bf16(v[2], v[3]),
                pack_bf16(v[4], v[5]),
                pack_bf16(v[6], v[7]),
            )

    return Build(gated_norm, THREADS)


def image_kernels(capability: str, *, every: bool) -> Iterator[Kernel]:
    """One kernel."""
    yield gated_norm_kernel(starts_early(capability))


def gated_norm(queue: Queue, y: int, o: int, mix: int, *, T: int, layer: GdnLayer) -> None:
    """y [T, HV V] BF16 of results o [T, HV V] FP32; mix: [T, W] BF16."""
    grid = (div_ceil(T * layer.HV, THREADS // LANES),)
    item = gated_norm_kernel(queue.early)
    queue.launch(item, grid, y, o, mix, layer.w, T, layer.HV, layer.W, layer.eps)
