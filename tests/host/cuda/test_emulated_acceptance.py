"""Acceptance kernels with emulated threads: the same bits as the CPU image."""

import pytest

from tests.acceptance_cases import check_acceptance, random_verification
from tests.host.cuda.emulator import Emulator


def test_rows_of_every_kind_go_as_far_as_on_the_cpu_image():
    v = random_verification(1, 37, [4, 1, 3])
    check_acceptance(Emulator(1), v, 37)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_rows_of_every_kind_go_as_far_as_on_the_cpu_image_at_many_seeds(seed):
    V = (64, 129, 300, 1023, 5000)[seed % 5]
    v = random_verification(seed, V, [5, 3, 2, 8, 1], masked=seed % 4 == 3)
    if seed == 2:
        v.logits[6, 5] = float("nan")
    check_acceptance(Emulator(seed % 2), v, V, blocks=1 + seed % 2)
