"""Configurations of agent clients for a server of ours: what goes into which of their files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NO_KEY = "ginfer"  # clients want one; a server without keys takes any
OUTPUT_SHARE = 4  # of the context that OpenCode leaves for an answer
PROVIDER = "ginfer"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server that a client shall use. url: without /v1. context: tokens."""

    url: str
    model: str
    context: int
    api_key: str = NO_KEY


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """One file of a client, and the command that starts it then.

    content: members that are merged into a JSON file, or the whole text of a file of our own."""

    path: Path
    content: dict[str, Any] | str
    command: str

    def merged(self) -> str:
        """The file's text with our settings in it; what else it holds is kept. Raises ConfigError
        when it is no JSON object."""
        if isinstance(self.content, str):
            return self.content
        found: Any = {}
        if self.path.exists():
            try:
                found = json.loads(self.path.read_text())
            except ValueError as error:
                raise self._unreadable(str(error)) from None
        if not isinstance(found, dict):
            raise self._unreadable("it holds no object")
        return json.dumps(_merge(found, self.content), indent=2, ensure_ascii=False) + "\n"

    def write(self) -> Path | None:
        """Write the file unless it is so already. Returns the backup of the old one, if there was
        one that differs. Raises ConfigError, OSError."""
        text = self.merged()
        old = self.path.read_bytes() if self.path.exists() else None
        if old == text.encode():
            return None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        backup = None
        if old is not None:
            backup = _free_name(self.path)
            _replace(backup, old)
        _replace(self.path, text.encode())
        return backup

    def _unreadable(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path} cannot be merged ({why}); add what is printed without --write by hand",
            param="write",
        )


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` over `old`, object by object; an array is replaced."""
    merged = dict(old)
    for name, value in new.items():
        before = merged.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            value = _merge(before, value)
        merged[name] = value
    return merged


def _free_name(path: Path) -> Path:
    number = 1
    while (backup := path.with_name(f"{path.name}.backup-{number}")).exists():
        number += 1
    return backup


def _replace(path: Path, data: bytes) -> None:
    """Put a file into its place whole, readable by its owner alone: it may hold a key."""
    target = path.resolve()
    part = target.with_name(f".{target.name}.ginfer")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    os.replace(part, target)


def claude(target: Target) -> ClientConfig:
    """Claude Code: environment variables in its settings. The attribution header would put a line
    that differs with each request in front of the system prompt, so that nothing is reused."""
    folder = os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude"
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL")
    env = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.api_key,
        **dict.fromkeys((*models, "ANTHROPIC_DEFAULT_SONNET_MODEL"), target.model),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return ClientConfig(path=Path(folder) / "settings.json", content={"env": env}, command="claude")


def codex(target: Target) -> ClientConfig:
    """Codex: a profile in a file of its own; the user's config.toml stays as it is."""
    folder = os.environ.get("CODEX_HOME") or Path.home() / ".codex"
    quoted = {k: json.dumps(str(v)) for k, v in vars(target).items()}
    text = (
        f"model = {quoted['model']}\n"
        f"model_provider = {json.dumps(PROVIDER)}\n"
        f"model_context_window = {target.context}\n"
        "\n"
        f"[model_providers.{PROVIDER}]\n"
        'name = "GInfer"\n'
        f"base_url = {json.dumps(target.url + '/v1')}\n"
        'wire_api = "responses"\n'
    )
    if target.api_key != NO_KEY:
        text += f"http_headers = {{ x-api-key = {quoted['api_key']} }}\n"
    path = Path(folder) / f"{PROVIDER}.config.toml"
    return ClientConfig(path=path, content=text, command=f"codex --profile {PROVIDER}")


def opencode(target: Target) -> ClientConfig:
    """OpenCode: a provider and the default model."""
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    limit = {"context": target.context, "output": max(1, target.context // OUTPUT_SHARE)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "GInfer",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.api_key},
        "models": {target.model: {"name": target.model, "limit": limit}},
    }
    content = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {PROVIDER: provider},
        "model": f"{PROVIDER}/{target.model}",
    }
    path = folder / "opencode" / "opencode.json"
    return ClientConfig(path=path, content=content, command="opencode")


def qwen(target: Target) -> ClientConfig:
    """Qwen Code: the provider of its OpenAI protocol and the default model."""
    provider = {
        "id": target.model,
        "name": target.model,
        "baseUrl": f"{target.url}/v1",
        "envKey": "QWEN_LOCAL_API_KEY",
        "generationConfig": {"contextWindowSize": target.context},
    }
    content = {
        "modelProviders": {"openai": [provider]},
        "env": {"QWEN_LOCAL_API_KEY": target.api_key},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model},
    }
    return ClientConfig(
        path=Path.home() / ".qwen" / "settings.json", content=content, command="qwen"
    )


CLIENTS: dict[str, Callable[[Target], ClientConfig]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "qwen": qwen,
}
