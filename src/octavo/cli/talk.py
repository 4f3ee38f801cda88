"""Who answers in `octavo chat`: the interface, and a server as one of them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from octavo.config import read_environment
from octavo.errors import ConfigError, RequestError, RequestFailed, Unavailable

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says about sampling; None leaves it to the model."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None

    def given(self) -> dict[str, Any]:
        values = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""


class Talker(Protocol):
    model: str
    usage: Usage  # of the latest answer

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """The answer in pieces as they come. Closing the iterator stops it. Raises RequestError."""
        ...

    def close(self) -> None: ...


class ServerTalker:
    """A server with the OpenAI API, over one connection for each answer."""

    def __init__(self, url: str, model: str | None, api_key: str | None, settings: Settings) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url}; it must be like http://127.0.0.1:8000.")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = url
        keys = (api_key,) if api_key is not None else read_environment()[0].get("api_key", ())
        self._headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self._settings = settings
        self.usage = Usage()
        self.model = model if model is not None else self._first_model()

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        self.usage = Usage()
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings.given(),
        }
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", "/chat/completions", body)
            try:
                yield from self._texts(response)
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"the connection to {self._url} broke: {error or type(error).__name__}.") from None

    def close(self) -> None:
        pass

    def _texts(self, response: http.client.HTTPResponse) -> Iterator[str]:
        for line in response:
            name, _, data = line.decode().rstrip("\r\n").partition(": ")
            if name != "data":
                continue
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(str(event["error"].get("message", event["error"])))
            self._note_usage(event.get("usage") or {})
            for choice in event.get("choices", ()):
                self.usage.finish_reason = choice.get("finish_reason") or ""
                if text := choice["delta"].get("content"):
                    yield text
        raise Unavailable(f"{self._url} ended the answer before it was complete.")

    def _note_usage(self, usage: dict[str, Any]) -> None:
        if usage:
            self.usage.prompt_tokens = usage.get("prompt_tokens", 0)
            self.usage.output_tokens = usage.get("completion_tokens", 0)
            self.usage.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def _first_model(self) -> str:
        with closing(self._connect()) as connection:
            models = json.load(self._request(connection, "GET", "/models", None))["data"]
        if not models:
            raise ConfigError(f"{self._url} serves no model.")
        return str(models[0]["id"])

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: object
    ) -> http.client.HTTPResponse:
        """The response to a request, which was successful. Raises RequestError otherwise."""
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            connection.request(method, self._path + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status == http.HTTPStatus.OK:
                return response
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._url} cannot be reached: {error or type(error).__name__}.") from None
        try:
            why = json.loads(answer)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            why = answer.decode("utf-8", "replace")[:200]
        raise RequestError(f"{self._url} answered {response.status}: {why}")
