"""Verification on the GPU: columns, tokens and the state that is left are those of plain decode."""

import numpy as np
import pytest

from ginfer.backend import MemoryPlan
from ginfer.cuda.backend import CudaBackend
from ginfer.engine.memory import page_nbytes
from ginfer.spec import KvCodec
from tests.cuda.test_backend import WIDE
from tests.verification_cases import Verification

WIDTHS = (8, 3, 16)


def open_image(codec, *, graphs):
    image = CudaBackend(WIDE.spec, graphs=graphs, speculates=True)
    image.load(WIDE.packed(), lambda _: None)
    plan = MemoryPlan(
        num_rows=3,
        num_units=40,
        unit_nbytes=page_nbytes(WIDE.spec, codec),
        num_slots=6,
        max_columns=256,
        max_pages_per_row=8,
        max_recorded=48,
        kv=codec,
    )
    image.allocate(plan)
    return image


@pytest.mark.parametrize(
    ("codec", "graphs"), [(KvCodec.BF16, True), (KvCodec.BF16, False), (KvCodec.INT8, True)]
)
def test_columns_and_state_after_every_accepted_length_are_plain_decode(codec, graphs):
    image = open_image(codec, graphs=graphs)
    pages = np.arange(24, dtype=np.int32).reshape(3, 8)[::-1].tolist()
    prompts = [WIDE.prompt(n) for n in (5, 250, 64)]
    v = Verification(WIDE.spec, image, prompts, pages, rounds=17)
    for n in range(16):
        right = [min(n, 7), n % 3, n]
        one = v.verify(WIDTHS, right)
        v.shorten(one, [right[0] // 2, -1, right[2]])
    v.verify((4, 1, 2), (3, 0, 1), fillers=1)
    image.close()
