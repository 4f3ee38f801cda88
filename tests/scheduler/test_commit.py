"""What ends a request, and what its client is told."""

from __future__ import annotations

import pytest
from tests.scheduler.harness import EOS, FILLER, Harness

from octavo.batch import StepOutput
from octavo.request import FinishReason


def ending(script: list[int], max_tokens: int = 8, **fields: object) -> tuple[list[int], str | None, object]:
    h = Harness()
    request = h.add(5, max_tokens, **fields)
    h.script[request.request_id] = script
    h.run()
    update = h.last_update(request)
    return h.output(request), update.finish_reason, update.stop_reason


def test_eos_ends_with_stop_and_belongs_to_the_output() -> None:
    assert ending([7, EOS, 8]) == ([7, EOS], "stop", None)


def test_ignore_eos_goes_on() -> None:
    assert ending([7, EOS, 8], 3, ignore_eos=True) == ([7, EOS, 8], "length", None)


def test_a_stop_token_names_itself() -> None:
    assert ending([7, 8, 9], stop_token_ids=(8,)) == ([7, 8], "stop", 8)
    assert ending([7, 8, 9], stop_token_ids=(8,), ignore_eos=True) == ([7, 8], "stop", 8)
    assert ending([EOS], stop_token_ids=(EOS,)) == ([EOS], "stop", None)


def test_max_tokens_ends_with_length_whatever_the_last_token_is() -> None:
    assert ending([7] * 9, 3) == ([7, 7, 7], "length", None)
    assert ending([7, 7, EOS], 3) == ([7, 7, EOS], "length", None)


def test_nothing_stops_before_min_tokens() -> None:
    assert ending([EOS, 8, EOS, 9], min_tokens=3, stop_token_ids=(8,)) == ([EOS, 8, EOS], "stop", None)


def test_the_context_ends_every_request() -> None:  # ATT-10
    h = Harness(max_model_len=16)
    request = h.add(10, 6)
    h.run()
    assert len(request.token_ids) == 16 and h.last_update(request).finish_reason == "length"
    assert h.scheduled(request)[-1] == (14, 1), "the KV of the last token is never needed"


def test_scoring_ends_with_the_prompt_and_samples_nothing() -> None:  # API-03
    h = Harness(max_num_batched_tokens=4)
    request = h.add(10, 0, prompt_logprobs=0)
    h.run()
    assert h.output(request) == [] and request.finish_reason is FinishReason.LENGTH
    assert not any(part.samples for batch in h.batches for part in batch.requests)
    assert sum(len(update.prompt_logprobs) for update in h.updates) == 9
    assert [update.finish_reason for update in h.updates] == [None, None, "length"]


def test_updates_fold_to_the_whole_answer() -> None:
    h = Harness(max_num_batched_tokens=4)
    request = h.add(9, 5, logprobs=0)
    h.run()
    assert len(h.updates) == 5, "a chunk without a token says nothing"
    assert all(len(update.new_token_ids) == len(update.logprobs) == 1 for update in h.updates)
    assert [update.finish_reason for update in h.updates] == [None] * 4 + ["length"]
    assert request.token_ids[9:] == h.output(request)


def test_one_failure_ends_one_request() -> None:  # ATT-11
    h = Harness()
    bad, good = h.add(5, 4), h.add(5, 4)
    h.step()
    h.failing[bad.request_id] = "non-finite logits"
    h.run()
    update = h.last_update(bad)
    assert (update.finish_reason, update.error, update.new_token_ids) == ("error", "non-finite logits", ())
    assert h.output(bad) == [FILLER] and h.output(good) == [FILLER] * 4
    assert h.last_update(good).error is None
    assert h.pool.num_free == h.pool.num_blocks


def test_a_stop_that_only_the_caller_sees_ends_the_request() -> None:
    h = Harness()
    request = h.add(5, 50)
    h.step()
    update = h.scheduler.finish(request.request_id, FinishReason.STOP, "###")
    assert update is not None and (update.finish_reason, update.stop_reason) == ("stop", "###")
    assert h.scheduler.finish(request.request_id, FinishReason.STOP) is None
    assert not h.scheduler.has_work and h.pool.num_free == h.pool.num_blocks


def test_steps_commit_in_order() -> None:
    h = Harness()
    h.add(5, 4)
    first = h.scheduler.plan()
    second = h.scheduler.plan()
    assert first is not None and second is not None
    with pytest.raises(AssertionError, match="commit in order"):
        h.scheduler.commit(second, StepOutput(second.step_id))


