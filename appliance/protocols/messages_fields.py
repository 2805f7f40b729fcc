"""Every field of an Anthropic Messages request: what is done with it, and how it is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.fields import (
    MAX_SEED,
    MAX_STOPS,
    MAX_TOKENS,
    Field,
    Verdict,
    integer,
    never,
    number,
    one_of,
    only,
    stop_strings,
)
from appliance.protocols.messages_blocks import parse_messages, parse_system
from appliance.protocols.messages_tools import (
    parse_cache_control,
    parse_tool_choice,
    parse_tools,
)

if TYPE_CHECKING:
    from appliance.protocols.fields import Check

EFFORTS = ("low", "medium", "high", "xhigh", "max")
CLEAR_THINKING = "clear_thinking_20251015"


@dataclass(frozen=True, kw_only=True)
class ThinkingWish:
    """Whether to think, None = not said. budget: most tokens of reasoning, None = no limit. hidden:
    the response does not show the text."""

    enabled: bool | None = None
    budget: int | None = None
    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """effort: level of reasoning. schema: JSON schema of the answer. None = not given."""

    effort: str | None = None
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ClearThinking:
    """keep: of how many of the latest assistant turns the thinking stays, None = of all."""

    keep: int | None


def _model(value: Any, path: str) -> str:
    if not checks.string(value, path):
        raise checks.wrong(path, value, "a name")
    return str(value)


def _stop_sequences(value: Any, path: str) -> tuple[str, ...]:
    return stop_strings(checks.array(value, path), path)


def _thinking(value: Any, path: str) -> ThinkingWish:
    kind = checks.required(checks.mapping(value, path), path, "type")
    known = {
        "disabled": ("type",),
        "enabled": ("type", "budget_tokens", "display"),
        "adaptive": ("type", "display"),
    }
    found = checks.members(value, path, known[checks.one_of(kind, f"{path}.type", known)])
    display = checks.one_of(
        found.get("display", "summarized"),
        f"{path}.display",
        ("summarized", "omitted"),
        code="thinking_display_not_supported",
    )
    budget = None
    if kind == "enabled":
        given = checks.required(found, path, "budget_tokens")
        budget = checks.integer(given, f"{path}.budget_tokens", 1, MAX_TOKENS)
    return ThinkingWish(enabled=kind != "disabled", budget=budget, hidden=display == "omitted")


def _output_config(value: Any, path: str) -> OutputConfig:
    found = {k: v for k, v in checks.mapping(value, path).items() if v is not None}
    for name in found:
        if name not in ("effort", "format"):
            why = "not supported; remove it"
            raise checks.refused(f"{path}.{name}", why, code="output_config_option_not_supported")
    effort = schema = None
    if "format" in found:
        schema = _format(found["format"], f"{path}.format")
    if "effort" in found:
        effort = checks.one_of(
            found["effort"], f"{path}.effort", EFFORTS, code="reasoning_effort_not_supported"
        )
    return OutputConfig(effort=effort, schema=schema)


def _format(value: Any, path: str) -> dict[str, Any]:
    found = checks.members(value, path, ("type", "schema"))
    checks.one_of(checks.required(found, path, "type"), f"{path}.type", ("json_schema",))
    schema = checks.mapping(checks.required(found, path, "schema"), f"{path}.schema")
    return checks.shallow(schema, f"{path}.schema")


def _context_management(value: Any, path: str) -> ClearThinking | None:
    """What is cut from the history: old thinking, nothing else."""
    found = checks.members(value, path, ("edits",))
    cut = None
    for i, edit in enumerate(checks.array(found.get("edits", []), f"{path}.edits")):
        where = f"{path}.edits.{i}"
        kind = checks.required(checks.mapping(edit, where), where, "type")
        if checks.string(kind, f"{where}.type") != CLEAR_THINKING:
            why = f"{kind[:60]} is not supported; only {CLEAR_THINKING} is"
            raise checks.refused(f"{where}.type", why, code="context_edit_not_supported")
        keep = checks.members(edit, where, ("type", "keep")).get("keep", 1)
        cut = ClearThinking(keep=_keep(keep, f"{where}.keep"))
    return cut


def _keep(value: Any, path: str) -> int | None:
    if value == "all":
        return None
    if isinstance(value, int):
        return checks.integer(value, path, 1, MAX_TOKENS)
    kind = checks.one_of(
        checks.required(checks.mapping(value, path), path, "type"),
        f"{path}.type",
        ("all", "thinking_turns"),
    )
    known = ("type",) if kind == "all" else ("type", "value")
    found = checks.members(value, path, known)
    if kind == "all":
        return None
    return checks.integer(checks.required(found, path, "value"), f"{path}.value", 1, MAX_TOKENS)


def _metadata(value: Any, path: str) -> None:
    found = checks.members(value, path, ("user_id",))
    if "user_id" in found:
        checks.string(found["user_id"], f"{path}.user_id")


def _empty(why: str) -> Check:
    """Only an empty object or array."""

    def check(value: Any, path: str) -> None:
        if value not in ({}, []):
            raise checks.refused(path, why, code="unsupported_parameter")

    return check


FIELDS: dict[str, Field] = {
    "model": Field(
        Verdict.OBEYED, _model, "required; any name, which the response repeats; one model answers"
    ),
    "messages": Field(Verdict.OBEYED, parse_messages, "required; see Turns and blocks"),
    "max_tokens": Field(
        Verdict.OBEYED,
        integer(1, MAX_TOKENS),
        "above 0; thinking counts; default `--default-max-tokens`; the context ends a response too",
    ),
    "system": Field(Verdict.OBEYED, parse_system, "string or text blocks; see Volatile header"),
    "stop_sequences": Field(
        Verdict.OBEYED,
        _stop_sequences,
        f"at most {MAX_STOPS}; matched in the answer, not in the thinking; an empty string stops "
        "nothing",
    ),
    "temperature": Field(Verdict.OBEYED, number(0, 1), "0 to 1; 0 is greedy"),
    "top_p": Field(Verdict.OBEYED, number(0, 1), "0 to 1, exact over the top_k"),
    "top_k": Field(Verdict.OBEYED, integer(0, MAX_TOKENS), "0 is no limit; any value, exactly"),
    "min_p": Field(Verdict.OBEYED, number(0, 1), "extension; 0 to 1"),
    "presence_penalty": Field(
        Verdict.OBEYED, number(-2, 2), "extension; -2 to 2; counts generated tokens"
    ),
    "frequency_penalty": Field(
        Verdict.OBEYED, number(-2, 2), "extension; -2 to 2; counts generated tokens"
    ),
    "seed": Field(
        Verdict.OBEYED, integer(0, MAX_SEED), "extension; 0 to 2^64 - 1; as in Chat Completions"
    ),
    "stream": Field(Verdict.OBEYED, checks.boolean, "server-sent events, ended by `message_stop`"),
    "tools": Field(Verdict.OBEYED, parse_tools, "custom tools; see Tools and tool choice"),
    "tool_choice": Field(Verdict.OBEYED, parse_tool_choice, "see Tools and tool choice"),
    "thinking": Field(
        Verdict.OBEYED,
        _thinking,
        "`disabled`, `adaptive`, or `enabled` with budget_tokens, at which the think block is "
        "closed; display `summarized` shows all, `omitted` nothing; absent: the server's default",
    ),
    "output_config": Field(
        Verdict.OBEYED,
        _output_config,
        "effort: low, medium, high, xhigh, max; it alone does not turn thinking on; "
        "format: `json_schema`, which the answer matches, unless it is calls; other members are "
        "refused: `output_config_option_not_supported`",
    ),
    "context_management": Field(
        Verdict.OBEYED,
        _context_management,
        f"edits of type `{CLEAR_THINKING}`; keep: `all` or so many of the latest turns that think; "
        "other edits are refused: `context_edit_not_supported`",
    ),
    "preserve_thinking": Field(
        Verdict.OBEYED, checks.boolean, "extension; whether earlier turns keep their thinking"
    ),
    "speed": Field(
        Verdict.OBEYED,
        only("standard", "there is one speed", "unsupported_parameter"),
        "only `standard`",
    ),
    "cache_control": Field(
        Verdict.ACCEPTED,
        parse_cache_control,
        "a hint, here and on blocks and tools; prefixes are found by their tokens",
    ),
    "metadata": Field(
        Verdict.ACCEPTED, _metadata, "user_id: an end-user id for the provider's statistics"
    ),
    "user_profile_id": Field(Verdict.ACCEPTED, checks.string, "as metadata.user_id"),
    "service_tier": Field(
        Verdict.ACCEPTED,
        one_of("auto", "standard_only", code="service_tier_not_supported"),
        "`auto` or `standard_only`; there is one tier",
    ),
    "container": Field(Verdict.REFUSED, _empty("no code runs here"), "unless empty"),
    "mcp_servers": Field(Verdict.REFUSED, _empty("connect to them in the client"), "unless empty"),
    "output_format": Field(
        Verdict.REFUSED, never("use output_config.format"), "use output_config.format"
    ),
    "diagnostics": Field(Verdict.REFUSED, _empty("cache misses are not explained"), "unless empty"),
    "inference_geo": Field(
        Verdict.REFUSED, never("the server is where it is"), "the server is where it is"
    ),
    "workspace_id": Field(Verdict.REFUSED, never("there are no workspaces"), "no workspaces"),
    "fallbacks": Field(Verdict.REFUSED, _empty("one model answers"), "unless empty"),
    "fallback_credit_token": Field(
        Verdict.REFUSED, never("one model answers"), "one model answers"
    ),
    "billing_policy": Field(Verdict.REFUSED, never("nothing is billed"), "nothing is billed"),
    "compaction": Field(
        Verdict.REFUSED, _empty("the conversation is not shortened"), "unless empty"
    ),
    "thread": Field(Verdict.REFUSED, _empty("nothing is stored"), "unless empty"),
}
