"""Verification with emulated threads: columns, and the state that it leaves, are plain decode."""

from dataclasses import asdict

import pytest

from ginfer.backend import MemoryPlan
from ginfer.cuda.backend import CudaBackend
from ginfer.engine.memory import page_nbytes
from scripts.random_models import MODELS
from tests.host.cuda.emulated_device import install
from tests.host.cuda.test_emulated_backend import TwoLayers
from tests.verification_cases import Verification


@pytest.mark.long
def test_verified_columns_and_folds_are_plain_decode(monkeypatch):
    install(monkeypatch)
    model = TwoLayers(**asdict(MODELS[0]))
    image = CudaBackend(model.spec, graphs=False, speculates=True)
    image.load(model.packed(), lambda _: None)
    plan = MemoryPlan(
        num_rows=2,
        num_units=4,
        unit_nbytes=page_nbytes(model.spec),
        num_slots=4,
        max_columns=8,
        max_pages_per_row=2,
        max_recorded=8,
    )
    image.allocate(plan)
    v = Verification(model.spec, image, [[5], [31]], [[2, 1], [0, 3]], rounds=2)
    one = v.verify([2, 1], [1, 0], fillers=1)
    v.shorten(one, [1, -1])
    image.close()
