"""Several GPUs of one host: peer access, and buffers that every rank can address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuda.bindings import driver

from ginfer.cuda.runtime.driver import call
from ginfer.cuda.runtime.memory import Arena
from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ginfer.cuda.runtime.device import Device


def enable_peer_access(devices: Sequence[Device]) -> None:
    """Let every device read and write the memory of every other; again is harmless. Raises
    ConfigError for two that cannot. The calling thread is left in the context of the last."""
    for device in devices:
        device.use()
        for peer in devices:
            if peer.ordinal != device.ordinal:
                _enable(device, peer)


def _enable(device: Device, peer: Device) -> None:
    asked = driver.cuDeviceCanAccessPeer(device.handle, peer.handle)
    if not call("cuDeviceCanAccessPeer", asked):
        raise ConfigError(
            f"GPU {device.ordinal} cannot reach the memory of GPU {peer.ordinal}; "
            "use GPUs that are linked, or --tp 1",
            param="tp",
        )
    result = driver.cuCtxEnablePeerAccess(peer.context, 0)
    if result[0] != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        call(f"cuCtxEnablePeerAccess of GPU {device.ordinal} to {peer.ordinal}", result)


@dataclass(frozen=True)
class PeerBuffers:
    """One zeroed buffer of equal size per rank; `addresses[rank]` is valid on every device."""

    arenas: tuple[Arena, ...]

    @classmethod
    def allocate(cls, devices: Sequence[Device], nbytes: int, name: str) -> PeerBuffers:
        """Take the buffers and enable peer access. Raises ConfigError as Arena and
        enable_peer_access do."""
        enable_peer_access(devices)
        arenas = []
        for device in devices:
            device.use()
            arena = Arena(nbytes, f"{name} of GPU {device.ordinal}")
            call("cuMemsetD8", driver.cuMemsetD8(arena.address, 0, arena.nbytes))
            device.synchronize()
            arenas.append(arena)
        return cls(tuple(arenas))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address of each rank's buffer."""
        return tuple(a.address for a in self.arenas)

    def close(self) -> None:
        """Give the memory back."""
        for arena in self.arenas:
            arena.close()
