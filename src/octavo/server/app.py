"""Puts the application together: routes, who may call them, and how errors look."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from octavo.config import Config
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError, NotFound, RequestError
from octavo.server import admin
from octavo.server.describe import docs_page, openapi_document
from octavo.server.failure import MethodNotAllowed, error_response
from octavo.server.middleware import ApiKeyGuard, RequestContext
from octavo.server.openai.chat import create_chat_completion
from octavo.server.openai.completions import create_completion
from octavo.server.openai.fields import WARNINGS_HEADER
from octavo.server.openai.models import get_model, list_models
from octavo.server.openai.schema import ChatBody, CompletionBody, DetokenizeBody, Strict, TokenizeBody
from octavo.server.openai.tokenize import detokenize, tokenize
from octavo.server.service import Service
from octavo.server.wire import JsonResponse

Endpoint = Callable[[Request, Service], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ApiRoute:
    method: str
    path: str
    endpoint: Endpoint
    body: type[Strict] | None = None

    def bound_to(self, service: Service) -> Route:
        async def handle(request: Request) -> Response:
            return await self.endpoint(request, service)

        return Route(self.path, handle, methods=[self.method])


async def openapi(request: Request, service: Service) -> Response:
    """This API for programs, as an OpenAPI document."""
    return JsonResponse(openapi_document(ROUTES))


async def docs(request: Request, service: Service) -> Response:
    """This API for people."""
    return HTMLResponse(docs_page(openapi_document(ROUTES)))


ROUTES = (
    ApiRoute("POST", "/v1/completions", create_completion, CompletionBody),
    ApiRoute("POST", "/v1/chat/completions", create_chat_completion, ChatBody),
    ApiRoute("GET", "/v1/models", list_models),
    ApiRoute("GET", "/v1/models/{model_id:path}", get_model),
    ApiRoute("POST", "/tokenize", tokenize, TokenizeBody),
    ApiRoute("POST", "/detokenize", detokenize, DetokenizeBody),
    ApiRoute("GET", "/v1/requests/{request_id}", admin.request_timeline),
    ApiRoute("POST", "/v1/requests/{request_id}/abort", admin.abort_request),
    ApiRoute("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
    ApiRoute("GET", "/health", admin.health),
    ApiRoute("GET", "/ready", admin.ready),
    ApiRoute("GET", "/ping", admin.ping),
    ApiRoute("GET", "/version", admin.version),
    ApiRoute("GET", "/metrics", admin.metrics),
    ApiRoute("GET", "/load", admin.load),
    ApiRoute("GET", "/openapi.json", openapi),
    ApiRoute("GET", "/docs", docs),
)


def create_app(client: EngineClient, config: Config) -> Starlette:
    """The application; `app.state.service` is its Service. It starts and stops nothing: see `run.serve`.

    Plain Starlette: FastAPI's own parsing would not be used, and its import takes longer than all of ours.
    """
    if not all(config.server.api_key):
        raise ConfigError("an API key is empty: anybody could send it. Set --api-key to a secret, or leave it out.")
    service = Service(client, config)
    middleware = [Middleware(RequestContext)]
    if config.server.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.server.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After", WARNINGS_HEADER],
            )
        )
    if config.server.api_key:
        middleware.append(Middleware(ApiKeyGuard, keys=config.server.api_key))
    app = Starlette(
        routes=[route.bound_to(service) for route in ROUTES],
        middleware=middleware,
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http_exception},
    )
    app.router.redirect_slashes = False
    app.state.service = service
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
