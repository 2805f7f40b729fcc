"""Prefill linear on the GPU: float64 oracle at every format, plan, epilogue and border of tiles.

Tokens, plans, grids and replay are equal bit for bit; the mma.sync variant runs here, too.
"""

import numpy as np
import pytest

from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.prefill_launch import (
    MMA,
    LinearPrefillPlan,
    PrefillLinear,
    PrefillTokens,
    image_kernels,
    linear_prefill,
    plans_of,
    token_maps,
)
from ginfer.cuda.runtime.graph import Graph
from ginfer.cuda.runtime.image import Image
from ginfer.cuda.runtime.tensor_map import place_tensor_maps
from ginfer.formats import TILE_NBYTES
from scripts.pack.codecs import bf16_bits
from tests.cuda.test_linear_decode import tokens, weights
from tests.oracles.formats import bf16_to_f32
from tests.tolerances import LINEAR_BF16, SILU_UP_BF16

SHAPES = ((128, 64), (96, 1032), (200, 72), (1001, 320), (2048, 1024))
ROWS = 2048  # of the buffer of tokens


@pytest.fixture(scope="module", params=["90a", "90"])
def image(request, device, capability):
    """Its prefill kernels; sm_90 has the variant of older capabilities."""
    if capability != "90a":
        pytest.skip("the kernels of sm_90")
    items = image_kernels(request.param, every=False)
    return Image.open(request.param, items, device_capability=device.info.capability)


class Case:
    """One matrix and its tokens on the device; run() multiplies the first T."""

    def __init__(self, memory, image, stream, fmt, shape):
        self.memory, self.image, self.stream, self.fmt = memory, image, stream, fmt
        payload, self.W = weights(fmt, *shape)
        self.N, self.K = self.W.shape
        self.w = memory.put(payload)
        self.x = tokens(ROWS, self.K)
        xs = memory.put(bf16_bits(self.x))
        self.address = xs.address
        views = token_maps(xs.address, rows=ROWS, K=self.K)
        placed = memory.arena.take(len(views) * 128, "maps", alignment=128)
        addresses = place_tensor_maps(list(views.values()), placed)
        self.maps = dict(zip(views, addresses, strict=True))

    def plans(self):
        """The plans in use on this image."""
        return plans_of(TILE_NBYTES[self.fmt]) if self.image.capability == "90a" else (MMA,)

    def run(self, T, epilogue, plan, *, num_sms=132, graph=False):
        """The result of T tokens as float32 [T, N or N / 2]."""
        shape = (T, self.N // 2 if epilogue == Epilogue.SILU_UP else self.N)
        if epilogue == Epilogue.ADD_BF16:
            y = self.memory.put(np.full(shape, 0x3F80, np.uint16))
        else:
            f32 = epilogue == Epilogue.STORE_F32
            y = self.memory.empty(shape, np.float32 if f32 else np.uint16)
        linear = PrefillLinear(
            w=self.w.address,
            fmt=self.fmt,
            N=self.N,
            K=self.K,
            epilogue=epilogue,
            num_sms=num_sms,
        )
        some = PrefillTokens(x=self.address, T=T, maps=self.maps)

        def work():
            linear_prefill(
                self.image, self.stream, y.address, tokens=some, linear=linear, plan=plan
            )

        if graph:
            captured = Graph(self.stream, work)
            captured.replay()
            self.stream.synchronize()
            captured.close()
        else:
            work()
            self.stream.synchronize()
        got = y.read()
        return got if epilogue == Epilogue.STORE_F32 else bf16_to_f32(got)

    def want(self, T, epilogue):
        """The oracle, float64."""
        z = self.x[:T].astype(np.float64) @ self.W.T
        if epilogue == Epilogue.ADD_BF16:
            return z + 1
        if epilogue == Epilogue.SILU_UP:
            pairs = z.reshape(T, -1, 2, 16)
            gate, up = pairs[:, :, 0], pairs[:, :, 1]
            return (gate / (1 + np.exp(-gate)) * up).reshape(T, -1)
        return z


@pytest.fixture
def case(memory, image, stream):
    def make(fmt, shape):
        return Case(memory, image, stream, fmt, shape)

    return make


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_oracle_at_every_epilogue_and_border_of_tiles(case, fmt, shape):
    it = case(fmt, shape)
    for epilogue in EPILOGUES[fmt]:
        if epilogue == Epilogue.SILU_UP and it.N % 32:
            continue  # gate and up alternate in tiles of 16 rows
        bound = SILU_UP_BF16 if epilogue == Epilogue.SILU_UP else LINEAR_BF16
        for plan in it.plans():
            for T in (1, plan.tile_n - 1, plan.tile_n, plan.tile_n + 1):
                bound.check(it.run(T, epilogue, plan), it.want(T, epilogue), f"{plan} {T}")


@pytest.mark.parametrize("fmt", EPILOGUES)
def test_a_token_is_itself_in_any_company_and_plan_bit_for_bit(case, fmt):
    it = case(fmt, (1024, 2048))
    epilogue = EPILOGUES[fmt][0]
    want = it.run(ROWS, epilogue, it.plans()[0]).view(np.uint32)
    for plan in it.plans():
        for T in (1, 7, 33, 300, ROWS):
            got = it.run(T, epilogue, plan).view(np.uint32)
            assert (got == want[:T]).all(), (plan, T)


def test_grid_and_replay_change_no_bit(case):
    it = case("Q4G64_F16S", (2048, 1024))
    plan = LinearPrefillPlan.default(it.image.capability, (2048, 1024, 500, 4352))
    want = it.run(500, Epilogue.STORE_BF16, plan).view(np.uint32)
    for num_sms in (1, 5, 132):
        for graph in (False, True):
            got = it.run(500, Epilogue.STORE_BF16, plan, num_sms=num_sms, graph=graph)
            assert (got.view(np.uint32) == want).all()
