"""Packer: a bf16 safetensors checkpoint folder to a .ginfer package.

python -m scripts.pack CHECKPOINT OUT --model qwen3.8-demo --weights groupwise-int
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ginfer.errors import GInferError
from ginfer.models.contract import PROFILES
from ginfer.models.registry import CONTRACTS, contract_for
from ginfer.sizes import human_bytes
from scripts.pack import packer, qwen
from scripts.pack.sources import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from ginfer.models.contract import ModelContract, WeightProfile
    from scripts.pack.sources import Listing


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), required=False)
@click.option("--model", required=True, help=f"One of {', '.join(CONTRACTS)}.")
@click.option("--weights", required=True, help=f"One of {', '.join(PROFILES)}.")
@click.option(
    "--drafter",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the DFlash2 checkpoint, for weights with a drafter.",
)
@click.option("--dry-run", is_flag=True, help="Check names and shapes; write nothing.")
def main(
    checkpoint: Path,
    out: Path | None,
    *,
    model: str,
    weights: str,
    drafter: Path | None,
    dry_run: bool,
) -> None:
    """Pack the folder CHECKPOINT into the file OUT (and OUT.sha256).

    With --dry-run CHECKPOINT may also be a JSON list of {"name": ..., "shape": [...]}.
    """
    try:
        contract, profile = contract_for(model, weights), PROFILES[weights]
        if profile.has_drafter != (drafter is not None):
            what = "needs a" if profile.has_drafter else "has no"
            raise click.UsageError(f"--weights {weights} {what} drafter; see --drafter")
        if dry_run:
            _dry_run(checkpoint, drafter, contract)
        elif out is None:
            raise click.UsageError("OUT is missing; name the package to write, or give --dry-run")
        else:
            with Checkpoint(checkpoint, drafter) as opened:
                _pack(opened, out, contract, profile)
    except CheckpointError as error:
        _fail(error.problems)
    except (GInferError, OSError) as error:
        _fail([str(error)])


def _dry_run(path: Path, drafter: Path | None, contract: ModelContract) -> None:
    if path.is_dir():
        with Checkpoint(path, drafter) as checkpoint:
            found = checkpoint.listing()
    else:
        found = _listed(path)
    matched = packer.match(qwen.recipes(contract, drafter=drafter is not None), found)
    if matched.problems:
        raise CheckpointError(matched.problems)
    click.echo(
        f"{len(found)} tensors fit {contract.model_id}: {len(matched.names)} used, "
        f"{len(matched.dropped)} left out"
    )


def _listed(path: Path) -> Listing:
    try:
        entries = json.loads(path.read_bytes())
        return {e["name"]: (tuple(int(n) for n in e["shape"]), e.get("dtype")) for e in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"{path.name}: not a list of name and shape ({error})"
        raise CheckpointError([fault]) from error


def _pack(
    checkpoint: Checkpoint, out: Path, contract: ModelContract, profile: WeightProfile
) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        total = sum(file.stat().st_size for file in checkpoint.files)
        hashing = bars.add_task("checkpoint digest", total=total)
        writing = bars.add_task(
            "packing", total=sum(t.nbytes for t in packer.planned_tensors(contract, profile))
        )
        tasks = {"hash": hashing, "pack": writing}
        packer.pack(
            checkpoint,
            out,
            contract,
            profile=profile,
            progress=lambda stage, nbytes: bars.advance(tasks[stage], nbytes),
        )
    with out.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    Path(f"{out}.sha256").write_text(f"{digest}  {out.name}\n")
    click.echo(f"{out}: {human_bytes(out.stat().st_size)}, sha256 {digest}")


def _fail(problems: tuple[str, ...] | list[str]) -> NoReturn:
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
