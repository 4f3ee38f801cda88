"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.events import EngineInfo
from octavo.server.service import Service
from octavo.server.wire import JsonResponse


async def list_models(request: Request, service: Service) -> Response:
    info = service.client.info
    return JsonResponse({"object": "list", "data": [_card(name, info) for name in info.served_model_names]})


async def get_model(request: Request, service: Service) -> Response:
    info = service.client.info
    return JsonResponse(_card(service.served_model(request.path_params["model_id"], info), info))


def _card(name: str, info: EngineInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "octavo",
        "root": info.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }
