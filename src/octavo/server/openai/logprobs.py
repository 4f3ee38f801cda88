"""Log-probabilities in the two schemas of the OpenAI API, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.engine.events import TokenDetail, TopToken

_FLOOR = -9999.0  # JSON has no minus infinity


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)


def _legacy_token(token: TokenDetail | TopToken, as_ids: bool) -> str:
    """A token that is only part of a character is written as bytes, as OpenAI did: its text would be ambiguous."""
    if as_ids:
        return f"token_id:{token.token_id}"
    if "\ufffd" in token.text:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
    return token.text


def completion_logprobs(details: Sequence[TokenDetail], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """`num_top` alternatives and the chosen token; with 0, top_logprobs is null."""
    tops: list[dict[str, float] | None] = []
    for detail in details:
        if detail.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for one in detail.top[:num_top]:
            top.setdefault(_legacy_token(one, as_ids), _finite(one.logprob))
        top.setdefault(_legacy_token(detail, as_ids), _finite(detail.logprob))
        tops.append(top)
    return {
        "tokens": [_legacy_token(detail, as_ids) for detail in details],
        "token_logprobs": [None if detail.logprob is None else _finite(detail.logprob) for detail in details],
        "top_logprobs": tops if num_top else None,
        "text_offset": [detail.text_offset for detail in details],
    }


def chat_logprobs(details: Sequence[TokenDetail], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    return {
        "content": [
            {**_chat_token(detail, as_ids), "top_logprobs": [_chat_token(one, as_ids) for one in detail.top[:num_top]]}
            for detail in details
        ],
        "refusal": None,
    }


def _chat_token(token: TokenDetail | TopToken, as_ids: bool) -> dict[str, Any]:
    return {
        "token": f"token_id:{token.token_id}" if as_ids else token.text,
        "logprob": _FLOOR if token.logprob is None else _finite(token.logprob),
        "bytes": list(token.bytes),
    }


def prompt_logprobs(details: Sequence[TokenDetail], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's schema: for each prompt token, by token id, itself and its alternatives; null for the first."""
    entries: list[dict[str, Any] | None] = []
    for detail in details:
        if detail.logprob is None:
            entries.append(None)
            continue
        entry = {
            str(one.token_id): {"logprob": _finite(one.logprob), "rank": rank, "decoded_token": one.text}
            for rank, one in enumerate(detail.top[:num_top], 1)
        }
        own = {"logprob": _finite(detail.logprob), "rank": detail.rank, "decoded_token": detail.text}
        entries.append({str(detail.token_id): own, **entry})
    return entries
