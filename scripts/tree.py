"""Keep the file tree in README.md equal to the first docstring line of every module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
FOLDERS = ("ginfer", "appliance", "scripts")
BEGIN, END = "<!-- tree begin -->", "<!-- tree end -->"


def purpose(path: Path) -> str:
    """The first docstring line of a module, without its full stop; empty for an empty module."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return doc.split("\n", 1)[0].rstrip(".")


def tree() -> str:
    """The tree as a fenced block: one line per module, folders as headings."""
    lines = []
    for top in FOLDERS:
        for folder in sorted({p.parent for p in (ROOT / top).rglob("*.py")}):
            files = [(p, purpose(p)) for p in sorted(folder.glob("*.py"))]
            rows = [f"  {p.name:<20} {text}" for p, text in files if text]
            if rows:
                lines += [f"{folder.relative_to(ROOT).as_posix()}/", *rows]
    return "\n".join((BEGIN, "```", *lines, "```", END))


def main() -> int:
    """Rewrite the block, or with --check fail when it is stale."""
    text = README.read_text()
    head, rest = text.split(BEGIN, 1)
    new = head + tree() + rest.split(END, 1)[1]
    if "--check" not in sys.argv:
        README.write_text(new)
    elif new != text:
        print("README.md: the tree is stale; run `make docs`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
