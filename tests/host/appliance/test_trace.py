"""What the request log tells of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from appliance.protocols.turn import CallTally
from appliance.request_log import RequestLog, RotatingFile
from appliance.trace import Trace
from ginfer.engine.request import Finished, FinishReason, Timings, Usage

if TYPE_CHECKING:
    from pathlib import Path


def test_a_finished_request_tells_its_drafts(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "log", max_nbytes=1 << 20, num_old=1, package=tmp_path / "p")
    log = RequestLog(file)
    usage = Usage(
        prompt_tokens=9,
        cached_tokens=4,
        completion_tokens=30,
        reasoning_tokens=0,
        draft_tokens=21,
        accepted_tokens=13,
    )
    with Trace(log, request_id="r", protocol="openai_chat_completions", key_name=None) as trace:
        ended = {"reason": FinishReason.STOP_TOKEN, "timings": Timings()}
        finished = Finished(request_id="r", usage=usage, **ended)
        trace.done(finished, CallTally())
    log.close()
    (line,) = map(orjson.loads, (tmp_path / "log").read_bytes().splitlines())
    assert line["event"] == "request_done"
    assert (line["result"]["draft_tokens"], line["result"]["accepted_draft_tokens"]) == (21, 13)
    assert line["result"]["completion_tokens"] == 30
