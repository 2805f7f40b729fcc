"""The summary of an answer: counts, speed, and what became of drafts."""

from appliance.cli.answer import Answer
from ginfer.engine.request import Finished, FinishReason, Timings, Usage


def summary(**usage):
    answer = Answer(None)
    answer.finished = Finished(
        request_id="r",
        reason=FinishReason.STOP_TOKEN,
        usage=Usage(prompt_tokens=30, cached_tokens=0, reasoning_tokens=0, **usage),
        timings=Timings(decode_s=2.0, first_token_s=0.5),
    )
    return answer.summary()


def test_tokens_of_a_round_stand_beside_the_speed():
    drafted = summary(completion_tokens=41, draft_tokens=50, accepted_tokens=24)
    assert "20.0 tokens/s, 2.50 tokens a round, 24 of 50 drafts accepted" in drafted
    assert "round" not in summary(completion_tokens=41)


def test_an_answer_that_a_stop_cut_inside_its_drafts_has_a_summary_too():
    assert "4.00 tokens a round" in summary(completion_tokens=5, draft_tokens=7, accepted_tokens=7)
