"""`ginfer verify PACKAGE`: every check and every digest; one line per finding."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ginfer.artifact import Package, verify_digests
from ginfer.errors import ArtifactError
from ginfer.sizes import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@click.command("verify")
@click.argument("package", type=click.Path(path_type=Path))
@click.pass_context
def command(context: click.Context, package: Path) -> None:
    """Check all of PACKAGE: structure, then the SHA-256 of every payload.

    Exit code 1 and one line per finding when anything is wrong.
    """
    try:
        with Package.open(package) as opened, _bar(package.name) as progress:
            findings: Sequence[object] = verify_digests(opened, progress)
            summary = f"{len(opened.objects)} objects, {human_bytes(opened.nbytes)}"
    except ArtifactError as error:
        findings = error.findings or (error,)
    name = click.format_filename(package)
    for finding in findings:
        click.echo(f"{name}: {finding}")
    if findings:
        context.exit(1)
    click.echo(f"{name}: valid, {summary}")


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a progress callback that draws on a terminal, or None elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"verify {name}")
        yield lambda done, total: progress.update(task, completed=done, total=total)
