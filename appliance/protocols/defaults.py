"""What the server decides where a request is silent, and how the layers of sampling combine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from ginfer.engine.request import SamplingParams

if TYPE_CHECKING:
    from ginfer.frontend.base import SamplingDefaults

DEFAULT_MAX_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class SamplingOverrides:
    """Sampling wishes of one layer (a request or the server's options); None = not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None

    def over(self, base: SamplingOverrides) -> SamplingOverrides:
        """These wishes, and those of `base` where these are silent."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingOverrides(
            **{k: getattr(base, k) if v is None else v for k, v in given.items()}
        )

    def resolve(
        self,
        preset: SamplingDefaults,
        *,
        logprobs: int | None = None,
        logit_bias: tuple[tuple[int, float], ...] = (),
    ) -> SamplingParams:
        """Final parameters: these wishes over the model's preset. Raises RequestError naming the
        field that is out of range."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        seed = given.pop("seed")
        chosen = {k: getattr(preset, k) if v is None else v for k, v in given.items()}
        return SamplingParams(**chosen, seed=seed, logprobs=logprobs, logit_bias=logit_bias)


@dataclass(frozen=True, kw_only=True)
class ServerDefaults:
    """The server's answer to what a request leaves open. effort None = the template's default.
    canonical_headers: whether a line that clients change per request is left out of the prompt."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    thinking: bool = True
    effort: str | None = None
    preserve_thinking: bool = True
    canonical_headers: bool = True
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
