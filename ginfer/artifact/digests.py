"""The check that reads every byte: payload digests and padding, through one small buffer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ginfer.artifact import findings as f
from ginfer.artifact.findings import Finding, Findings

if TYPE_CHECKING:
    from collections.abc import Callable

    from ginfer.artifact.reader import Package

_CHUNK_NBYTES = 4 << 20


def verify_digests(
    package: Package, progress: Callable[[int, int], None] | None = None
) -> tuple[Finding, ...]:
    """Compare every payload with its digest and every padding byte with zero; return the findings.

    progress receives bytes done and bytes in all.
    """
    report = Findings()
    buffer = memoryview(bytearray(min(_CHUNK_NBYTES, package.nbytes)))
    total = package.nbytes - package.payload_offset
    end = 0
    for record in package.objects:
        padding = record.offset - end
        start = package.payload_offset + end
        if padding and any(buffer[: _fill(package, buffer[:padding], start)]):
            report.add(f.PaddingNotZero, record.name, "bytes before it are not zero")
        digest = hashlib.sha256()
        end = record.offset
        stop = record.offset + record.bytes
        while end < stop:
            piece = buffer[: min(len(buffer), stop - end)]
            n = _fill(package, piece, package.payload_offset + end)
            digest.update(piece[:n])
            end += len(piece)
            if progress is not None:
                progress(end, total)
        if digest.hexdigest() != record.sha256:
            report.add(f.DigestMismatch, record.name, f"SHA-256 {digest.hexdigest()}")
    report.close()
    return tuple(report)


def _fill(package: Package, piece: memoryview, offset: int) -> int:
    """Read as much of piece as the file has; return the number of bytes."""
    done = 0
    while done < len(piece):
        n = package.read_into(piece[done:], offset + done)
        if n == 0:
            break
        done += n
    return done
