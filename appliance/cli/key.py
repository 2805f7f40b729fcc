"""`ginfer key`: make an API key, shown once, and keep its hash in a file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from appliance.auth import LINE, HashedKey, new_key, read_keys
from ginfer.errors import ConfigError


@click.command()
@click.argument("name")
@click.option(
    "--file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of hashes, as --api-keys-file of serve reads it; made if absent.",
)
def command(name: str, file: Path) -> None:
    """Make a key called NAME, append its hash to FILE and print the key.

    The server reads FILE at its start and on SIGHUP. A line that is deleted ends its key.
    """
    key = new_key()
    hashed = HashedKey.of(name, key)
    if not LINE.fullmatch(hashed.line):
        raise click.UsageError("NAME has letters, digits, '.', '_' and '-', at most 64 of them")
    if file.exists() and file.read_text().strip():
        known = {k.name for k in read_keys(file)}
        if name in known:
            raise ConfigError(f"{file} has a key called {name}; delete its line first")
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as out:
        out.write(hashed.line + "\n")
    click.echo(key)