# -- aborts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 6])
def test_an_abort_frees_everything_at_once_wherever_it_strikes(num_steps: int, depth: int) -> None:  # SCH-02
    h = Harness(max_num_batched_tokens=4)
    request, other = h.add(10, 20), h.add(3, 20)
    for _ in range(num_steps):
        h.plan()
        if len(h.planned) > depth:
            h.commit()
    h.scheduler.abort(other.request_id)
    update = h.scheduler.abort(request.request_id)
    assert update is not None and update.finish_reason == "abort"
    assert h.scheduler.num_running == h.scheduler.num_waiting == 0 and h.scheduler.kv_usage == 0
    h.scheduler.check()
    while h.planned:
        assert h.commit() == [], "its output is nobody's"
    assert h.pool.num_free == h.pool.num_blocks
    survivor = h.add(10, 3)
    h.run()
    assert h.output(survivor) == [FILLER] * 3
    assert set(h.rows) == {survivor.request_id}, "the rows of the aborted are freed"


def test_an_unknown_id_is_no_abort() -> None:
    assert Harness().scheduler.abort(12345) is None


# -- drafts ------------------------------------------------------------------------------------------------


def test_accepted_drafts_and_the_token_behind_them_are_one_update() -> None:
    h = Harness()
    request = h.add(5, 20)
    h.script[request.request_id] = [11, 12, 13, 14, 15]
    h.step()
    assert h.scheduler.set_drafts(request.request_id, [12, 13, 99]) == 3
    batch = h.step()
    part = batch.requests[0]
    assert (part.start, part.num_tokens, part.draft_token_ids) == (5, 4, (12, 13, 99))
    assert h.last_update(request).new_token_ids == (12, 13, 14)
    assert request.num_computed_tokens == 8, "the rejected draft's KV does not count"
    h.step()
    assert h.scheduled(request)[-1] == (8, 1)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("kind", ["eos", "stop", "length"])
def test_an_end_inside_accepted_drafts_drops_what_stands_behind_it(kind: str, position: int) -> None:  # SPC-01
    text = [11, 12, 13, 14, 15, 16, 17, 18]
    if kind == "eos":
        text[position] = EOS
    max_tokens = position + 1 if kind == "length" else 20
    stop = (text[position],) if kind == "stop" else ()

    def answer(drafts: int) -> tuple[list[int], str | None, object]:
        h = Harness()
        request = h.add(5, max_tokens, stop_token_ids=stop)
        h.script[request.request_id] = text
        while h.scheduler.has_work:
            h.scheduler.set_drafts(request.request_id, text[request.num_output_tokens :][:drafts])
            h.step()
        update = h.last_update(request)
        assert h.scheduler.num_accepted_tokens <= h.scheduler.num_draft_tokens
        assert len(h.output(request)) == sum(b.requests[0].samples for b in h.batches) + h.scheduler.num_accepted_tokens
        return h.output(request), update.finish_reason, update.stop_reason

    expected = answer(0)
    assert len(expected[0]) == position + 1
    assert [answer(k) for k in (1, 2, 5, 8)] == [expected] * 4  # SPC-03: emitted == steps + accepted, every time


def test_useless_drafts_are_counted_as_such() -> None:  # SPC-03
    h = Harness()
    request = h.add(5, 6)
    while h.scheduler.has_work:
        h.scheduler.set_drafts(request.request_id, [1, 1, 1])
        h.step()
    assert h.scheduler.num_accepted_tokens == 0 < h.scheduler.num_draft_tokens


def test_drafts_never_reach_beyond_max_tokens() -> None:
    h = Harness()
    request = h.add(5, 4)
    h.step()
    assert h.scheduler.set_drafts(request.request_id, [FILLER] * 9) == 2, "two drafts and the token behind them"
    h.step()
    assert h.output(request) == [FILLER] * 4


def test_drafts_wait_for_the_previous_commit() -> None:
    h = Harness()
    request = h.add(5, 20)
    assert h.scheduler.set_drafts(request.request_id, [1]) == 0, "it does not run yet"
    h.plan()
    assert h.scheduler.set_drafts(request.request_id, [1]) == 0, "a step is in flight"
    h.commit()
    assert h.scheduler.set_drafts(request.request_id, [1]) == 1
    h.plan()
    assert h.plan() is None, "how many tokens the drafts yield is not known yet"
    h.commit()
    assert h.plan() is not None


def test_drafts_are_given_up_before_anybody_gives_way() -> None:
    h = Harness(num_blocks=5)
    first, second = h.add(7, 10), h.add(4, 5)
    for _ in range(3):
        h.step()
    assert h.pool.num_free == 0
    assert h.scheduler.set_drafts(first.request_id, [1, 1, 1]) == 3, "they would need a block"
    h.step()
    assert h.scheduled(first)[-1] == (9, 1) and h.scheduler.num_draft_tokens == 0
    assert second.num_preemptions == 0 and h.scheduled(second)[-1] == (6, 1)
