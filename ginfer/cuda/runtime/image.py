"""A kernel image on a device: the cubins of one capability, loaded into a context.

Loading needs no compiler. It refuses a device of another capability, and kernels whose source has
changed since the image was built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ginfer.cuda.runtime.jit import CAPABILITIES, SealedError, refuse_after_seal
from ginfer.cuda.runtime.launch import Function
from ginfer.cuda.runtime.manifest import cubin_path, image_folder, read_manifest
from ginfer.cuda.runtime.plan import PlanTable
from ginfer.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ginfer.cuda.runtime.jit import Kernel
    from ginfer.cuda.runtime.stream import Stream


@dataclass(kw_only=True)
class Image:
    """The loaded kernels of one device context. Launchers ask it for functions by kernel value."""

    capability: str
    plans: PlanTable
    functions: dict[Kernel, Function] = field(default_factory=dict)
    sealed: bool = False

    @classmethod
    def open(
        cls, capability: str, items: Iterable[Kernel], *, device_capability: tuple[int, int]
    ) -> Self:
        """Load `items` into the current context, that of a device with `device_capability`.

        Raises ConfigError for an image of another capability and for kernels that the image lacks
        or has in an older form, with the command that builds them; DeviceError when the driver
        refuses a cubin.
        """
        if CAPABILITIES[capability][:2] != device_capability:
            raise ConfigError(
                f"the sm_{capability} image does not run on this device; run: ginfer image build "
                f"--sm {native_capability(device_capability)}",
                param="image",
            )
        image = cls(capability=capability, plans=PlanTable.load(capability))
        image.load(items)
        return image

    def load(self, items: Iterable[Kernel]) -> None:
        """Load more kernels. Raises as open() does, and SealedError after seal()."""
        wanted = [item for item in dict.fromkeys(items) if item not in self.functions]
        if not wanted:
            return
        what = f"kernel {wanted[0].name} was to be loaded"
        refuse_after_seal(what)
        if self.sealed:
            raise SealedError(f"{what} after the image had been sealed")
        folder = image_folder(self.capability)
        have = read_manifest(folder)
        missing = [item for item in wanted if item.source(self.capability) not in have]
        if missing:
            raise missing_error(missing, self.capability)
        for item in wanted:
            record = have[item.source(self.capability)]
            self.functions[item] = Function(record, cubin_path(folder, record).read_bytes())

    def seal(self) -> None:
        """Forbid every later loading of kernels into this image."""
        self.sealed = True

    def __getitem__(self, item: Kernel) -> Function:
        try:
            return self.functions[item]
        except KeyError:
            raise InternalError(f"kernel {item.name} is not in the loaded image") from None

    def launch(
        self,
        item: Kernel,
        grid: tuple[int, ...],
        stream: Stream,
        *arguments: int | float,
        **how: Any,
    ) -> None:
        """Put a kernel on a stream; `how` as in Function.launch."""
        self[item].launch(grid, stream, *arguments, **how)

    def close(self) -> None:
        """Unload all kernels."""
        for function in self.functions.values():
            function.close()
        self.functions.clear()


def native_capability(device: tuple[int, int]) -> str:
    """The capability to build for a device. Raises ConfigError for a GPU without kernels."""
    fitting = [name for name, cc in CAPABILITIES.items() if cc[:2] == device]
    if not fitting:
        raise ConfigError(
            f"the GPU is sm_{device[0]}{device[1]}; there are kernels for "
            f"{', '.join(f'sm_{name}' for name in CAPABILITIES)}",
            param="device",
        )
    return fitting[-1]


def missing_error(missing: list[Kernel], capability: str) -> ConfigError:
    """The error of kernels that the image lacks or has only in an older form."""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return ConfigError(
        f"the sm_{capability} image has no current cubin of {missing[0].name}{more}; "
        f"run: ginfer image build --sm {capability}",
        param="image",
    )
