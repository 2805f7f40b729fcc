"""Findings: one error class per defect that a package can have, and the list that collects them.

A finding names the object, what stands there and what is legal. `Package.open` raises one
ArtifactError that carries them all; a finding is an ArtifactError itself and can be raised alone.
"""

from __future__ import annotations

import re
from typing import ClassVar

from ginfer.errors import ArtifactError

MAX_LISTED = 1000  # findings kept; more are only counted, so that a hostile file cannot fill memory
_SHOWN = 80  # characters of a value in a message


def show(value: object) -> str:
    """Return a JSON value for a one-line message: printable, short."""
    match value:
        case str():
            text = ascii(value[:_SHOWN])
            return text if len(value) <= _SHOWN else f"{text}... ({len(value)} characters)"
        case dict():
            return f"an object of {len(value)} members"
        case list() | tuple():
            items = ", ".join(show(v) for v in value[:16])
            return f"[{items}]" if len(value) <= 16 else f"an array of {len(value)}"
        case None:
            return "null"
        case bool():
            return str(value).lower()
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:20]}... ({len(text)} digits)"


class Finding(ArtifactError):
    """One defect. `where`: object or part of the file; `got`: what stands there; `legal`: what
    may."""

    legal: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, where: str, got: str, legal: str = "") -> None:
        legal = legal or self.legal
        super().__init__(f"{where}: {got}" + (f"; {legal}" if legal else ""))
        self.where = where


class Findings(list[Finding]):
    """Every finding of a file in the order of discovery, the first MAX_LISTED in full."""

    num_unlisted = 0

    def add(self, kind: type[Finding], where: str, got: str, legal: str = "") -> None:
        """Record a defect."""
        if len(self) < MAX_LISTED:
            self.append(kind(where, got, legal))
        else:
            self.num_unlisted += 1

    def close(self) -> None:
        """Say at the end of the list how many findings are not in it."""
        if self.num_unlisted:
            self.append(MoreFindings("package", f"{self.num_unlisted} further findings"))

    def raise_if_any(self, what: str) -> None:
        """Raise ArtifactError with all findings; `what` names the file."""
        if not self:
            return
        self.close()
        more = f" (and {len(self) - 1} more findings)" if len(self) > 1 else ""
        raise ArtifactError(f"{what}: {self[0].message}{more}", findings=self)


class MoreFindings(Finding):
    """There are more findings than are listed."""

    legal = f"the first {MAX_LISTED} are listed"


# -- file and prefix


class NotAFile(Finding):
    """The path is absent, unreadable or no regular file."""

    legal = "a package is a readable regular file"


class ShortFile(Finding):
    """The file ends inside the prefix."""

    legal = "a package starts with a prefix of 64 bytes"


class OldVersion(Finding):
    """A package of version 1 or 2."""

    legal = "this program reads version 3; pack the checkpoint again with `python -m scripts.pack`"


class BadMagic(Finding):
    """The file is no package."""

    legal = "a package starts with the bytes GINFER 00 03"


class ReservedBytes(Finding):
    """The last 8 bytes of the prefix are not zero."""

    legal = "bytes 56 to 63 are zero"


class EmptyDirectory(Finding):
    """The directory length is zero."""

    legal = "the directory has at least one byte"


class DirectoryTooLarge(Finding):
    """The directory is longer, or has more parts, than any package needs."""

    legal = "a directory has at most 4 MiB and 8192 objects"


class DirectoryBeyondFile(Finding):
    """The directory ends after the file."""

    legal = "the directory lies inside the file; the file may be truncated"


class PayloadOffset(Finding):
    """The payload does not start where it must."""

    legal = "the payload starts at the first multiple of 4096 after the directory"


class PayloadBeyondFile(Finding):
    """The payload starts after the end of the file."""

    legal = "the payload lies inside the file; the file may be truncated"


class DirectoryDigest(Finding):
    """The directory is not the one that was written."""

    legal = "the prefix holds the SHA-256 of the directory"


