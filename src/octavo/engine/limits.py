"""Checks of a request that need the model: its context, its vocabulary. Every entrance calls this one."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.events import EngineInfo
from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.request import SamplingParams


def check_limits(
    prompt_token_ids: Sequence[int], sampling: SamplingParams, info: EngineInfo, *, param: str = "prompt"
) -> None:
    """Raise InvalidRequest when `info`'s model cannot serve this prompt with these parameters.

    `param` is the field that the prompt came in.
    """
    num_prompt_tokens, limit = len(prompt_token_ids), info.max_model_len
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{param} has no tokens; it must have at least one.", param=param)
    scores_only = sampling.max_tokens == 0
    if num_prompt_tokens > limit or (num_prompt_tokens == limit and not scores_only):
        raise ContextLengthExceeded(
            f"{param} has {num_prompt_tokens} tokens and the context is {limit}: no room is left for an answer. "
            "Shorten it.",
            param=param,
        )
    if sampling.max_tokens is not None and num_prompt_tokens + sampling.max_tokens > limit:
        raise ContextLengthExceeded(
            f"{param} has {num_prompt_tokens} tokens and max_tokens is {sampling.max_tokens}, together "
            f"{num_prompt_tokens + sampling.max_tokens}; the context is {limit}. Shorten the prompt, or lower "
            f"max_tokens to {limit - num_prompt_tokens} or leave it out.",
            param="max_tokens",
        )
    if sampling.min_tokens > limit - num_prompt_tokens:
        raise ContextLengthExceeded(
            f"min_tokens is {sampling.min_tokens}, but {param} leaves room for {limit - num_prompt_tokens}.",
            param="min_tokens",
        )
    worst = max(prompt_token_ids)
    if min(prompt_token_ids) < 0 or worst >= info.vocab_size:
        worst = min(prompt_token_ids) if worst < info.vocab_size else worst
        raise InvalidRequest(f"{param} holds token id {worst}; ids are 0 to {info.vocab_size - 1}.", param=param)
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        ids = getattr(sampling, name) or ()
        if len(ids) > info.vocab_size:
            raise InvalidRequest(
                f"{name} has {len(ids)} entries; the model has {info.vocab_size} tokens. Send each id once.", param=name
            )
        if ids and max(ids) >= info.vocab_size:
            raise InvalidRequest(f"{name} holds token id {max(ids)}; ids are 0 to {info.vocab_size - 1}.", param=name)
