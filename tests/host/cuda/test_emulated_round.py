"""GDN of a decode round with emulated threads: the bits of convolution and step."""

import pytest

from ginfer.cuda.gdn.round import gdn_round_kernel
from tests.device_cases import check_gdn_round
from tests.host.cuda.emulator import Emulator


@pytest.mark.parametrize(
    ("heads", "slots"), [((1, 2), [(1, 0), (2, 3)]), ((1, 1), [(0, 0)])], ids=str
)
def test_a_round_is_convolution_and_step(heads, slots):
    check_gdn_round(Emulator(1), gdn_round_kernel(0), heads, slots)
