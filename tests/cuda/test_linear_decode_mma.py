"""Decode linear without bulk copies on the GPU: the image of sm_90 where that of sm_90a is native.

Oracle at every format, epilogue and width; columns, plans and replay are equal bit for bit.
"""

from dataclasses import replace

import numpy as np
import pytest

from ginfer.cuda.linear.decode_launch import column_tiles, k_slices
from ginfer.cuda.linear.decode_mma import DecodeMmaPlan
from ginfer.cuda.linear.epilogue import EPILOGUES, Epilogue
from ginfer.cuda.linear.variants import image_kernels
from ginfer.cuda.runtime.image import Image
from ginfer.cuda.runtime.plan import PlanTable
from ginfer.formats import TILE_NBYTES
from tests.cuda.kernels import DECODE_MMA_SPANS
from tests.cuda.test_linear_decode import Case, tokens
from tests.tolerances import LINEAR_BF16, SILU_UP_BF16

SHAPES = ((128, 64), (200, 72), (201, 72), (1000, 520), (2048, 1024), (5120, 6144))
WIDTHS = (1, 8, 9, 17, 33, 64, 65, 128)


@pytest.fixture(scope="module")
def image(device, capability):
    """Its kernels and those of other plans."""
    name = "90" if capability == "90a" else capability
    items = (*image_kernels(name, every=False), *DECODE_MMA_SPANS)
    return Image.open(name, items, device_capability=device.info.capability)


@pytest.fixture
def case(memory, image, stream):
    def make(fmt, shape):
        return Case(memory, image, stream, fmt, shape)

    return make


@pytest.mark.parametrize("fmt", EPILOGUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_oracle_at_every_epilogue_and_width(case, fmt, shape):
    it = case(fmt, shape)
    for epilogue in EPILOGUES[fmt]:
        if epilogue == Epilogue.SILU_UP and it.N % 32:
            continue  # gate and up alternate in tiles of 16 rows
        bound = SILU_UP_BF16 if epilogue == Epilogue.SILU_UP else LINEAR_BF16
        for T in WIDTHS:
            x = tokens(T, it.K, seed=T)
            bound.check(it.run(x, epilogue), it.want(x, epilogue), f"{epilogue} {T}")


@pytest.mark.parametrize("fmt", EPILOGUES)
def test_a_column_alone_is_itself_in_any_company_bit_for_bit(case, fmt):
    it, epilogue = case(fmt, (1024, 2048)), EPILOGUES[fmt][0]
    assert k_slices(1024, 2048)[1] > 1
    x = tokens(128, it.K)
    alone = np.concatenate([it.run(x[t : t + 1], epilogue) for t in range(0, 128, 9)])
    for T in WIDTHS:
        together = it.run(x[:T], epilogue)[::9]
        assert (together.view(np.uint32) == alone[: len(together)].view(np.uint32)).all()


def test_plans_and_replay_change_no_bit(case):
    it = case("Q4G64_F16S", (2048, 1024))
    x = tokens(9, it.K)
    want = it.run(x, Epilogue.STORE_BF16).view(np.uint32)
    assert (it.run(x, Epilogue.STORE_BF16, graph=True).view(np.uint32) == want).all()
    shape = (it.N, it.K, column_tiles(9), TILE_NBYTES[it.fmt])
    for item in DECODE_MMA_SPANS:
        plan = DecodeMmaPlan(item.arguments[2])
        table = PlanTable(it.image.capability, {("linear_decode_mma", shape): plan})
        it.image = replace(it.image, plans=table)
        assert (it.run(x, Epilogue.STORE_BF16).view(np.uint32) == want).all()
