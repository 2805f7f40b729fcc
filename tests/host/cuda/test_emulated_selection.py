"""Selection kernels with emulated threads: the same bits as the CPU image."""

import pytest

from tests.device_cases import check_selection, random_draws
from tests.host.cuda.emulator import Emulator


@pytest.mark.parametrize("seed", range(4))
def test_choices_equal_those_of_the_cpu_image(seed):
    V = (37, 300, 129, 64)[seed]
    logits, batch, counts = random_draws(seed, V, 6, masked=seed % 2 == 0)
    if seed:
        logits[1, 5] = float("nan")
    check_selection(Emulator(seed % 2), logits, batch, counts, V)
