"""Routes about the server itself: health, readiness, version, metrics, load, cache, single requests."""

from __future__ import annotations

import asyncio
import importlib

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.errors import NotFound
from octavo.server.service import Service
from octavo.server.wire import JsonResponse

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")


async def health(request: Request, service: Service) -> Response:
    """200 while the engine can answer, draining included. Open to everybody: a guarded server tells no reason."""
    state = service.client.state
    body = {"state": state}
    if state != "ready" and not service.config.server.api_key:
        body["reason"] = service.client.state_reason
    return JsonResponse(body, status_code=200 if state in ("ready", "draining") else 503)


async def ready(request: Request, service: Service) -> Response:
    """200 while new requests are taken: what a load balancer asks."""
    is_ready = service.client.state == "ready" and not service.is_draining
    return JsonResponse({"ready": is_ready}, status_code=200 if is_ready else 503)


async def ping(request: Request, service: Service) -> Response:
    return await health(request, service)


async def version(request: Request, service: Service) -> Response:
    return JsonResponse({"version": octavo.__version__})


async def metrics(request: Request, service: Service) -> Response:
    # The first scrape imports a library, which would hold up every stream.
    await asyncio.to_thread(importlib.import_module, "prometheus_client")
    return Response(service.client.metrics.render(), media_type="text/plain; version=0.0.4")


async def load(request: Request, service: Service) -> Response:
    return JsonResponse({"server_load": service.num_live, "queued": service.client.num_queued})


async def reset_prefix_cache(request: Request, service: Service) -> Response:
    """Forget every cached prefix; false when running requests still hold some, which then stay."""
    return JsonResponse({"reset": await service.client.reset_prefix_cache()})


async def request_timeline(request: Request, service: Service) -> Response:
    request_id = _engine_id(request.path_params["request_id"])
    timeline = service.client.timeline(request_id)
    if timeline is None:
        raise NotFound(f"No request {request_id[:80]!r} is running or among the latest (--served-requests-kept).")
    return JsonResponse(timeline)


async def abort_request(request: Request, service: Service) -> Response:
    """End a running request; its client gets what there is, with finish_reason 'abort'."""
    request_id = _engine_id(request.path_params["request_id"])
    # Of several prompts each is a request of its own, named ID.0, ID.1 ...
    names = [request_id, *(f"{request_id}.{index}" for index in range(service.config.server.max_prompts))]
    if not any([await service.client.abort(name) for name in names]):
        raise NotFound(f"No request {request_id[:80]!r} is running.")
    return JsonResponse({"id": request_id, "aborted": True})


def _engine_id(answer_id: str) -> str:
    """The engine's name of a request, given the id of its answer."""
    for prefix in _ANSWER_PREFIXES:
        if answer_id.startswith(prefix):
            return answer_id.removeprefix(prefix)
    return answer_id
