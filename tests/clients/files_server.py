"""A Model Context Protocol server on standard input and output, with one tool: read_file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

READ_FILE = {
    "name": "read_file",
    "description": "Read a text file.",
    "inputSchema": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "Path of the file"}},
        "required": ["path"],
    },
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of one call. Raises OSError for a file that cannot be read."""
    if method == "initialize":
        version = params["protocolVersion"]
        about = {"name": "files", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [READ_FILE]}
    if method == "tools/call":
        text = Path(params["arguments"]["path"]).read_text()
        return {"content": [{"type": "text", "text": text}]}
    return {}


def main() -> None:
    """Answer until the client closes."""
    for line in sys.stdin:
        call = json.loads(line)
        if "id" in call:  # the others are notifications
            result = answer(call["method"], call.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
