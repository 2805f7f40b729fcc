"""Every field of a Chat Completions request: what is done with it, and how its value is checked."""

from __future__ import annotations

import re
from typing import Any

from appliance.protocols import checks
from appliance.protocols.chat_messages import parse_messages
from appliance.protocols.chat_tools import parse_response_format, parse_tool_choice, parse_tools
from appliance.protocols.fields import (
    MAX_SEED,
    MAX_STOPS,
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
    stop_strings,
    template_kwargs,
)
from ginfer.engine.request import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


def _logit_bias(value: Any, path: str) -> tuple[tuple[int, float], ...]:
    """(token id, bias) by ascending id."""
    pairs = {}
    if len(checks.mapping(value, path)) > MAX_LOGIT_BIAS:
        raise checks.wrong(path, value, f"at most {MAX_LOGIT_BIAS} tokens")
    for key, bias in value.items():
        if not TOKEN_ID.fullmatch(key):
            raise checks.wrong(f"{path}.{key}", key, "a token id as the member's name")
        pairs[int(key)] = checks.number(bias, f"{path}.{key}", -100, 100)
    return tuple(sorted(pairs.items()))


def _stream_options(value: Any, path: str) -> bool:
    """Whether usage is wanted in the stream."""
    found = checks.members(value, path, ("include_usage", "include_obfuscation"))
    if checks.boolean(found.get("include_obfuscation", False), f"{path}.include_obfuscation"):
        raise checks.refused(
            f"{path}.include_obfuscation",
            "chunks are not padded; leave it out or set it to false",
            code="stream_option_not_supported",
        )
    return checks.boolean(found.get("include_usage", False), f"{path}.include_usage")


def _modalities(value: Any, path: str) -> Any:
    if checks.array(value, path) != ["text"]:
        raise checks.refused(path, "only ['text'] is supported", code="modality_not_supported")
    return value


def _prediction(value: Any, path: str) -> None:
    found = checks.members(value, path, ("type", "content"))
    checks.one_of(checks.required(found, path, "type"), f"{path}.type", ("content",))
    content = checks.required(found, path, "content")
    if not isinstance(content, str | list):
        raise checks.wrong(f"{path}.content", content, "a string or an array of text parts")


