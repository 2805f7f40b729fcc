"""Selection kernels with emulated threads: the same bits as the CPU image."""

import pytest

from tests.device_cases import check_selection, random_draws
from tests.host.cuda.emulator import Emulator


def check(seed, V, R):
    logits, batch, counts = random_draws(seed, V, R, masked=seed % 2 == 0)
    if seed:
        logits[1, 5] = float("nan")
    check_selection(Emulator(seed % 2), logits, batch, counts, V)


@pytest.mark.parametrize(("seed", "V"), [(0, 37), (1, 130)])
def test_choices_equal_those_of_the_cpu_image(seed, V):
    check(seed, V, 4)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
def test_choices_equal_those_of_the_cpu_image_at_many_seeds(seed):
    check(seed, (64, 129, 300, 1023, 5000, 4111)[seed - 2], 6)
