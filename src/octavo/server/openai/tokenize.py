"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.openai.fields import check_extra, parse_body, warning_headers
from octavo.server.openai.messages import render_messages
from octavo.server.openai.schema import DetokenizeBody, TokenizeBody
from octavo.server.service import INLINE_CHARS, Service
from octavo.server.wire import JsonResponse


async def tokenize(request: Request, service: Service) -> Response:
    info = service.client.info
    body = parse_body(TokenizeBody, await service.read(request))
    ignored = check_extra(body, strict=service.config.server.strict_api)
    service.served_model(body.model, info)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    if body.prompt is not None:
        text, adds_special_tokens = body.prompt, body.add_special_tokens is not False
    else:
        text = await render_messages(body, request, service, ignored)
        adds_special_tokens = body.add_special_tokens is True
    [token_ids] = await service.encode([text], add_special_tokens=adds_special_tokens, max_tokens=None, param="prompt")
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids}
    if body.return_token_strs:
        tokenizer = service.client.tokenizer
        answer["token_strs"] = [tokenizer.token_text(token_id) for token_id in token_ids]
    return JsonResponse(answer, headers=warning_headers(ignored))


async def detokenize(request: Request, service: Service) -> Response:
    info = service.client.info
    body = parse_body(DetokenizeBody, await service.read(request))
    ignored = check_extra(body, strict=service.config.server.strict_api)
    service.served_model(body.model, info)
    token_ids, tokenizer = body.tokens, service.client.tokenizer
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < info.vocab_size:
        worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise InvalidRequest(f"tokens holds {worst}; ids are 0 to {info.vocab_size - 1}.", param="tokens")
    skips = body.skip_special_tokens is True
    text = await service.compute(
        lambda: tokenizer.decode(token_ids, skip_special_tokens=skips), is_large=len(token_ids) > INLINE_CHARS
    )
    return JsonResponse({"prompt": text}, headers=warning_headers(ignored))
