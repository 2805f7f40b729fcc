"""`ginfer models`: packages on this machine, and what can be served at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ginfer.artifact import Package
from ginfer.engine.catalog import served_identities
from ginfer.errors import ArtifactError
from ginfer.sizes import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = Path(__file__).resolve().parents[1] / "demo"


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(folders: tuple[Path, ...]) -> None:
    """List packages in FOLDERS and the models that can be served.

    Without FOLDERS: the current folder and the demo package.
    """
    for path in find_packages(folders or (Path(), DEMO)):
        click.echo(describe(path))
    click.echo("\nModels that can be served:")
    for model_id, profiles in served_identities().items():
        click.echo(f"  {model_id}: {', '.join(profiles)}")


def find_packages(folders: tuple[Path, ...]) -> Iterator[Path]:
    """The packages directly in the folders, each once, by name."""
    seen: set[Path] = set()
    for folder in folders:
        for path in sorted(folder.glob("*.ginfer")):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def describe(path: Path) -> str:
    """One line about a package, also about one that is unusable."""
    try:
        with Package.open(path) as package:
            identity, size = package.identity, human_bytes(package.nbytes)
            return f"{path}: {identity.model_id} {identity.weights_id}, TP {identity.tp}, {size}"
    except (ArtifactError, OSError) as error:
        return f"{path}: unusable: {error}"
