"""`ginfer image`: build, list and prune the kernel images of this machine; needs no GPU."""

from __future__ import annotations

import time
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ginfer.errors import ConfigError
from ginfer.sizes import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXTRA = ("numba_cuda", "cuda.core", "cuda.bindings")


def _require_extra() -> None:
    """Raise ConfigError when the cuda extra is not installed."""
    missing = [name for name in EXTRA if not _installed(name)]
    if missing:
        raise ConfigError(
            f"kernels need the cuda extra, {missing[0]} is missing; run: pip install 'ginfer[cuda]'"
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@click.group("image", no_args_is_help=True)
def command() -> None:
    """Build, list and prune kernel images: the compiled kernels of one GPU generation each."""
    _require_extra()


@command.command("build")
@click.option(
    "--sm",
    multiple=True,
    metavar="CAPABILITY",
    help="Compute capability, such as 90a; may be repeated.  [default: that of the GPU here]",
)
@click.option("--all", "all_", is_flag=True, help="Every capability that has kernels.")
@click.option("--jobs", type=click.IntRange(1), help="Compiler processes.  [default: one per core]")
def build(sm: tuple[str, ...], all_: bool, jobs: int | None) -> None:
    """Compile what the images lack. Kernels that are up to date are kept."""
    if sm and all_:
        raise click.UsageError("--all excludes --sm")
    from ginfer.cuda.runtime import build as builder
    from ginfer.cuda.runtime import catalog

    for capability in catalog.built_capabilities() if all_ else _capabilities(sm):
        items = catalog.kernels_of(capability)
        if not items:
            raise ConfigError(f"there are no kernels for sm_{capability} yet", param="sm")
        start, compiled = time.monotonic(), 0
        with _bar(f"sm_{capability}") as draw:

            def progress(done: int, total: int, name: str) -> None:
                nonlocal compiled
                compiled = done
                draw(done, total, name)

            builder.build_image(items, capability, processes=jobs, progress=progress)
        seconds = time.monotonic() - start
        click.echo(f"sm_{capability}: {len(items)} kernels, {compiled} compiled in {seconds:.0f} s")


@command.command("list")
def list_images() -> None:
    """Show the images of this machine and whether they are up to date."""
    from ginfer.cuda.runtime import catalog, manifest
    from ginfer.cuda.runtime.jit import CAPABILITIES

    found = False
    for capability in CAPABILITIES:
        state = manifest.image_state(catalog.kernels_of(capability), capability)
        if not state.folder.exists():
            continue
        found = True
        stale = f", {state.stale} stale" if state.stale else ""
        size = human_bytes(state.nbytes)
        click.echo(f"sm_{capability}: {state.current} of {state.wanted} kernels{stale}, {size}")
        click.echo(f"  {state.folder}")
        for compilers in state.compilers:
            click.echo(f"  {compilers}")
    if not found:
        click.echo("no images; run: ginfer image build")


@command.command("prune")
def prune() -> None:
    """Remove compiled kernels that are out of date."""
    from ginfer.cuda.runtime import build as builder
    from ginfer.cuda.runtime import catalog
    from ginfer.cuda.runtime.jit import CAPABILITIES

    removed = builder.prune_ptx()
    for capability in CAPABILITIES:
        removed += builder.prune_image(catalog.kernels_of(capability, every=True), capability)
    click.echo(f"{removed} files removed")


def _capabilities(sm: tuple[str, ...]) -> list[str]:
    """The capabilities that the user named, else that of the GPU."""
    from ginfer.cuda.runtime import device, image
    from ginfer.cuda.runtime.jit import CAPABILITIES

    names = [name.removeprefix("sm_") for name in sm]
    for name in names:
        if name not in CAPABILITIES:
            raise ConfigError(f"sm is {name!r}; one of {', '.join(CAPABILITIES)}", param="sm")
    if names:
        return list(dict.fromkeys(names))
    if device.device_count() == 0:
        raise ConfigError("there is no NVIDIA GPU here; name a capability: --sm 90a", param="sm")
    return [image.native_capability(device.Device().info.capability)]


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a progress callback that draws on a terminal and is silent elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, name: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[kernel]}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, kernel="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, kernel=name)
