"""Turns the token ids of one choice into text, logprobs with text, and the end of the choice.

The only producer of what a client reads: streaming, non-streaming and offline answers all pass here.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.batch import RequestUpdate, TokenLogprobs
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.events import ChoiceDelta, TokenDetail, TopToken
from octavo.engine.tokenizer import Tokenizer
from octavo.request import FinishReason, SamplingParams


class ChoiceOutput:
    """One choice of one request, from its first update to its end."""

    def __init__(
        self, choice: int, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        self.choice = choice
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._prompt_token_ids = prompt_token_ids
        self._sampling = sampling
        self._detokenizer = IncrementalDetokenizer(tokenizer, sampling, prompt_token_ids)
        self._num_output_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._owes_prompt_details = sampling.prompt_logprobs is not None and choice == 0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, update: RequestUpdate) -> ChoiceDelta | None:
        """The delta that `update` means; None while only the prompt's logprobs grow.

        A stop string may end the choice although the engine has not: then `is_finished` is true, and the
        caller aborts the choice in the engine.
        """
        assert not self.is_finished, "an update for a choice that has ended"
        self._prompt_logprobs += update.prompt_logprobs
        if not update.new_token_ids and update.finish_reason is None:
            return None
        piece = self._detokenizer.push(
            update.new_token_ids,
            finished=update.finish_reason is not None,
            ended_by_token=update.finish_reason == FinishReason.STOP.value,
        )
        token_ids = update.new_token_ids[: piece.num_tokens]
        details: tuple[TokenDetail, ...] = ()
        if self._sampling.logprobs is not None:
            details = tuple(
                self._detail(logprobs, offset)
                for logprobs, offset in zip(update.logprobs, piece.text_offsets, strict=False)
            )
        self._num_output_tokens += len(token_ids)
        finish_reason, stop_reason = update.finish_reason, update.stop_reason
        if piece.stop is not None:
            finish_reason, stop_reason = FinishReason.STOP.value, piece.stop
        self.finish_reason = finish_reason
        prompt_details: tuple[TokenDetail, ...] = ()
        if self._owes_prompt_details and update.error is None:
            self._owes_prompt_details = False
            prompt_details = self._prompt_details()
        return ChoiceDelta(
            self.choice,
            piece.text,
            token_ids,
            details,
            prompt_details,
            finish_reason,
            stop_reason,
            self._num_output_tokens,
            update.num_cached_tokens,
            update.error,
        )

    def abort(self) -> ChoiceDelta:
        """End the choice here, with what was held back."""
        piece = self._detokenizer.push((), finished=True)
        self.finish_reason = FinishReason.ABORT.value
        return ChoiceDelta(
            self.choice, piece.text, finish_reason=self.finish_reason, num_output_tokens=self._num_output_tokens
        )

    def _prompt_details(self) -> tuple[TokenDetail, ...]:
        """One entry per prompt token: the first has no logprob, as nothing stands before it."""
        tokenizer, token_ids = self._tokenizer, self._prompt_token_ids
        decoder = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False), ())
        offsets = decoder.push(token_ids, finished=True).text_offsets
        first = TokenDetail(
            token_ids[0], tokenizer.token_text(token_ids[0]), tokenizer.token_bytes(token_ids[0]), None, 0, 0
        )
        rest = zip(self._prompt_logprobs, offsets[1:], strict=True)
        return (first, *(self._detail(logprobs, offset) for logprobs, offset in rest))

    def _detail(self, logprobs: TokenLogprobs, text_offset: int) -> TokenDetail:
        tokenizer = self._tokenizer
        top = tuple(
            TopToken(token_id, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), logprob)
            for token_id, logprob in zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        )
        token_id = logprobs.token_id
        return TokenDetail(
            token_id,
            tokenizer.token_text(token_id),
            tokenizer.token_bytes(token_id),
            logprobs.logprob,
            logprobs.rank,
            text_offset,
            top,
        )
