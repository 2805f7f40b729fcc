"""Exception tree of the library: one class per kind of fault, each with a stable wire code.

GInferError
├── ConfigError                   an option or field of our own configuration is wrong
├── ArtifactError                 a package cannot be used; `findings` lists every defect
│   └── artifact.Finding          one defect; a subclass per class of defect
│       ├── file, prefix          NotAFile ShortFile OldVersion BadMagic ReservedBytes
│       │                         EmptyDirectory DirectoryTooLarge DirectoryBeyondFile
│       │                         PayloadOffset PayloadBeyondFile DirectoryDigest
│       ├── JSON                  NotUtf8 NotJson NestedTooDeep NotCanonical DuplicateMember
│       │                         MissingMember ExtraMember WrongType BadString NumberRange
│       │                         NoObjects UnknownKind
│       ├── identity, registry    IllegalDegree IllegalRanks RankWithoutTensors UnknownFormat
│       │                         UnknownLayout UnknownEncoding IllegalLayout IllegalShape
│       │                         IllegalDimension
│       ├── geometry              DuplicateName EmptyObject SizeMismatch SizeOverflow Misaligned
│       │                         Overlap Gap SplitGroup BeyondFile TrailingBytes
│       ├── content               DigestMismatch PaddingNotZero
│       ├── binding               MissingObject UnexpectedObject KindMismatch ShapeMismatch
│       │                         StorageMismatch
│       └── MoreFindings          more defects than are listed
├── RequestError                  the caller's request is wrong (HTTP 400 unless told otherwise)
│   ├── UnsupportedError          a field that we refuse to obey, by name
│   └── ContextLengthError        the prompt does not fit
├── OverloadedError               the queue is full (429)
├── QueueTimeoutError             the request waited longer than the pending timeout (503)
├── UnavailableError              the engine is starting, restarting or gone (503)
├── DeviceError                   a GPU driver call failed; `context_lost`: only a restart helps
└── InternalError                 our own fault (500)

`code` is what a client program branches on; `param` names the offending field, or is None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class GInferError(Exception):
    """Base of every error that this library raises on purpose. The message names the remedy."""

    code = "internal_error"
    status = 500

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(GInferError):
    """A configuration value is wrong; `param` is the option's name."""

    code = "invalid_config"


class ArtifactError(GInferError):
    """A package cannot be used. `findings` holds every defect, in file order; the message names
    the first."""

    code = "invalid_package"

    def __init__(
        self,
        message: str,
        *,
        findings: Sequence[object] = (),
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.findings = tuple(findings)


class RequestError(GInferError):
    """A request field is malformed or contradictory; `param` names it."""

    code = "invalid_value"
    status = 400


class UnsupportedError(RequestError):
    """A request field is well formed but we cannot obey it, so we refuse it."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """The prompt is longer than the context, or needs more K/V than the whole pool has."""

    code = "context_length_exceeded"


class OverloadedError(GInferError):
    """Concurrency and queue are full; try again later."""

    code = "server_overloaded"
    status = 429


class QueueTimeoutError(GInferError):
    """The request waited in the queue longer than the pending timeout."""

    code = "request_queue_timeout"
    status = 503


class UnavailableError(GInferError):
    """The engine cannot serve now; the message says why and what happens next."""

    code = "service_unavailable"
    status = 503


class DeviceError(GInferError):
    """A call of the GPU driver failed. The message names the call, the kernel if there is one, and
    the status; after `context_lost` nothing on that GPU can be used until the engine restarts."""

    code = "device_error"

    def __init__(self, message: str, *, status_name: str = "", context_lost: bool = False) -> None:
        super().__init__(message)
        self.status_name = status_name
        self.context_lost = context_lost


class InternalError(GInferError):
    """A fault of ours that cost this request."""


def error_from_code(kind: str, message: str, code: str, param: str | None) -> GInferError:
    """Rebuild an error that crossed a process border. Unknown kinds become InternalError."""
    classes: dict[str, type[GInferError]] = {
        c.__name__: c
        for c in (
            ConfigError,
            ArtifactError,
            RequestError,
            UnsupportedError,
            ContextLengthError,
            OverloadedError,
            QueueTimeoutError,
            UnavailableError,
            InternalError,
        )
    }
    return classes.get(kind, InternalError)(message, code=code, param=param)
