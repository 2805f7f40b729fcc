"""`ginfer launch`: the configuration of an agent client for a running server."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from typing import Any

import click

from appliance.clients import CLIENTS, NO_KEY, Target
from ginfer.errors import UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 5.0


@click.command()
@click.argument("client", type=click.Choice(list(CLIENTS)))
@click.option("--url", default=DEFAULT_URL, show_default=True, help="Of the server, without /v1.")
@click.option("--model", metavar="NAME", help="Served name.  [default: ask the server]")
@click.option(
    "--context", type=click.IntRange(min=1), metavar="N", help="Tokens.  [default: ask the server]"
)
@click.option("--api-key", metavar="KEY", help="If the server demands one.")
@click.option("--write", is_flag=True, help="Write the file; an older one is kept as a backup.")
def command(client: str, write: bool, **options: Any) -> None:
    """Print, or write, what CLIENT needs to use a server of ours."""
    config = CLIENTS[client](find_target(**options))
    if not write:
        content = config.content
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        click.echo(f"# {config.path}", err=True)
        click.echo(text, nl=False)
        if client == "claude" and isinstance(content, dict):
            click.echo("# or for one shell:", err=True)
            for name, value in content["env"].items():
                click.echo(f"export {name}={shlex.quote(value)}", err=True)
        click.echo(f"# then: {config.command}", err=True)
        return
    before = config.path.exists() and config.path.read_text()
    backup = config.write()
    changed = before != config.path.read_text()
    click.echo(f"{config.path}: {'written' if changed else 'is so already'}")
    if backup is not None:
        click.echo(f"{backup}: the file as it was")
    click.echo(f"start it with: {config.command}")


def find_target(*, url: str, model: str | None, context: int | None, api_key: str | None) -> Target:
    """The server as the client shall see it; asks it for what is not given. Raises
    UnavailableError naming the options that would do without it."""
    url = url.rstrip("/").removesuffix("/v1")
    if model is None or context is None:
        served = ask_server(url, api_key)
        model, context = model or served["id"], context or served["context_window"]
    return Target(url=url, model=model, context=context, api_key=api_key or NO_KEY)


def ask_server(url: str, api_key: str | None) -> dict[str, Any]:
    """The entry of the served model. The client library is imported here for the sake of --help."""
    httpx = import_module("httpx")
    headers = {"x-api-key": api_key} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=TIMEOUT_S)
        if answer.status_code == 401:
            raise UnavailableError(f"the server at {url} demands a key; give --api-key")
        served: dict[str, Any] = answer.json()["data"][0]
        return {"id": str(served["id"]), "context_window": int(served["context_window"])}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as e:
        raise UnavailableError(
            f"no server of ours answers at {url} ({e}); start one, or give --model and --context"
        ) from None
