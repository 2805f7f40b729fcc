"""The chat template of a package, compiled once in a sandboxed Jinja2 environment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ginfer.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NBYTES = 1 << 20


_ENCODER = json.JSONEncoder(ensure_ascii=False)
_DICT_ATTRIBUTES = frozenset(dir(dict))
_SAFE = {
    str: frozenset(n for n in dir(str) if n[0] != "_" and not n.startswith("format")),
    LoopContext: frozenset(n for n in dir(LoopContext) if n[0] != "_"),
}


class _Environment(ImmutableSandboxedEnvironment):
    """Takes short cuts to the same results for members of dictionaries, methods of strings and loop
    variables: the checks of the base class were most of the time of rendering a long history."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """obj.attribute in a template."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class ChatTemplate:
    """Renders conversations. Template text comes from the package only, never from a request.

    `escape` is applied to everything that the template prints with `tojson`. Raises ArtifactError
    when the source is not a template.
    """

    def __init__(self, source: bytes, *, escape: Callable[[str], str]) -> None:
        if len(source) > MAX_NBYTES:
            raise ArtifactError(f"the chat template has {len(source)} bytes; legal: {MAX_NBYTES}")
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **options: escape(_to_json(value, **options))
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source.decode())
        except (TemplateError, UnicodeDecodeError) as error:
            raise ArtifactError(f"the chat template does not compile: {error}") from None

    def render(self, **variables: Any) -> str:
        """The prompt. Raises RequestError with the template's own words when it refuses."""
        try:
            return self._template.render(**variables)
        except TemplateError as error:
            message = f"the chat template refuses the conversation: {error}"
            raise RequestError(message, param="messages") from None
        except Exception as error:  # the template is the package's code: anything may come out
            message = f"the chat template cannot render the conversation: {error}"
            raise RequestError(message, param="messages") from None


def _to_json(value: Any, **options: Any) -> str:
    if options:  # templates may give those of json.dumps
        return json.dumps(value, **{"ensure_ascii": False, **options})
    return _ENCODER.encode(value)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
