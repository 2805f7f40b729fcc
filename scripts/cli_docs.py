"""Write docs/cli.md from the help of every command; --check fails when it is stale."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cli.md"
HEAD = """# The command line

Generated from the code by `make docs`. Exit codes: 0; 1 after one line on stderr for anything that
the user can mend; 130 after Ctrl-C; 141 when the reader of the output has gone. A first argument
that names no command is the PACKAGE of `run`; write `./serve` for a file of that name.
`ginfer-serve PACKAGE` is `ginfer serve PACKAGE`.
"""


def help_of(*command: str) -> str:
    """The help text of a command, 100 columns wide."""
    code = "import sys; from appliance.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100"},
    )
    return done.stdout.rstrip()


def page() -> str:
    """The whole document."""
    return HEAD + "".join(f"\n## {name}\n```\n{text}\n```\n" for name, text in sections())


def sections(*command: str) -> list[tuple[str, str]]:
    """Title and help of a command and of its subcommands."""
    text = help_of(*command)
    listed = text.partition("Commands:\n")[2]
    inner = re.findall(r"^  (\w+)  ", listed, flags=re.MULTILINE)
    return [
        (" ".join(("ginfer", *command)), text),
        *(section for name in inner for section in sections(*command, name)),
    ]


def main() -> int:
    """Write the page, or compare it; returns the exit code."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.read_text() == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale; run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