FIELDS: dict[str, Field] = {
    "model": Field(
        Verdict.OBEYED, checks.string, "required; must be the served id, else 404 `model_not_found`"
    ),
    "messages": Field(Verdict.OBEYED, parse_messages, "required; see Messages below"),
    "max_completion_tokens": Field(
        Verdict.OBEYED,
        integer(1, MAX_TOKENS),
        "above 0; reasoning counts; default `--default-max-tokens`; the context ends a response "
        "too",
    ),
    "max_tokens": Field(
        Verdict.OBEYED,
        integer(1, MAX_TOKENS),
        "older name of max_completion_tokens; both given and different is 400 "
        "`conflicting_parameters`",
    ),
    "temperature": Field(Verdict.OBEYED, number(0, 2), "0 to 2; 0 is greedy"),
    "top_p": Field(Verdict.OBEYED, number(0, 1), "0 to 1, exact over the top_k"),
    "top_k": Field(Verdict.OBEYED, integer(0, MAX_TOKENS), "0 is no limit; any value, exactly"),
    "min_p": Field(Verdict.OBEYED, number(0, 1), "0 to 1"),
    "presence_penalty": Field(
        Verdict.OBEYED, number(-2, 2), "-2 to 2; counts generated tokens; at temperature 0 too"
    ),
    "frequency_penalty": Field(
        Verdict.OBEYED, number(-2, 2), "-2 to 2; counts generated tokens; at temperature 0 too"
    ),
    "logit_bias": Field(
        Verdict.OBEYED,
        _logit_bias,
        f"object: token id → -100 to 100, added to the logit; at most {MAX_LOGIT_BIAS} tokens",
    ),
    "seed": Field(
        Verdict.OBEYED,
        integer(0, MAX_SEED),
        "0 to 2^64 - 1; the same request repeats its tokens at any load, unless one of them reuses "
        "an earlier answer (`cached_tokens`), whose last bits differ; fresh when absent",
    ),
    "stop": Field(
        Verdict.OBEYED,
        stop_strings,
        f"string or array of at most {MAX_STOPS}; matched in the answer, not in the reasoning; an "
        "empty string stops nothing",
    ),
    "logprobs": Field(
        Verdict.OBEYED,
        checks.boolean,
        "log-softmax of the raw logits for each token of the answer, tool-call syntax included, "
        "reasoning not",
    ),
    "top_logprobs": Field(
        Verdict.OBEYED, integer(0, MAX_TOP_LOGPROBS), f"0 to {MAX_TOP_LOGPROBS}; needs logprobs"
    ),
    "n": Field(Verdict.OBEYED, only(1, "one choice per request", "n_not_supported"), "only 1"),
    "stream": Field(Verdict.OBEYED, checks.boolean, "server-sent events, ended by `[DONE]`"),
    "stream_options": Field(
        Verdict.OBEYED,
        _stream_options,
        "include_usage; include_obfuscation only false; needs stream",
    ),
    "tools": Field(Verdict.OBEYED, parse_tools, "functions; see Tools below"),
    "tool_choice": Field(
        Verdict.OBEYED,
        parse_tool_choice,
        "`auto`, `none` (the tools are not shown), `required` (one call or more), a function by "
        "its name (one call of it), allowed_tools (those alone are shown)",
    ),
    "parallel_tool_calls": Field(
        Verdict.OBEYED, checks.boolean, "default true; false is at most one call"
    ),
    "response_format": Field(
        Verdict.OBEYED,
        parse_response_format,
        "text, json_object or json_schema, enforced while generating, `strict` or not; with tools "
        "the answer is JSON or calls",
    ),
    "modalities": Field(Verdict.OBEYED, _modalities, 'only `["text"]`'),
    "verbosity": Field(
        Verdict.OBEYED,
        only("medium", "the answer's length has no switch", "verbosity_not_supported"),
        "only `medium`, which is its default",
    ),
    "store": Field(
        Verdict.OBEYED,
        only(False, "completions are not stored", "store_not_supported"),
        "only false: nothing is stored",
    ),
    "reasoning_effort": Field(
        Verdict.OBEYED,
        effort,
        "none (thinking off), minimal, low, medium, high, xhigh, max; the nearest level that the "
        "template has, ties upward",
    ),
    "enable_thinking": Field(
        Verdict.OBEYED,
        checks.boolean,
        "extension; contradicting reasoning_effort is 400 `conflicting_template_option`",
    ),
    "preserve_thinking": Field(
        Verdict.OBEYED, checks.boolean, "extension; whether earlier turns keep their reasoning"
    ),
    "chat_template_kwargs": Field(
        Verdict.OBEYED,
        template_kwargs,
        "extension; enable_thinking, preserve_thinking, reasoning_effort: the same as the fields",
    ),
    "thinking_budget": Field(
        Verdict.OBEYED,
        integer(0, MAX_TOKENS),
        "extension; most tokens of reasoning; at the limit the think block is closed, the closing "
        "is not shown",
    ),
    "user": Field(Verdict.ACCEPTED, checks.string, "an end-user id for the provider's statistics"),
    "safety_identifier": Field(Verdict.ACCEPTED, checks.string, "as user"),
    "prompt_cache_key": Field(
        Verdict.ACCEPTED, checks.string, "a hint; prefixes are found by their tokens"
    ),
    "prompt_cache_retention": Field(
        Verdict.ACCEPTED, one_of("in-memory", "in_memory", "24h"), "a hint"
    ),
    "prompt_cache_options": Field(Verdict.ACCEPTED, cache_options, "a hint"),
    "service_tier": Field(
        Verdict.ACCEPTED,
        one_of("auto", "default", code="service_tier_not_supported"),
        "`auto` or `default`; there is one tier",
    ),
    "prediction": Field(
        Verdict.ACCEPTED, _prediction, "a hint for speed that may not change the answer"
    ),
    "metadata": Field(
        Verdict.REFUSED,
        never("labels belong to stored completions, and none are stored"),
        "labels for stored completions; nothing is stored",
    ),
    "functions": Field(Verdict.REFUSED, never("use tools"), "use tools"),
    "function_call": Field(Verdict.REFUSED, never("use tool_choice"), "use tool_choice"),
    "audio": Field(
        Verdict.REFUSED, never("text only", "modality_not_supported"), "`modality_not_supported`"
    ),
    "web_search_options": Field(
        Verdict.REFUSED, never("there is no web search; offer it as a function"), "no web search"
    ),
    "moderation": Field(
        Verdict.REFUSED, never("there is no moderation model"), "no moderation model"
    ),
}
