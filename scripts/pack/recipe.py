"""Recipe: which rows of which source tensors make one object of a package."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.models.contract import Role
from scripts.pack.codecs import CODECS_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ginfer.models.contract import TensorSpec, WeightProfile


@dataclass(frozen=True)
class Source:
    """A tensor that the checkpoint must have. name: without the prefix variants of exports."""

    name: str
    shape: tuple[int, ...]

    def rows(self, start: int = 0, stop: int | None = None) -> Piece:
        """Rows start .. stop of axis 0; the other axes are flattened to columns."""
        return Piece(self, start, self.shape[0] if stop is None else stop)


@dataclass(frozen=True)
class Piece:
    """Rows start .. stop of one source."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True)
class Recipe:
    """The pieces that follow one another as the rows of `target`; transposed at the end if so."""

    target: TensorSpec
    pieces: tuple[Piece, ...]
    transpose: bool = False

    @property
    def fitted(self) -> bool:
        """Whether its 4-bit codes have fitted scales: a drafter proposes more that is accepted."""
        return self.target.role in (Role.DRAFT_MATRIX, Role.DRAFT_MLP)


def interleave(parts: Sequence[Source], step: int) -> tuple[Piece, ...]:
    """Rows of sources of equal length, `step` rows of each in turn."""
    rows = parts[0].shape[0]
    return tuple(part.rows(start, start + step) for start in range(0, rows, step) for part in parts)


def sources(recipes: Iterable[Recipe]) -> dict[str, Source]:
    """Every source by name. Our own maps use each row exactly once, which is checked here."""
    spans: defaultdict[Source, list[tuple[int, int]]] = defaultdict(list)
    for recipe in recipes:
        for piece in recipe.pieces:
            spans[piece.source].append((piece.start, piece.stop))
    for source, used in spans.items():
        starts, stops = zip(*sorted(used))
        assert (*starts, source.shape[0]) == (0, *stops), source
    return {source.name: source for source in spans}


def digest(profile: WeightProfile, recipes: Sequence[Recipe]) -> str:
    """SHA-256 of what decides a package's bytes besides the checkpoint: codecs, formats, map."""
    storage = {role: profile.storage(role) for role in Role}
    description = {
        "codecs": CODECS_VERSION,
        "profile": profile.name,
        "objects": [
            {
                "name": r.target.name,
                "shape": r.target.shape,
                "storage": [storage[r.target.role][0].name, storage[r.target.role][1]],
                "rows": [[p.source.name, p.start, p.stop] for p in r.pieces],
                "transpose": r.transpose,
                **({"scales": "fitted"} if r.fitted else {}),
            }
            for r in recipes
        ],
    }
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
