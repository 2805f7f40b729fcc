"""Every field of a Responses request: what is done with it, and how its value is checked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.protocols import checks
from appliance.protocols.chat_fields import FIELDS as CHAT
from appliance.protocols.fields import (
    MAX_TOKENS,
    Field,
    Verdict,
    cache_options,
    effort,
    integer,
    never,
    number,
    one_of,
    only,
    template_kwargs,
)
from appliance.protocols.responses.formats import check_format
from appliance.protocols.responses.items import check_input
from appliance.protocols.responses.tools import parse_choice, parse_tools
from ginfer.engine.request import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from appliance.protocols.fields import Check

MIN_OUTPUT_TOKENS = 16
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# what these add belongs to items that no response has
VACUOUS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
SUMMARIES = ("auto", "concise", "detailed")
CONTEXTS = {"auto": None, "current_turn": False, "all_turns": True}


def _metadata(value: Any, path: str) -> dict[str, str]:
    """At most 16 labels."""
    found = checks.mapping(value, path)
    if len(found) > MAX_PAIRS:
        raise checks.wrong(path, found, f"at most {MAX_PAIRS} pairs")
    for key, text in found.items():
        if len(key) > MAX_KEY_CHARS:
            raise checks.wrong(path, key, f"keys of at most {MAX_KEY_CHARS} characters")
        if len(checks.string(text, f"{path}.{key}")) > MAX_VALUE_CHARS:
            raise checks.wrong(
                f"{path}.{key}", text, f"a string of at most {MAX_VALUE_CHARS} characters"
            )
    return found


def _client_metadata(value: Any, path: str) -> None:
    for key, text in checks.mapping(value, path).items():
        checks.string(text, f"{path}.{key}")


def _include(value: Any, path: str) -> frozenset[str]:
    """What is to be added to the response."""
    for i, name in enumerate(checks.array(value, path)):
        legal = (LOGPROBS, SEALED, *VACUOUS)
        checks.one_of(name, f"{path}.{i}", legal, code="include_not_supported")
    return frozenset(value)


def _reasoning(value: Any, path: str) -> dict[str, Any]:
    """Effort, and whether earlier turns keep their reasoning (`context`)."""
    known = ("effort", "summary", "generate_summary", "context", "mode")
    code = "reasoning_option_not_supported"
    for name in checks.mapping(value, path):
        if name not in known:
            raise checks.refused(f"{path}.{name}", "not an option of this model", code=code)
    found = checks.members(value, path, known)
    for name, check in (
        ("effort", effort),
        ("summary", one_of(*SUMMARIES)),
        ("generate_summary", one_of(*SUMMARIES)),
        ("context", one_of(*CONTEXTS)),
        ("mode", only("standard", "there is one mode", code)),
    ):
        if name in found:
            check(found[name], f"{path}.{name}")
    return found


def _text(value: Any, path: str) -> dict[str, Any]:
    """The format of the answer, and the schema that it stands for."""
    found = checks.members(value, path, ("format", "verbosity"))
    if "verbosity" in found:
        why = "the answer's length has no switch"
        only("medium", why, "verbosity_not_supported")(found["verbosity"], f"{path}.verbosity")
    if "format" in found:
        found["schema"] = check_format(found["format"], f"{path}.format")
    return found


def _stream_options(value: Any, path: str) -> None:
    found = checks.members(value, path, ("include_obfuscation",))
    if checks.boolean(found.get("include_obfuscation", False), f"{path}.include_obfuscation"):
        raise checks.refused(
            f"{path}.include_obfuscation",
            "events are not padded; leave it out or set it to false",
            code="stream_option_not_supported",
        )


def _refused(why: str, code: str = "parameter_not_supported") -> Field:
    return Field(Verdict.REFUSED, never(why, code), why)


def _as_chat(name: str, note: str = "as in Chat Completions") -> Field:
    return replace(CHAT[name], note=note)


def _hint(check: Check, note: str) -> Field:
    return Field(Verdict.ACCEPTED, check, note)


EXTENSIONS = (
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "thinking_budget",
)

FIELDS: dict[str, Field] = {
    "model": _as_chat("model", "required; must be the served id, else 404 `model_not_found`"),
    "input": Field(Verdict.OBEYED, check_input, "required; see Items below"),
    "instructions": Field(
        Verdict.OBEYED,
        checks.string,
        "a developer message before all items; it holds for this response only",
    ),
    "previous_response_id": Field(
        Verdict.OBEYED,
        checks.string,
        "a stored response, whose conversation comes before the input; else 404 "
        "`response_not_found`",
    ),
    "store": Field(
        Verdict.OBEYED, checks.boolean, "default true; a completed or incomplete response is kept"
    ),
    "stream": Field(Verdict.OBEYED, checks.boolean, "server-sent events; see Events below"),
    "stream_options": Field(
        Verdict.OBEYED, _stream_options, "include_obfuscation only false; needs stream"
    ),
    "max_output_tokens": Field(
        Verdict.OBEYED,
        integer(MIN_OUTPUT_TOKENS, MAX_TOKENS),
        f"at least {MIN_OUTPUT_TOKENS}; reasoning counts; default `--default-max-tokens`; the "
        "context ends a response too",
    ),
    "temperature": Field(Verdict.OBEYED, number(0, 2), "0 to 2; 0 is greedy"),
    "top_p": Field(Verdict.OBEYED, number(0, 1), "0 to 1, exact over the top_k"),
    "top_logprobs": Field(
        Verdict.OBEYED,
        integer(0, MAX_TOP_LOGPROBS),
        f"0 to {MAX_TOP_LOGPROBS}; above 0 it needs include: {LOGPROBS}",
    ),
    "include": Field(
        Verdict.OBEYED,
        _include,
        f"{LOGPROBS} and {SEALED}; those of hosted tools and media add nothing, because no "
        "response has such items",
    ),
    "reasoning": Field(
        Verdict.OBEYED,
        _reasoning,
        "effort as reasoning_effort in Chat; context `current_turn` or `all_turns` is "
        "preserve_thinking; summary is accepted without effect; mode only `standard`; others are "
        "refused: `reasoning_option_not_supported`",
    ),
    "text": Field(
        Verdict.OBEYED,
        _text,
        "format text, json_object or json_schema, enforced while generating, `strict` or not; "
        "verbosity only `medium`",
    ),
    "tools": Field(
        Verdict.OBEYED, parse_tools, "functions, custom tools, namespaces; see Tools below"
    ),
    "tool_choice": Field(
        Verdict.OBEYED,
        parse_choice,
        "`auto`, `none`, `required` (one call or more), a function or custom tool by its name (one "
        "call of it), allowed_tools",
    ),
    "parallel_tool_calls": Field(
        Verdict.OBEYED, checks.boolean, "default true; false is at most one call"
    ),
    "max_tool_calls": Field(
        Verdict.OBEYED,
        integer(1, MAX_TOKENS),
        "limits the calls of hosted tools, of which there are none",
    ),
    "truncation": Field(
        Verdict.OBEYED,
        only("disabled", "a conversation is never shortened", "truncation_not_supported"),
        "only `disabled`",
    ),
    "background": Field(
        Verdict.OBEYED,
        only(False, "a response lasts as long as its request", "background_not_supported"),
        "only false",
    ),
    "metadata": Field(
        Verdict.OBEYED,
        _metadata,
        f"at most {MAX_PAIRS} pairs, keys of {MAX_KEY_CHARS} and values of {MAX_VALUE_CHARS} "
        "characters; kept and shown with the response",
    ),
    "preserve_thinking": _as_chat(
        "preserve_thinking",
        "extension; whether earlier turns keep their reasoning; inherited from the previous "
        "response",
    ),
    "chat_template_kwargs": Field(
        Verdict.OBEYED, template_kwargs, "extension; as in Chat Completions"
    ),
    **{name: _as_chat(name, "extension; as in Chat Completions") for name in EXTENSIONS},
    "service_tier": _as_chat("service_tier"),
    "user": _as_chat("user"),
    "safety_identifier": _as_chat("safety_identifier"),
    "prompt_cache_key": _as_chat("prompt_cache_key"),
    "prompt_cache_retention": _as_chat("prompt_cache_retention"),
    "prompt_cache_options": _hint(cache_options, "as in Chat Completions"),
    "client_metadata": _hint(_client_metadata, "what a client tells about itself"),
    "conversation": _refused("conversations are kept by previous_response_id alone"),
    "context_management": _refused("a conversation is never shortened"),
    "prompt": _refused("there are no prompt templates"),
    "moderation": _refused("there is no moderation model"),
    "image": _refused("text only", "modality_not_supported"),
    "access_programs": _refused("there are no access programs"),
    "background_options": _refused("there is no background"),
}
