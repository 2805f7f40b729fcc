"""Output of one response: tokens in, deltas out, and the decision that it is complete."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ginfer.engine.request import Delta, FinishReason
from ginfer.engine.stops import StopMatcher
from ginfer.prompt import Channel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ginfer.engine.request import Request, TokenLogprob
    from ginfer.frontend.base import Frontend


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a response is complete, and the stop string or token that completed it."""

    reason: FinishReason
    stop: str | None = None
    stop_token_id: int | None = None


class Output:
    """Decoder, stop matchers, reasoning budget and limits of one response.

    Every committed token id appears in exactly one delta, in the round that drew it, except a stop
    token; its text may follow later, while it is ambiguous. limit: most tokens, and what it means
    to reach it.
    """

    def __init__(
        self, request: Request, frontend: Frontend, limit: int, limit_reason: FinishReason
    ) -> None:
        self._request = request
        self._frontend = frontend
        self._limit, self._limit_reason = limit, limit_reason
        own = () if request.ignore_eos else frontend.stop_token_ids
        self._stop_ids = frozenset((*own, *request.stop_token_ids))
        self._decoder = frontend.stream_decoder(
            opens_reasoning=request.prompt.opens_reasoning,
            raw=request.raw,
            keep_special_tokens=request.keep_special_tokens,
        )
        self._reasoning_stops, self._content_stops = (
            StopMatcher([s for s in request.stop_strings if s.channel is channel])
            for channel in (Channel.REASONING, Channel.CONTENT)
        )
        self._has_stops = bool(request.stop_strings)
        self._closing: deque[int] = deque()
        self._shown: list[tuple[Channel, str]] = []
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.ending: Ending | None = None
        self.content_began = ""  # content that came out of the token that ended the reasoning
        self._plan_forced()

    @property
    def in_content(self) -> bool:
        """Whether the next token belongs to the content."""
        return self._decoder.channel is Channel.CONTENT

    @property
    def forced(self) -> int:
        """Token id that the next draw must take, or -1."""
        return self._closing[0] if self._closing else -1

    @property
    def free_tokens(self) -> int | None:
        """Tokens that can be drawn before one may be forced; None = any number."""
        budget = self._request.reasoning_budget
        if self._closing:
            return 0
        if budget is None or self.in_content:
            return None
        return budget - self.reasoning_tokens

    def commit(self, token_id: int, logprob: TokenLogprob | None) -> list[Delta]:
        """Take the drawn token; return what may be shown, and set `ending` when it is the last."""
        channel = self._decoder.channel
        self.completion_tokens += 1
        if token_id in self._stop_ids:
            self.reasoning_tokens += channel is Channel.REASONING
            text = self._frontend.token_text(token_id)
            return self.end(
                Ending(reason=FinishReason.STOP_TOKEN, stop=text, stop_token_id=token_id)
            )
        pieces = self._decoder.feed(token_id)
        if channel is Channel.REASONING or self._closing:
            pieces = self._reason(token_id, channel, pieces)
        if self._has_stops:
            self._take(pieces)
        else:
            self._shown += pieces
        if self.completion_tokens == self._limit and self.ending is None:
            self._flush(Ending(reason=self._limit_reason))
        logprobs = () if logprob is None else (logprob,)
        return self._deltas(channel, (token_id,), logprobs)

    def end(self, ending: Ending) -> list[Delta]:
        """End the response now; return what was held back."""
        self._flush(ending)
        return self._deltas(self._decoder.channel, (), ())

    def _reason(
        self, token_id: int, channel: Channel, pieces: list[tuple[Channel, str]]
    ) -> list[tuple[Channel, str]]:
        """Count a token of the reasoning; take the text of one that closes it out of it."""
        if self._closing:
            self._closing.popleft()
            pieces = self._hide(token_id, pieces)
        if channel is Channel.REASONING:
            self.reasoning_tokens += 1
            self.content_began = "".join(text for c, text in pieces if c is Channel.CONTENT)
        if not self._closing:
            self._plan_forced()
        return pieces

    def _plan_forced(self) -> None:
        """Queue the tokens that close the think block once its budget is spent."""
        budget = self._request.reasoning_budget
        if budget is None or self.reasoning_tokens < budget:
            return
        if self._decoder.channel is Channel.REASONING:
            self._closing.extend(self._frontend.reasoning_close_ids)

    def _hide(self, token_id: int, pieces: list[tuple[Channel, str]]) -> list[tuple[Channel, str]]:
        """Take a forced token's own text out of the reasoning; what was held back stays."""
        text = self._frontend.token_text(token_id)
        return [
            (channel, piece)
            for channel, whole in pieces
            if (piece := whole.removesuffix(text) if channel is Channel.REASONING else whole)
        ]

    def _take(self, pieces: list[tuple[Channel, str]]) -> None:
        """Pass the text of one token through the stop matchers of its channels."""
        for channel, text in pieces if len(pieces) == 1 else _by_channel(pieces).items():
            matcher = self._reasoning_stops
            if channel is Channel.CONTENT:  # reasoning is over: nothing can complete there any more
                self._show(Channel.REASONING, matcher.flush())
                matcher = self._content_stops
            self._show(channel, matcher.feed(text))
            if matcher.match is not None:
                self.ending = Ending(reason=FinishReason.STOP_STRING, stop=matcher.match.text)
                return

    def _flush(self, ending: Ending) -> None:
        """The response ends for `ending`, unless a stop string hides in the text held back."""
        self._take(self._decoder.finish())
        if self.ending is None:
            self.ending = ending
            self._show(Channel.REASONING, self._reasoning_stops.flush())
            self._show(Channel.CONTENT, self._content_stops.flush())

    def _show(self, channel: Channel, text: str) -> None:
        if text:
            self._shown.append((channel, text))

    def _deltas(
        self, channel: Channel, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> list[Delta]:
        """One delta per channel with text or token ids; the ids belong to `channel`."""
        pieces, self._shown = self._shown, []
        request_id = self._request.request_id
        if len(pieces) == 1 and pieces[0][0] is channel:
            return [Delta(request_id, channel, pieces[0][1], token_ids, logprobs)]
        if token_ids:
            pieces.append((channel, ""))
        return [
            Delta(request_id, c, text, token_ids, logprobs)
            if c is channel
            else Delta(request_id, c, text)
            for c, text in sorted(_by_channel(pieces).items(), key=_place)
        ]


def _by_channel(pieces: Iterable[tuple[Channel, str]]) -> dict[Channel, str]:
    """The text of each channel, joined."""
    joined: dict[Channel, str] = {}
    for channel, text in pieces:
        joined[channel] = joined.get(channel, "") + text
    return joined


def _place(shown: tuple[Channel, str]) -> bool:
    """Reasoning comes before content."""
    return shown[0] is Channel.CONTENT
