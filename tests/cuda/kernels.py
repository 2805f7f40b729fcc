"""Small kernels that exercise the runtime: one feature each."""

from __future__ import annotations

from numba import cuda, float32, int32, int64, uint32

from ginfer.cuda.lib.ptx import (
    add_rn_f32,
    atomic_inc_u32,
    f32_from_bits,
    fence_async_proxy,
    ld_acquire_system_u32,
    ld_acquire_u32,
    ld_global_f32,
    ld_global_u32,
    ld_shared_u32,
    let_next_kernel_start,
    mbarrier_expect_bytes,
    mbarrier_init,
    mbarrier_try_wait,
    shared_address,
    st_global_f32,
    st_global_u32,
    st_release_system_u32,
    st_shared_u32,
    tensor_copy_2d_to_shared,
    wait_for_previous_kernel,
)
from ginfer.cuda.linear.decode_mma import linear_decode_mma_kernel
from ginfer.cuda.runtime.jit import Build, kernel


@kernel(int64, int64, uint32)
def scale_kernel(threads, factor):
    """y[i] = factor * x[i], float32, i < n."""

    @cuda.jit(fastmath=True, launch_bounds=threads)
    def scale(y, x, n):
        i = uint32(cuda.blockIdx.x * uint32(threads) + cuda.threadIdx.x)
        if i < n:
            at = int64(i) * 4
            st_global_f32(y + at, ld_global_f32(x + at) * float32(factor))

    return Build(scale, threads)


@kernel(int64, float32, uint32)
def add_kernel(threads):
    """y[i] += value, float32, i < n; waits for the kernel before it and lets the next one start."""

    @cuda.jit(fastmath=True, launch_bounds=threads)
    def add(y, value, n):
        let_next_kernel_start()
        wait_for_previous_kernel()
        i = uint32(cuda.blockIdx.x * uint32(threads) + cuda.threadIdx.x)
        if i < n:
            at = y + int64(i) * 4
            st_global_f32(at, ld_global_f32(at) + value)

    return Build(add, threads, since_sm_90=True)


@kernel(int64)
def fault_kernel():
    """Writes one word to the address."""

    @cuda.jit(launch_bounds=32)
    def fault(address):
        if cuda.threadIdx.x == 0:
            st_global_u32(address, uint32(1))

    return Build(fault, 32)


@kernel(int64)
def reverse_kernel(words):
    """y[i] = words - 1 - i by way of `words` words of dynamic shared memory."""
    threads = 128

    @cuda.jit(launch_bounds=threads)
    def reverse(y):
        shared = uint32(shared_address(cuda.shared.array(0, uint32)))
        for i in range(uint32(cuda.threadIdx.x), uint32(words), uint32(threads)):
            st_shared_u32(uint32(shared + uint32(i) * uint32(4)), uint32(i))
        cuda.syncthreads()
        for i in range(uint32(cuda.threadIdx.x), uint32(words), uint32(threads)):
            from_end = uint32(uint32(words - 1) - uint32(i))
            word = ld_shared_u32(uint32(shared + from_end * uint32(4)))
            st_global_u32(y + int64(i) * 4, word)

    return Build(reverse, threads, words * 4)


@kernel(int64, int64, uint32)
def meet_kernel():
    """Every block waits at `counter` until all `blocks` are there, then writes 1 to its y."""

    @cuda.jit(launch_bounds=32)
    def meet(y, counter, blocks):
        if cuda.threadIdx.x == 0:
            atomic_inc_u32(counter, uint32(0xFFFFFFFF))
            while ld_acquire_u32(counter) < blocks:
                pass
            st_global_u32(y + int64(cuda.blockIdx.x) * 4, uint32(1))

    return Build(meet, 32)


@kernel(*(int64,) * 6, uint32)
def sum_of_ranks_kernel(threads):
    """out[i] = mine[i] + peer[i], float32, i < n, once both ranks are there: a block raises a flag
    at the peer and waits for its own. Epochs, one word a block, grow by one per launch."""

    @cuda.jit(launch_bounds=threads)
    def sum_of_ranks(out, mine, peer, my_flags, peer_flags, epochs, n):
        flag = int64(cuda.blockIdx.x) * 4
        epoch = uint32(ld_global_u32(epochs + flag) + uint32(1))
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            st_release_system_u32(peer_flags + flag, epoch)
            while ld_acquire_system_u32(my_flags + flag) < epoch:
                pass
            st_global_u32(epochs + flag, epoch)
        cuda.syncthreads()
        i = uint32(cuda.blockIdx.x * uint32(threads) + cuda.threadIdx.x)
        if i < n:
            at = int64(i) * 4
            theirs = f32_from_bits(ld_acquire_system_u32(peer + at))
            st_global_f32(out + at, ld_global_f32(mine + at) + theirs)

    return Build(sum_of_ranks, threads)


