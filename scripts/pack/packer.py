"""Pack: check a checkpoint against a contract's recipes, then stream it into a package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ginfer.artifact.records import Identity, Producer
from ginfer.artifact.writer import PackageWriter, PlannedResource, PlannedTensor
from ginfer.formats import TILE_N
from scripts.pack import codecs, qwen, recipe
from scripts.pack.sources import ITEM_NBYTES, Checkpoint, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from ginfer.artifact.writer import PlannedObject
    from ginfer.models.contract import ModelContract, WeightProfile
    from scripts.pack.recipe import Piece, Recipe
    from scripts.pack.sources import Listing

PRODUCER_NAME = "ginfer-pack"
PRODUCER_VERSION = "1"  # of this packer; what decides the bytes is in the recipe's digest


@dataclass(frozen=True)
class Match:
    """What a check found. names: source name to the checkpoint's name. dropped: names left out."""

    names: dict[str, str]
    dropped: tuple[str, ...]
    problems: tuple[str, ...]


def match(recipes: tuple[Recipe, ...], found: Listing) -> Match:
    """Compare the tensors of a checkpoint (name to shape and element type, None when not known)
    with those that the recipes need; every difference is a problem."""
    wanted = recipe.sources(recipes)
    names: dict[str, str] = {}
    dropped, problems = [], []
    for name, (shape, dtype) in found.items():
        source = qwen.canonical_name(name)
        if source is not None and source.startswith(qwen.DROPPED):
            dropped.append(name)
        elif source not in wanted:
            problems.append(f"extra tensor {name} {list(shape)}")
        elif source in names:
            problems.append(f"tensor {name} is the same as {names[source]}")
        else:
            names[source] = name
            problems += _differences(name, (shape, wanted[source].shape), dtype)
    problems += [
        f"missing tensor {qwen.exported_name(source.name)} {list(source.shape)}"
        for source in wanted.values()
        if source.name not in names
    ]
    return Match(names, tuple(dropped), tuple(problems))


def planned_tensors(contract: ModelContract, profile: WeightProfile) -> list[PlannedTensor]:
    """The inventory in physical order, each object in the profile's format."""
    tensors = []
    for target in contract.inventory(drafter=profile.has_drafter):
        fmt, layout = profile.storage(target.role)
        tensors.append(
            PlannedTensor(name=target.name, shape=target.shape, format=fmt, layout=layout)
        )
    return tensors


def pack(
    checkpoint: Checkpoint,
    out: Path,
    contract: ModelContract,
    *,
    profile: WeightProfile,
    progress: Callable[[str, int], None],
) -> None:
    """Write the package. progress: receives ('hash' | 'pack', bytes read or written just now).

    Raises CheckpointError listing every missing, extra or misshapen tensor and missing resource.
    """
    recipes = qwen.recipes(contract, drafter=profile.has_drafter)
    matched = match(recipes, checkpoint.listing())
    files = [checkpoint.folder / name.rpartition("/")[2] for name in contract.resources]
    problems = [*matched.problems, *(f"missing file {p.name}" for p in files if not p.is_file())]
    if problems:
        raise CheckpointError(problems)
    identity = Identity(
        model_id=contract.model_id,
        weights_id=profile.name,
        tp=1,
        drafter_tp=int(profile.has_drafter),
        kv_calibration=None,
        qualified=(),
        producer=Producer(
            name=PRODUCER_NAME,
            version=PRODUCER_VERSION,
            recipe_sha256=recipe.digest(profile, recipes),
            source_sha256=checkpoint.digest(files, lambda n: progress("hash", n)),
        ),
    )
    resources = dict(zip(contract.resources, (path.read_bytes() for path in files)))
    plan: list[PlannedObject] = [
        *(PlannedResource(name=name, nbytes=len(data)) for name, data in resources.items()),
        *planned_tensors(contract, profile),
    ]
    with PackageWriter(out, identity, plan) as writer:
        for name, data in resources.items():
            writer.write(name, data)
        for item in recipes:
            payload = _payload(checkpoint, matched.names, item, profile)
            writer.write(item.target.name, _counted(payload, progress))


def _payload(
    checkpoint: Checkpoint, names: Mapping[str, str], item: Recipe, profile: WeightProfile
) -> Iterator[NDArray[np.uint8]]:
    fmt, layout = profile.storage(item.target.role)
    rows = blocks(checkpoint, names, item.pieces)
    if item.transpose:
        rows = iter([np.ascontiguousarray(np.concatenate(list(rows)).T)])
    try:
        yield from (codecs.encode(fmt, layout, block, fitted=item.fitted) for block in rows)
    except ValueError as error:
        sources = ", ".join(dict.fromkeys(names[p.source.name] for p in item.pieces))
        raise CheckpointError([f"{item.target.name} (from {sources}): {error}"]) from error


def _counted(
    payload: Iterator[NDArray[np.uint8]], progress: Callable[[str, int], None]
) -> Iterator[NDArray[np.uint8]]:
    for chunk in payload:
        yield chunk
        progress("pack", chunk.nbytes)


def blocks(
    checkpoint: Checkpoint, names: Mapping[str, str], pieces: tuple[Piece, ...]
) -> Iterator[NDArray[np.float32]]:
    """The rows of the pieces, one after the other, in blocks of 128 (the last may be shorter)."""
    pending: list[NDArray[np.float32]] = []
    room = TILE_N
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + room)
            pending.append(checkpoint.rows(names[piece.source.name], start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield np.concatenate(pending)
                pending, room = [], TILE_N
    if pending:
        yield np.concatenate(pending)


def _differences(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str | None
) -> Iterator[str]:
    shape, wanted = shapes
    if shape != wanted:
        yield f"tensor {name} has shape {list(shape)}, {list(wanted)} expected"
    if dtype is not None and dtype not in ITEM_NBYTES:
        yield f"tensor {name} is {dtype}; legal: {', '.join(ITEM_NBYTES)}"
