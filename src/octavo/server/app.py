"""Puts the application together: routes, who may call them, and how errors look."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import octavo
from octavo.config import Config
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError, NotFound, RequestError
from octavo.server import admin
from octavo.server.failure import MethodNotAllowed, error_response
from octavo.server.middleware import ApiKeyGuard, RequestContext
from octavo.server.openai.chat import create_chat_completion
from octavo.server.openai.completions import create_completion
from octavo.server.openai.fields import WARNINGS_HEADER
from octavo.server.openai.models import get_model, list_models
from octavo.server.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.openai.tokenize import detokenize, tokenize
from octavo.server.service import Service

Endpoint = Callable[[Request, Service], Awaitable[Response]]

_BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


def create_app(client: EngineClient, config: Config) -> FastAPI:
    """The application; `app.state.service` is its Service. It starts and stops nothing: see `run.serve`."""
    if not all(config.server.api_key):
        raise ConfigError("an API key is empty: anybody could send it. Set --api-key to a secret, or leave it out.")
    app = FastAPI(
        title="Octavo",
        version=octavo.__version__,
        redirect_slashes=False,
        redoc_url=None,
        # Nothing is reported to anybody, whatever the environment says.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    service = app.state.service = Service(client, config)

    def route(method: str, path: str, endpoint: Endpoint, body: type[BaseModel] | None = None) -> None:
        async def handle(request: Request) -> Response:
            return await endpoint(request, service)

        handle.__name__, handle.__doc__ = endpoint.__name__, endpoint.__doc__
        app.add_api_route(
            path,
            handle,
            methods=[method],
            response_class=Response,
            openapi_extra=_body_reference(body) if body else None,
        )

    route("POST", "/v1/completions", create_completion, CompletionBody)
    route("POST", "/v1/chat/completions", create_chat_completion, ChatBody)
    route("GET", "/v1/models", list_models)
    route("GET", "/v1/models/{model_id:path}", get_model)
    route("POST", "/tokenize", tokenize, TokenizeBody)
    route("POST", "/detokenize", detokenize, DetokenizeBody)
    route("GET", "/v1/requests/{request_id}", admin.request_timeline)
    route("POST", "/v1/requests/{request_id}/abort", admin.abort_request)
    route("POST", "/reset_prefix_cache", admin.reset_prefix_cache)
    route("GET", "/health", admin.health)
    route("GET", "/ready", admin.ready)
    route("GET", "/ping", admin.ping)
    route("GET", "/version", admin.version)
    route("GET", "/metrics", admin.metrics)
    route("GET", "/load", admin.load)

    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    if config.server.api_key:
        app.add_middleware(ApiKeyGuard, keys=config.server.api_key)
    if config.server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.server.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", WARNINGS_HEADER],
        )
    app.add_middleware(RequestContext)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError), type(error)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown routes and wrong methods."""
    assert isinstance(error, HTTPException), type(error)
    if error.status_code == 405:
        response = error_response(MethodNotAllowed(f"{request.method} is not allowed on this route."))
        response.headers.update(error.headers or {})
        return response
    return error_response(NotFound(f"There is no route {request.method} {request.url.path[:200]}."))


def _body_reference(body: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The bodies are parsed by our own code, so FastAPI does not know their schemas: they are added here."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for body in _BODIES:
            schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[body.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema
