"""Every check of a package: prefix, directory schema, registry, geometry, digests, model binding.

All checks add findings and go on; a check that needs a value which another finding denies is left
out. `parse` is a pure function of the bytes of a file and looks at no payload.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.artifact import findings as f
from ginfer.artifact.directory import decode
from ginfer.artifact.findings import Findings
from ginfer.artifact.records import (
    MAGIC,
    MAX_DIRECTORY_NBYTES,
    MAX_INTEGER,
    MAX_RANK,
    PAYLOAD_ALIGNMENT,
    PREFIX_NBYTES,
    RESOURCE_ENCODING,
    TENSOR_ALIGNMENT,
    Identity,
    ObjectRecord,
    ResourceRecord,
    TensorRecord,
)
from ginfer.artifact.schema import read_directory
from ginfer.formats import FORMATS, Layout, payload_nbytes
from ginfer.sizes import align_up

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX = struct.Struct("<8sQQ32s8s")
_OLD = {b"NINFER\0\1": "version 1", b"NINFER\0\2": "version 2"}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a valid file says: identity, objects in physical order, where the payload starts."""

    identity: Identity
    objects: tuple[ObjectRecord, ...]
    payload_offset: int
    digest: str


def payload_start(directory_nbytes: int) -> int:
    """Return the payload offset of a file with such a directory."""
    return align_up(PREFIX_NBYTES + directory_nbytes, PAYLOAD_ALIGNMENT)


def parse(data: memoryview, report: Findings) -> Contents | None:
    """Check everything but payloads. data: the whole file. None when findings were added."""
    directory = _framing(data, report)
    if directory is None:
        return None
    digest = hashlib.sha256(directory).digest()
    if digest != bytes(data[24:56]):
        report.add(f.DirectoryDigest, "directory", f"SHA-256 {digest.hex()}")
    payload_offset = payload_start(len(directory))
    if payload_offset > len(data):
        report.add(f.PayloadBeyondFile, "prefix", f"payload at {payload_offset} of {len(data)}")
    elif any(data[PREFIX_NBYTES + len(directory) : payload_offset]):
        report.add(f.PaddingNotZero, "directory", "bytes after it are not zero")
    identity, objects = _check_directory(directory, len(data) - payload_offset, report)
    if report or identity is None:
        return None
    return Contents(
        identity=identity, objects=objects, payload_offset=payload_offset, digest=digest.hex()
    )


def check_objects(directory: bytes, payload_nbytes: int, what: str) -> None:
    """Raise ArtifactError with every finding of a directory that is about to be written."""
    report = Findings()
    if len(directory) > MAX_DIRECTORY_NBYTES:
        report.add(f.DirectoryTooLarge, "directory", f"{len(directory)} bytes")
    _check_directory(directory, payload_nbytes, report)
    report.raise_if_any(what)


def _check_directory(
    directory: bytes, payload_nbytes: int, report: Findings
) -> tuple[Identity | None, tuple[ObjectRecord, ...]]:
    identity, objects, complete = read_directory(decode(directory, report), report)
    for record in objects:
        _check_registry(record, report)
    _check_ranks(identity, objects, report, complete=complete)
    _check_names(objects, report)
    _check_geometry(objects, payload_nbytes, report, complete=complete)
    return identity, objects


def _framing(data: memoryview, report: Findings) -> bytes | None:
    """Check the prefix; return the directory's bytes, or None when they cannot be told."""
    magic = bytes(data[:8])
    if magic in _OLD:
        report.add(f.OldVersion, "prefix", f"a package of {_OLD[magic]}")
        return None
    if len(data) < PREFIX_NBYTES:
        report.add(f.ShortFile, "prefix", f"the file has {len(data)} bytes")
    if magic != MAGIC:
        report.add(f.BadMagic, "prefix", f"the file starts with {magic.hex(' ') or 'nothing'}")
    if report:
        return None
    _, nbytes, payload_offset, _, reserved = PREFIX.unpack(data[:PREFIX_NBYTES])
    if any(reserved):
        report.add(f.ReservedBytes, "prefix", f"bytes 56 to 63 are {reserved.hex(' ')}")
    if nbytes == 0:
        report.add(f.EmptyDirectory, "prefix", "directory length 0")
    elif nbytes > MAX_DIRECTORY_NBYTES:
        report.add(f.DirectoryTooLarge, "prefix", f"directory length {nbytes}")
    elif payload_offset != payload_start(nbytes):
        legal = f"here the payload starts at {payload_start(nbytes)}"
        report.add(f.PayloadOffset, "prefix", f"payload offset {payload_offset}", legal)
    end = PREFIX_NBYTES + nbytes
    if end > len(data):
        report.add(f.DirectoryBeyondFile, "prefix", f"directory ends at {end} of {len(data)}")
    if nbytes == 0 or nbytes > MAX_DIRECTORY_NBYTES or end > len(data):
        return None
    return bytes(data[PREFIX_NBYTES:end])


