"""Acceptance of the demo drafter on the golden prompts, against what its checkpoint reports.

The packages are made here when GINFER_DEMO_CHECKPOINT names the model's folder; the drafter's lies
beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numba import get_num_threads

from ginfer.artifact.reader import Package
from ginfer.batch import Phase
from ginfer.cpu.drafter import CpuDrafter
from ginfer.cpu.selector import Anchors
from ginfer.env import DEMO_CHECKPOINT
from ginfer.models.contract import PROFILES
from ginfer.models.qwen import QWEN_DEMO
from ginfer.spec import LayerKind
from scripts.pack import packer
from scripts.pack.sources import Checkpoint
from tests.drafted import DRAFTER
from tests.models.program import Program

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not DEMO_CHECKPOINT.read(), reason=f"{DEMO_CHECKPOINT.name} is not set"),
]
ROOT = Path(__file__).resolve().parents[2]
REPORTED_ROUNDS = 301  # of the BF16 drafter and model, seven drafts each, on these prompts
CHUNK = 1152


class Drafted:
    """A package with a drafter; sequences are known, so every round is checked against them."""

    def __init__(self, package: Package) -> None:
        tensors = [package.tensor(name) for name in package.rank_tensors()]
        text = [t for t in tensors if t.name.startswith("text/")]
        spec, drafter = QWEN_DEMO.spec, QWEN_DEMO.drafter
        assert drafter is not None
        self.program = Program(spec, text, max_tokens=2432, chunk=CHUNK)
        model = self.program.backend._model
        assert model is not None
        self.drafter = CpuDrafter(drafter, model, spec.num_token_ids)
        self.drafter.load(t for t in tensors if t.name.startswith("dflash2/"))
        self.drafter.allocate(num_lanes=1, max_columns=CHUNK, threads=get_num_threads())
        self.width = drafter.max_drafts

    def rounds(self, prompt: list[int], greedy: list[int]) -> int:
        """Rounds that the greedy continuation takes, each with all drafts."""
        self.program.reset()
        self._feed(prompt)
        at = rounds = 0
        while at < len(greedy) - 1:
            drafts = self._propose(greedy[at], len(prompt) + at)
            wanted = greedy[at + 1 : at + 1 + self.width]
            accepted = 0
            while accepted < len(wanted) and drafts[accepted] == wanted[accepted]:
                accepted += 1
            self._feed(greedy[at : at + accepted + 1])
            at += accepted + 1
            rounds += 1
        return rounds

    def _feed(self, ids: list[int]) -> None:
        backend = self.program.backend
        for start in range(0, len(ids), CHUNK):
            first = self.program.length
            batch = self.program.batch(Phase.PREFILL, ids[start : start + CHUNK])
            hidden = backend.embed(batch)
            for i, kind in enumerate(self.program.spec.layers):
                gated = kind is LayerKind.GATED_DELTANET
                (backend.gdn_block if gated else backend.attention_block)(hidden, i, batch)
                backend.mlp_block(hidden, i, batch)
                self.drafter.tap(hidden, i)
            columns = np.arange(batch.num_columns, dtype=np.int32)
            self.drafter.extend(columns, np.zeros_like(columns), columns + first)

    def _propose(self, anchor: int, position: int) -> list[int]:
        one = (
            np.array([v], t) for v, t in ((anchor, "i4"), (position, "i4"), (0, "f4"), (0, "u8"))
        )
        ids: list[int] = (
            self.drafter.propose(Anchors(*one), np.zeros(1, np.int32), self.width)
            .token_ids[0]
            .tolist()
        )
        return ids


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Package]:
    """What the packer makes of both checkpoints."""
    folder, path = Path(DEMO_CHECKPOINT.read()), tmp_path_factory.mktemp("drafted") / "p.ginfer"
    with Checkpoint(folder, folder.with_name(f"{folder.name}-dflash2")) as checkpoint:
        profile = PROFILES["groupwise-int-dflash2-q4"]
        packer.pack(checkpoint, path, QWEN_DEMO, profile=profile, progress=lambda *_: None)
    with Package.open(path) as opened:
        yield opened


def test_the_drafter_of_the_tests_is_what_the_packer_makes(package: Package) -> None:
    with Package.open(DRAFTER) as kept:
        assert kept.identity == package.identity
        names = [t.name for t in package.tensors if t.name.startswith("dflash2/")]
        assert [t.name for t in kept.tensors] == names
        for name in names:
            assert np.array_equal(kept.tensor(name).data, package.tensor(name).data), name


def test_q4_drafter_takes_few_more_rounds_than_the_bf16_one(package: Package) -> None:
    golden = json.loads((ROOT / "tests" / "golden" / "chat_groupwise_int.json").read_text())
    drafted = Drafted(package)
    taken = sum(drafted.rounds(c["prompt_ids"], c["greedy_ids"]) for c in golden["cases"])
    assert 0.95 * taken <= REPORTED_ROUNDS