# -- JSON


class NotUtf8(Finding):
    """The directory is not UTF-8."""

    legal = "the directory is UTF-8 text"


class NotJson(Finding):
    """The directory is not JSON."""

    legal = "the directory is one JSON object"


class NestedTooDeep(Finding):
    """The directory is nested deeper than its schema."""

    legal = "the directory has at most 4 levels"


class NotCanonical(Finding):
    """The directory is JSON, but not in its one encoding."""

    legal = (
        "members are sorted, without white space, escapes or leading zeros, and strings are ASCII"
    )


class DuplicateMember(Finding):
    """A JSON object has a member twice."""

    legal = "members are unique"


class MissingMember(Finding):
    """A member of the schema is absent."""


class ExtraMember(Finding):
    """A member that the schema does not have."""


class WrongType(Finding):
    """A value of another JSON type."""


class BadString(Finding):
    """An empty, too long or ill-formed string."""


class NumberRange(Finding):
    """An integer outside 0 to 2^63 - 1."""

    legal = "integers lie between 0 and 2^63 - 1"


class NoObjects(Finding):
    """The list of objects is empty."""

    legal = "a package has at least one object"


class UnknownKind(Finding):
    """An object that is neither tensor nor resource."""

    legal = "kind is tensor or resource"


# -- identity and registry


class IllegalDegree(Finding):
    """A tensor-parallel degree that does not exist."""


class IllegalRanks(Finding):
    """A ranks list that is empty, unsorted, repeated or outside the degree."""

    legal = "ranks is a rising list of ranks below tp"


class RankWithoutTensors(Finding):
    """A rank that no object names."""

    legal = "each rank below tp has tensors"


class UnknownFormat(Finding):
    """A storage format that is not registered."""


class UnknownLayout(Finding):
    """A layout that is not registered."""


class UnknownEncoding(Finding):
    """A resource encoding that is not registered."""


class IllegalLayout(Finding):
    """A layout that the format does not have."""


class IllegalShape(Finding):
    """A rank or an extent that the layout does not take."""


class IllegalDimension(Finding):
    """A dimension of zero."""

    legal = "dimensions are positive"


# -- geometry


class DuplicateName(Finding):
    """Two objects of one rank share a name."""

    legal = "names are unique within a rank"


class EmptyObject(Finding):
    """An object without bytes."""

    legal = "objects have at least one byte"


class SizeMismatch(Finding):
    """The stored size is not the one of shape, format and layout."""


class SizeOverflow(Finding):
    """A size or an end that 64 bits do not hold."""

    legal = "sizes and ends stay below 2^63"


class Misaligned(Finding):
    """An offset that breaks the alignment of its object."""


class Overlap(Finding):
    """An object that starts before the one before it ends."""

    legal = "objects lie in physical order without overlap"


class Gap(Finding):
    """Unused bytes before an object."""

    legal = "an object starts at the first legal offset after the one before it"


class SplitGroup(Finding):
    """Tensors of one ranks list that do not lie together."""

    legal = "tensors with the same ranks form one contiguous group"


class BeyondFile(Finding):
    """An object that ends after the file."""

    legal = "objects lie inside the file; the file may be truncated"


class TrailingBytes(Finding):
    """Bytes after the last object."""

    legal = "the file ends with its last object"


# -- content


class DigestMismatch(Finding):
    """The payload of an object is not the one that was written."""

    legal = "the payload matches its SHA-256 in the directory; fetch the package again"


class PaddingNotZero(Finding):
    """Padding that holds something."""

    legal = "padding is zero"


# -- binding to a model


class MissingObject(Finding):
    """The model needs an object that the package lacks."""


class UnexpectedObject(Finding):
    """An object that the model does not consume."""

    legal = "the model does not know this object"


class KindMismatch(Finding):
    """A tensor where a resource is expected, or the reverse."""


class ShapeMismatch(Finding):
    """A tensor of another shape."""


class StorageMismatch(Finding):
    """A tensor of another format or layout."""
