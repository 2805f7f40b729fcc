"""Field: what is done with one field of a request, how its value is checked, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn

from appliance.protocols import checks
from ginfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Check = Callable[[Any, str], Any]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_TOKENS = (1 << 31) - 1
MAX_SEED = (1 << 64) - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class Verdict(StrEnum):
    """What happens to a field."""

    OBEYED = "obeyed"
    REFUSED = "refused"
    ACCEPTED = "accepted without effect"


@dataclass(frozen=True)
class Field:
    """One request field. `check(value, path)` returns the value as the request keeps it, or raises
    RequestError; `note` is its line in docs/api.md."""

    verdict: Verdict
    check: Check
    note: str


def described(check: Check, schema: dict[str, Any]) -> Check:
    """The check, with the JSON schema of what it accepts."""
    vars(check)["schema"] = schema
    return check


def number(low: float, high: float) -> Check:
    """A number within low..high."""
    schema = {"type": "number", "minimum": low, "maximum": high}
    return described(lambda value, path: checks.number(value, path, low, high), schema)


def integer(low: int, high: int) -> Check:
    """An integer within low..high."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return described(lambda value, path: checks.integer(value, path, low, high), schema)


def one_of(*legal: str, code: str = "invalid_value") -> Check:
    """One of the legal strings."""
    schema = {"type": "string", "enum": list(legal)}
    return described(lambda value, path: checks.one_of(value, path, legal, code=code), schema)


def only(legal: object, why: str, code: str) -> Check:
    """One value; every other is refused by `code`."""

    def check(value: Any, path: str) -> Any:
        if type(value) is not type(legal) or value != legal:
            raise checks.refused(path, f"{why}; it is {checks.shown(value)}", code=code)
        return value

    return described(check, {"enum": [legal]})


def never(why: str, code: str = "unsupported_parameter") -> Check:
    """No value but null."""

    def check(_value: Any, path: str) -> NoReturn:
        raise checks.refused(path, why, code=code)

    return described(check, {"type": "null"})


def effort(value: Any, path: str) -> str:
    """A level of reasoning effort."""
    return checks.one_of(value, path, EFFORTS, code="reasoning_effort_not_supported")


TEMPLATE_KWARGS: dict[str, Check] = {
    "enable_thinking": checks.boolean,
    "preserve_thinking": checks.boolean,
    "reasoning_effort": effort,
}


def template_kwargs(value: Any, path: str) -> dict[str, Any]:
    """The thinking options, given the way template arguments are."""
    found = checks.mapping(value, path)
    for name in found:
        if name not in TEMPLATE_KWARGS:
            known = ", ".join(TEMPLATE_KWARGS)
            raise checks.refused(
                f"{path}.{name}",
                f"not a template option; known: {known}",
                code="chat_template_option_not_supported",
            )
    return {k: TEMPLATE_KWARGS[k](v, f"{path}.{k}") for k, v in found.items() if v is not None}


def stop_strings(value: Any, path: str) -> tuple[str, ...]:
    """Stop strings in declaration order; an empty one stops nothing and is dropped."""
    entries = [value] if isinstance(value, str) else checks.array(value, path)
    if len(entries) > MAX_STOPS:
        raise checks.wrong(path, value, f"at most {MAX_STOPS} stop strings")
    stops = [checks.string(s, f"{path}.{i}") for i, s in enumerate(entries)]
    for text in stops:
        if len(text) > MAX_STOP_CHARS:
            raise checks.wrong(path, text, f"stop strings of at most {MAX_STOP_CHARS} characters")
    return tuple(s for s in stops if s)


def cache_options(value: Any, path: str) -> None:
    """Hints about the prompt cache."""
    found = checks.members(value, path, ("mode", "ttl"))
    for name, member in found.items():
        checks.string(member, f"{path}.{name}")


def check_fields(
    body: dict[str, Any], fields: Mapping[str, Field]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Checked values of the fields given, null counting as absent, and the names of those accepted
    without effect. Raises RequestError: unknown_parameter, or what the field's check says."""
    for name in body:
        if name not in fields:
            raise checks.unknown(name)
    given = {name: value for name, value in body.items() if value is not None}
    values = {name: fields[name].check(value, name) for name, value in given.items()}
    accepted = tuple(n for n in fields if n in given and fields[n].verdict is Verdict.ACCEPTED)
    return values, accepted


def conflict(names: tuple[str, str], code: str) -> RequestError:
    """The error for two fields that contradict each other."""
    return RequestError(
        f"{names[0]} and {names[1]} contradict each other; give one of them",
        code=code,
        param=names[1],
    )
