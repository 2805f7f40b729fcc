"""Loader: opens a package, binds it to its contract, and hands the payloads to a backend as they
are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.artifact import ExpectedTensor, Package, diff_inventory, verify_digests
from ginfer.errors import ArtifactError
from ginfer.models.contract import PROFILES
from ginfer.models.registry import contract_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ginfer.artifact import Finding
    from ginfer.artifact.records import TensorRecord
    from ginfer.backend import Backend, PackedTensor
    from ginfer.models.contract import ModelContract
    from ginfer.spec import DrafterSpec

TEXT = "text/"  # tensors of the language model
DRAFTER = "dflash2/"  # tensors of its drafter; the rest belongs to media


@dataclass(frozen=True, kw_only=True)
class BoundPackage:
    """An open package that has exactly what its contract wants. drafts: its drafter is loaded
    too."""

    package: Package
    contract: ModelContract
    drafts: bool = False

    @property
    def drafter(self) -> DrafterSpec | None:
        """The drafter that the package has."""
        has_drafter = PROFILES[self.package.identity.weights_id].has_drafter
        return self.contract.drafter if has_drafter else None

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the tensors that `load_weights` gives to a backend."""
        return sum(r.bytes for r in self._weights)

    @property
    def _weights(self) -> list[TensorRecord]:
        wanted = (TEXT, DRAFTER) if self.drafts else (TEXT,)
        return [r for r in self.package.tensors if r.name.startswith(wanted)]

    def weights(self) -> Iterator[PackedTensor]:
        """The tensors that are loaded, in file order."""
        return (self.package.tensor(r.name) for r in self._weights)

    def resources(self) -> dict[str, bytes]:
        """Every frontend file, by name."""
        return {name: self.package.resource(name) for name in self.package.resources}


def open_package(
    path: Path, *, verify: bool, progress: Callable[[str, int, int], None]
) -> BoundPackage:
    """Open and check a package. Raises ArtifactError with every difference at once, ConfigError
    for a model that is not registered."""
    package = Package.open(path)
    try:
        contract = contract_for(package.identity.model_id, package.identity.weights_id)
        _raise_if_any(path, inventory_findings(package))
        if verify:
            found = verify_digests(package, lambda done, total: progress("verify", done, total))
            _raise_if_any(path, found)
    except BaseException:
        package.close()
        raise
    return BoundPackage(package=package, contract=contract)


def inventory_findings(package: Package) -> tuple[Finding, ...]:
    """Every difference between a package and the model that it names. Raises ConfigError for a
    model that is not registered."""
    contract = contract_for(package.identity.model_id, package.identity.weights_id)
    return diff_inventory(package, _expected(package, contract), contract.resources)


def load_weights(
    bound: BoundPackage, backend: Backend, progress: Callable[[str, int, int], None]
) -> None:
    """Give the backend its weights."""
    total = bound.weights_nbytes
    backend.load(bound.weights(), lambda done: progress("load", done, total))


def _expected(package: Package, contract: ModelContract) -> dict[str, ExpectedTensor]:
    profile = PROFILES[package.identity.weights_id]
    expected = {}
    for t in contract.inventory(drafter=profile.has_drafter):
        fmt, layout = profile.storage(t.role)
        expected[t.name] = ExpectedTensor(shape=t.shape, format=fmt, layout=layout)
    return expected


def _raise_if_any(path: Path, findings: Sequence[object]) -> None:
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise ArtifactError(f"{path}: {findings[0]}{more}", findings=findings)