def _check_registry(record: ObjectRecord, report: Findings) -> None:
    """Format, layout and encoding are registered, and shape and size follow from them."""
    name = record.name
    if record.bytes == 0:
        report.add(f.EmptyObject, name, "bytes 0")
    if isinstance(record, ResourceRecord):
        if record.encoding != RESOURCE_ENCODING:
            legal = f"encoding is {RESOURCE_ENCODING}"
            report.add(f.UnknownEncoding, name, f"encoding {f.show(record.encoding)}", legal)
        return
    known = True
    if record.format not in FORMATS:
        known = False
        legal = f"formats are {', '.join(FORMATS)}"
        report.add(f.UnknownFormat, name, f"format {f.show(record.format)}", legal)
    if record.layout not in set(Layout):
        known = False
        report.add(
            f.UnknownLayout,
            name,
            f"layout {f.show(record.layout)}",
            f"layouts are {', '.join(Layout)}",
        )
    if 0 in record.shape:
        known = False
        report.add(f.IllegalDimension, name, f"shape {f.show(record.shape)}")
    if len(record.shape) > MAX_RANK:
        known = False
        legal = f"tensors have at most {MAX_RANK} dimensions"
        report.add(f.IllegalShape, name, f"{len(record.shape)} dimensions", legal)
    if known:
        _check_size(record, report)


def _check_size(record: TensorRecord, report: Findings) -> None:
    fmt, layout = FORMATS[record.format], Layout(record.layout)
    if layout not in fmt.layouts:
        legal = f"layouts of {fmt.name}: {', '.join(fmt.layouts) or 'none yet'}"
        report.add(f.IllegalLayout, record.name, f"layout {layout}", legal)
        return
    try:
        nbytes = payload_nbytes(fmt, layout, record.shape)
    except ValueError as e:
        report.add(f.IllegalShape, record.name, f"shape {f.show(record.shape)}", str(e))
        return
    if nbytes > MAX_INTEGER:
        report.add(f.SizeOverflow, record.name, f"shape {f.show(record.shape)}")
    elif nbytes != record.bytes:
        legal = f"{fmt.name} {layout} {f.show(record.shape)} takes {nbytes}"
        report.add(f.SizeMismatch, record.name, f"bytes {record.bytes}", legal)


def _check_ranks(
    identity: Identity | None, objects: Sequence[ObjectRecord], report: Findings, *, complete: bool
) -> None:
    """Ranks lists are rising, below tp, and leave out no rank."""
    tp = identity.tp if identity else None
    named: set[int] = set()
    for record in objects:
        if isinstance(record, TensorRecord):
            ranks = record.ranks
            rising = ranks == tuple(sorted(set(ranks)))
            if not ranks or not rising or (tp is not None and ranks[-1] >= tp):
                report.add(f.IllegalRanks, record.name, f"ranks {f.show(ranks)}")
            named.update(ranks)
    if complete and tp is not None:
        for rank in sorted(set(range(tp)) - named):
            report.add(f.RankWithoutTensors, f"rank {rank}", "no object")


def _check_names(objects: Sequence[ObjectRecord], report: Findings) -> None:
    """Two tensors may share a name on different ranks only."""
    owners: dict[str, set[int]] = {}
    for record in objects:
        ranks = set(record.ranks) if isinstance(record, TensorRecord) else set()
        seen = owners.get(record.name)
        if seen is None:
            owners[record.name] = ranks
            continue
        if not seen or not ranks or seen & ranks:
            report.add(f.DuplicateName, record.name, "the name occurs twice")
        seen |= ranks


def _check_geometry(
    objects: Sequence[ObjectRecord], payload_nbytes: int, report: Findings, *, complete: bool
) -> None:
    """Objects fill the payload in order, aligned and grouped. complete: no object was left out by
    an earlier finding, so gaps and the end of the file can be judged."""
    end = 0
    group: tuple[int, ...] | None = None
    groups: set[tuple[int, ...]] = set()
    for record in objects:
        ranks = record.ranks if isinstance(record, TensorRecord) else None
        alignment = object_alignment(ranks, group)
        if ranks is not None and ranks != group and ranks in groups:
            report.add(f.SplitGroup, record.name, f"ranks {f.show(ranks)} occur in two places")
        group = ranks
        groups |= {ranks} if ranks is not None else set()
        where = f"offset {record.offset}"
        if record.offset % alignment:
            legal = f"here offsets are multiples of {alignment}"
            report.add(f.Misaligned, record.name, where, legal)
        if record.offset < end:
            report.add(f.Overlap, record.name, f"{where}, the object before it ends at {end}")
        elif complete and record.offset - align_up(end, alignment) > 0:
            report.add(f.Gap, record.name, f"{where}, the object before it ends at {end}")
        stop = record.offset + record.bytes
        if stop > MAX_INTEGER:
            report.add(f.SizeOverflow, record.name, f"{where}, bytes {record.bytes}")
        elif stop > payload_nbytes:
            got = f"ends at {stop} of a payload of {max(payload_nbytes, 0)} bytes"
            report.add(f.BeyondFile, record.name, got)
        else:
            end = max(end, stop)
            continue
        complete = False  # its end is no mark for what follows
    if complete and end < payload_nbytes:
        report.add(f.TrailingBytes, "file", f"{payload_nbytes - end} bytes after the last object")


def object_alignment(ranks: tuple[int, ...] | None, before: tuple[int, ...] | None) -> int:
    """Return the alignment of an object. ranks, before: of it and of the object before it, None
    for resources."""
    if ranks is None:
        return 1
    return TENSOR_ALIGNMENT if ranks == before else PAYLOAD_ALIGNMENT
