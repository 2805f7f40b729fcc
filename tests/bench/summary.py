"""docs/performance/summary.json: figures by name, with unit, date, device and commit."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUMMARY = ROOT / "docs/performance/summary.json"


def record(
    figures: dict[str, tuple[float, str]], device: str, *, path: Path = SUMMARY, commit: str = ""
) -> None:
    """Merge figures, (value, unit) by name, into the summary at `path`."""
    summary: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    today = datetime.date.today().isoformat()
    stamp = {"date": today, "device": device, "commit": commit or head_commit()}
    for name, (value, unit) in figures.items():
        summary[name] = {"value": float(f"{value:.4g}"), "unit": unit, **stamp}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n")


def head_commit() -> str:
    """The commit of the working tree, marked when files differ from it; records do not count, which
    benchmarks that run one after the other write."""
    changes = ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/performance"]
    return _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git(*changes) else "")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()
