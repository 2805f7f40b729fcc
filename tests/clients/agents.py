"""Agent clients from npm, each in a home of its own: how they are configured and called.

`whole` is a client as it comes: prompts and tools longer than the demo model can use.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "qwen3.8-demo"
SYSTEM = "You are a helpful assistant."  # the clients' own prompts are longer than the demo can use
QUESTION = "Hello!"
LIMIT_S = 400.0
FILES_SERVER = Path(__file__).with_name("files_server.py")


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One client. files: configuration, by path below its home; commands: arguments of the calls
    that read notes.txt and answer from it, one after the other in one conversation; secret: what
    of the file the last of them prints; closing: arguments of the calls that end what it left."""

    binary: str
    commands: tuple[tuple[str, ...], ...]
    closing: tuple[tuple[str, ...], ...] = ()
    secret: str = "heron"
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Folders of one run. tools: where npm has put the clients."""

    tools: Path
    home: Path
    work: Path

    def installed(self, agent: Agent) -> bool:
        """Whether npm has put it there."""
        return (self.tools / "node_modules/.bin" / agent.binary).exists()

    def run(self, agent: Agent) -> list[str]:
        """What each command printed. Raises CalledProcessError and TimeoutExpired."""
        for path, text in agent.files.items():
            (self.home / path).parent.mkdir(parents=True, exist_ok=True)
            (self.home / path).write_text(text)
        try:
            return [self._call(agent, arguments) for arguments in agent.commands]
        finally:
            for arguments in agent.closing:
                self._call(agent, arguments)

    def _call(self, agent: Agent, arguments: tuple[str, ...]) -> str:
        command = [str(self.tools / "node_modules/.bin" / agent.binary), *arguments]
        own = {"HOME": str(self.home), "PATH": os.environ["PATH"], **agent.environment}
        process = subprocess.Popen(
            command,
            cwd=self.work,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output)
        return output


def claude(url: str, space: Space, *, whole: bool = False) -> Agent:
    """Claude Code; the file is read by a tool of an MCP server, because the demo model, which knows
    no names in capitals, cannot spell `Read`."""
    files = {"command": sys.executable, "args": [str(FILES_SERVER)]}
    narrow = (
        *("--bare", "-p", "Call mcp__fs__read_file with path = notes.txt."),
        *("--tools", "", "--system-prompt", SYSTEM, "--strict-mcp-config"),
        *("--mcp-config", json.dumps({"mcpServers": {"fs": files}})),
        *("--allowedTools", "mcp__fs__read_file"),
    )
    return Agent(
        binary="claude",
        commands=(("-p", QUESTION) if whole else narrow,),
        environment={
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def codex(url: str, space: Space, *, whole: bool = False) -> Agent:
    """Codex; its tool puts its own lines before the output of the command, and the demo model
    repeats the first, so that a second turn asks for the content."""
    options = ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")
    instructions = space.home / ".codex/instructions.md"
    narrow = (
        f'model_instructions_file = "{instructions}"',
        'web_search = "disabled"',
        "include_permissions_instructions = false",
        "skills.include_instructions = false",
        *(f"features.{name} = false" for name in ("multi_agent", "goals", "view_image")),
    )
    lines = (
        f'model = "{MODEL}"',
        'model_provider = "ginfer"',
        *(() if whole else narrow),
        "[model_providers.ginfer]",
        'name = "GInfer"',
        f'base_url = "{url}/v1"',
        'wire_api = "responses"',
    )
    turns = (
        (*options, "Run cat notes.txt."),
        (*options, "resume", "--last", "What is the value of SECRET_NUMBER?"),
    )
    return Agent(
        binary="codex",
        commands=((*options, QUESTION),) if whole else turns,
        secret="SECRET_NUMBER=413887",
        environment={"CODEX_HOME": str(space.home / ".codex")},
        files={".codex/config.toml": "\n".join(lines), ".codex/instructions.md": SYSTEM},
    )


def opencode(url: str, space: Space, *, whole: bool = False) -> Agent:
    """OpenCode with its shell alone."""
    others = ("edit", "glob", "grep", "read", "skill", "task", "todowrite", "webfetch", "write")
    options = {"baseURL": f"{url}/v1", "apiKey": "none"}
    limits = {"context": 16384, "output": 4096}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "GInfer",
        "options": options,
        "models": {MODEL: {"name": MODEL, "limit": limits}},
    }
    config: dict[str, Any] = {
        "provider": {"ginfer": provider},
        "model": f"ginfer/{MODEL}",
        "share": "disabled",
        "autoupdate": False,
    }
    if not whole:
        config["agent"] = {"build": {"prompt": SYSTEM}}
        config["tools"] = dict.fromkeys(others, False)
    return Agent(
        binary="opencode",
        commands=(("run", QUESTION if whole else "Call bash with command = cat notes.txt."),),
        files={".config/opencode/opencode.json": json.dumps(config)},
    )


def qwen(url: str, space: Space, *, whole: bool = False) -> Agent:
    """Qwen Code with few tools."""
    narrow = (
        *("-p", f"Call read_file with file_path {space.work / 'notes.txt'}."),
        *("--bare", "--core-tools", "read_file", "--system-prompt", SYSTEM),
    )
    return Agent(
        binary="qwen",
        commands=((*(("-p", QUESTION) if whole else narrow), "--auth-type", "openai"),),
        environment={
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": MODEL,
        },
    )


def cline(url: str, space: Space, *, whole: bool = False) -> Agent:
    """Cline, whose tools take arrays, which the demo model does not write: it can only ask."""
    provider = ("-p", "openai-compatible", "-k", "none", "-m", MODEL, "-b", f"{url}/v1")
    return Agent(
        binary="cline",
        commands=(
            ("auth", *provider),
            ("-P", "openai-compatible", "-m", MODEL, "Who are you?"),
        ),
        closing=(("hub", "stop"),),
    )


AGENTS = {"claude": claude, "codex": codex, "opencode": opencode, "qwen": qwen}
