"""Queue: a kernel image and a stream, where launchers put their kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ginfer.cuda.runtime.image import Image
    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.stream import Stream


@dataclass(frozen=True)
class Queue:
    """early: kernels of this capability start before the one in front of them has ended, and wait
    inside; its decode linear kernels read tokens in fragment order."""

    image: Image
    stream: Stream

    @property
    def early(self) -> bool:
        """Whether kernels are built for dependent launch."""
        return starts_early(self.image.capability)

    def launch(self, item: Kernel, grid: tuple[int, ...], *arguments: int | float) -> None:
        """Put a kernel on the stream."""
        self.image.launch(item, grid, self.stream, *arguments, dependent=self.early)


def starts_early(capability: str) -> bool:
    """Whether the kernels of a capability are built for dependent launch."""
    return capability == "90a"
