"""`ginfer inspect PACKAGE`: what a package is and holds, without reading its payloads."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson

from ginfer.artifact import Package, TensorRecord
from ginfer.engine.loader import inventory_findings
from ginfer.errors import ConfigError
from ginfer.sizes import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@click.command("inspect")
@click.argument("package", type=click.Path(path_type=Path))
@click.option("--objects", is_flag=True, help="List every object.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every object.")
def command(package: Path, objects: bool, as_json: bool) -> None:
    """Show what PACKAGE is: identity, producer, sizes by format and rank, resources, and how it
    differs from the model that it names."""
    with Package.open(package) as opened:
        if as_json:
            click.echo(orjson.dumps(describe(opened), option=orjson.OPT_INDENT_2))
            return
        for line in (*_summary(opened), *(_object_table(opened) if objects else ())):
            click.echo(line)


def describe(package: Package) -> dict[str, Any]:
    """Return everything that `inspect` shows as one JSON object."""
    return {
        "path": click.format_filename(package.path),
        "bytes": package.nbytes,
        "digest": package.digest,
        "payload_offset": package.payload_offset,
        "identity": asdict(package.identity),
        "inventory": inventory(package),
        "formats": _totals(package.tensors, lambda t: f"{t.format} {t.layout}"),
        "groups": _totals(package.tensors, lambda t: ",".join(map(str, t.ranks))),
        "objects": [
            {"kind": "tensor" if isinstance(o, TensorRecord) else "resource", **asdict(o)}
            for o in package.objects
        ],
    }


def inventory(package: Package) -> list[str]:
    """Return the differences to the registered model, a line each; empty when it is complete."""
    try:
        return [str(finding) for finding in inventory_findings(package)]
    except ConfigError as error:
        return [error.message]


def _totals(
    tensors: Iterable[TensorRecord], key: Callable[[TensorRecord], str]
) -> dict[str, dict[str, int]]:
    """Return tensors and bytes per key, in file order."""
    tensors = tuple(tensors)
    nbytes: Counter[str] = Counter()
    for tensor in tensors:
        nbytes[key(tensor)] += tensor.bytes
    counts = Counter(map(key, tensors))
    return {k: {"tensors": counts[k], "bytes": n} for k, n in nbytes.items()}


def _summary(package: Package) -> Iterator[str]:
    i, p = package.identity, package.identity.producer
    differences = inventory(package)
    rows = (
        ("package", f"{click.format_filename(package.path)} ({human_bytes(package.nbytes)})"),
        ("digest", package.digest),
        ("model", i.model_id),
        ("weights", i.weights_id),
        ("tp", f"{i.tp}, drafter {i.drafter_tp or 'none'}"),
        ("kv calibration", i.kv_calibration or "none"),
        ("qualified", ", ".join(i.qualified) or "nowhere yet"),
        ("inventory", f"{len(differences)} differences" if differences else "complete"),
        ("producer", f"{p.name} {p.version}"),
        ("recipe", p.recipe_sha256),
        ("source", p.source_sha256),
    )
    yield from (f"{label:15} {value}" for label, value in rows)
    for title, key in (("format", "formats"), ("ranks", "groups")):
        yield ""
        for name, total in describe(package)[key].items():
            size = human_bytes(total["bytes"])
            yield f"{title} {name:38} {total['tensors']:5} tensors {size:>10}"
    yield ""
    yield from (f"difference {line}" for line in differences)
    for name, record in package.resources.items():
        yield f"resource {name:42} {human_bytes(record.bytes):>17}"


def _object_table(package: Package) -> Iterator[str]:
    yield ""
    yield f"{'offset':>12} {'bytes':>12} {'ranks':7} {'format':20} {'layout':16} name, shape"
    for o in package.objects:
        ranks, fmt, layout, shape = "", "", "", ""
        if isinstance(o, TensorRecord):
            ranks, fmt, layout = ",".join(map(str, o.ranks)), o.format, o.layout
            shape = f" {list(o.shape)}"
        yield f"{o.offset:12} {o.bytes:12} {ranks:7} {fmt:20} {layout:16} {o.name}{shape}"