@kernel(int64, int64, uint32, uint32)
def tile_kernel(words):
    """y = the box at (row, column) of a tensor map, `words` words as they lie in shared memory."""
    nbytes = words * 4

    @cuda.jit(launch_bounds=32)
    def tile(y, tensor_map, row, column):
        barrier_words = cuda.shared.array(1, int64)
        barrier = uint32(shared_address(barrier_words))
        box = uint32(
            (uint32(shared_address(cuda.shared.array(0, uint32))) + uint32(1023))
            & uint32(0xFFFFFC00)
        )
        if cuda.threadIdx.x == 0:
            mbarrier_init(barrier, uint32(1))
            fence_async_proxy()
            mbarrier_expect_bytes(barrier, uint32(nbytes))
            tensor_copy_2d_to_shared(box, tensor_map, column, row, barrier)
        cuda.syncthreads()
        while mbarrier_try_wait(barrier, uint32(0)) == 0:
            pass
        for i in range(uint32(cuda.threadIdx.x), uint32(words), uint32(32)):
            word = ld_shared_u32(uint32(box + uint32(i) * uint32(4)))
            st_global_u32(y + int64(i) * 4, word)

    return Build(tile, 32, nbytes + 1024)


@kernel(int64)
def double_kernel():
    """Computes in float64, which the compiler refuses."""

    @cuda.jit(launch_bounds=32)
    def double(y):
        st_global_f32(y, float32(ld_global_f32(y) * 1.1))

    return Build(double, 32)


@kernel(int64)
def wrong_kernel():
    """Is no legal code."""

    @cuda.jit(launch_bounds=32)
    def wrong(y):
        st_global_f32(y, "text")

    return Build(wrong, 32)


@kernel(int64)
def spilling_kernel():
    """Keeps 128 sums in a block of 1,024 threads, which have 64 registers each."""
    threads, sums = 1024, 128

    @cuda.jit(launch_bounds=threads)
    def spilling(y):
        c = cuda.local.array(sums, float32)
        at = y + int64(cuda.threadIdx.x) * 512
        for i in range(sums):
            c[i] = ld_global_f32(at + i * 4)
        cuda.syncthreads()
        for i in range(sums):
            st_global_f32(at + (sums - 1 - i) * 4, c[i])

    return Build(spilling, threads)


@kernel(int64, uint32)
def stack_kernel():
    """Indexes a local array by a value, so that it lies in a stack frame."""
    words = 64

    @cuda.jit(launch_bounds=32)
    def stack(y, n):
        v = cuda.local.array(words, uint32)
        for i in range(n):
            v[(uint32(i) * n) & uint32(63)] = uint32(i)
        for i in range(n):
            st_global_u32(y + int64(i) * 4, v[uint32(i) & uint32(63)])

    return Build(stack, 32)


ANYWHERE = (
    *(scale_kernel(256, 3), fault_kernel(), reverse_kernel(20_000), meet_kernel()),
    sum_of_ranks_kernel(256),
)
SM_90 = (add_kernel(256), tile_kernel(1024))
DECODE_MMA_SPANS = tuple(linear_decode_mma_kernel("Q4G64_F16S", 2, span) for span in (2, 3))


def kernels_for(capability):
    """The kernels that the runtime's tests launch on a device."""
    return ANYWHERE + (SM_90 if capability == "90a" else DECODE_MMA_SPANS)


ZERO, ONE = float32(0), float32(1)


@cuda.jit(device=True, inline="always")
def clamp(value, low=ZERO, high=ONE):
    """A function with two ways out and defaults."""
    if value < low:
        return low
    return min(value, high)


@kernel(int64, int64, uint32)
def calls_kernel(threads):
    """Device functions called by place, by name and with defaults, in each other and in a loop."""

    @cuda.jit(device=True, inline="always")
    def clamp_pair(values, x, at):
        values[0], values[1] = clamp(ld_global_f32(x + at)), clamp(ld_global_f32(x + at + 4))
        second = add_rn_f32(*(values[1],), *(float32(0.0),))
        return clamp(values[0], second), clamp(value=second, high=float32(2), low=values[0])

    @cuda.jit(launch_bounds=threads)
    def calls(y, x, n):
        values = cuda.local.array(2, float32)
        i = uint32(cuda.threadIdx.x)
        while i < n:
            at = int64(i) * 8
            low, high = clamp_pair(values, x, at)
            st_global_f32(y + at, clamp(low, high=high))
            st_global_f32(y + at + 4, clamp(high, low))
            i = uint32(i + uint32(threads))

    return Build(calls, threads)


@kernel(int64, int32, int32, int32)
def ranges_kernel(threads):
    """Loops over ranges: of constants and of arguments, up, down, by steps, of no number at all."""
    few = 3

    @cuda.jit(launch_bounds=threads)
    def ranges(y, first, last, step):
        at = y
        for i in range(few):
            for j in range(i, last, 5):
                st_global_u32(at, uint32(i * 100 + j))
                at += 4
        for i in range(last):
            if i == 7:
                continue
            st_global_u32(at, uint32(i))
            at += 4
        for i in range(uint32(last)):
            st_global_u32(at, uint32(i + first))
            at += 4
        for i in range(first, last, step):
            st_global_u32(at, uint32(i))
            at += 4
        for i in range(last, first, -2):
            st_global_u32(at, uint32(i))
            at += 4
        for i in range(9, 2, -3):
            st_global_u32(at, uint32(i))
            at += 4
        for i in range(2, 2):
            st_global_u32(at, uint32(i))
            at += 4
        for i in range(1, 12, 4):
            if i > last:
                break
            st_global_u32(at, uint32(i))
            at += 4

    return Build(ranges, threads)
