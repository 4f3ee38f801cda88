"""Serves the application: listens, drains on the first signal, aborts on the second.

The API process runs `serve` in its event loop beside the engine's client, which it is given and which the
caller closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn

from octavo.config import Config, ServerConfig
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError, Unavailable
from octavo.server.app import create_app
from octavo.server.protocol import bounded_protocol
from octavo.server.service import Service

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 65  # above the 60 s after which common proxies close an idle connection
_LAST_WORDS_S = 2.0  # for the error events of aborted requests to be written
_LAST_CONNECTIONS_S = 3  # for clients that do not read their answers
_BACKLOG = 2048

EXIT_DRAINED = 0
EXIT_ABORTED = 1


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The loop that the server is measured with: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def serve(
    client: EngineClient,
    config: Config,
    *,
    on_listening: Callable[[str], None] | None = None,
    handles_signals: bool = True,
) -> int:
    """Serve until the first SIGTERM or SIGINT, then drain; returns the exit code of the process.

    `on_listening` is told the URL as soon as connections are taken, which is before the engine is ready. After
    the first signal new requests get 503, /ready is false, and running ones may finish within the drain timeout;
    what is left then, or at a second signal, ends with an error event. Raises ConfigError when the address or
    the certificate cannot be used. Cancel it to stop at once.
    """
    server = HttpServer(client, config)
    # What is loaded now stays. Collections that a large body sets off would hold up every stream.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with _signals_to(server.shut_down) if handles_signals else contextlib.nullcontext():
        return await server.run(on_listening)


class HttpServer:
    """One run of the server. `shut_down` may be called from the loop at any time: once to drain, again to abort."""

    def __init__(self, client: EngineClient, config: Config) -> None:
        self._client = client
        self._config = config.server
        app = create_app(client, config)
        self._service: Service = app.state.service
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=bounded_protocol(self._config.max_header_bytes, self._config.body_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_CONNECTIONS_S,
                ssl_context_factory=(lambda *_: tls) if (tls := tls_context(self._config)) else None,
            )
        )
        self._drain: asyncio.Task[None] | None = None
        self._abort = asyncio.Event()

    async def run(self, on_listening: Callable[[str], None] | None = None) -> int:
        listener = listening_socket(self._config)
        host, port = listener.getsockname()[:2]
        scheme = "https" if self._config.ssl_certfile else "http"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        serving = asyncio.create_task(self._uvicorn.serve([listener]))
        try:
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(0.005)
            if on_listening is not None and not serving.done():
                on_listening(url)
            await serving
        finally:
            tasks = [serving] if self._drain is None else [serving, self._drain]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            listener.close()
        return EXIT_ABORTED if self._abort.is_set() else EXIT_DRAINED

    def shut_down(self) -> None:
        if self._drain is None:
            logger.info(
                "shutting down: running requests have %g s to finish (--drain-timeout-s); a second signal ends them",
                self._config.drain_timeout_s,
            )
            self._drain = asyncio.create_task(self._drain_and_stop())
        else:
            self._abort.set()

    async def _drain_and_stop(self) -> None:
        service, timeout_s = self._service, self._config.drain_timeout_s
        service.is_draining = True
        # The engine is given longer than the requests, so that it is here that their end is told to the clients.
        engine = asyncio.create_task(self._client.drain(timeout_s + _LAST_WORDS_S))
        aborted = asyncio.create_task(self._abort.wait())
        idle = asyncio.create_task(service.wait_idle(timeout_s))
        await asyncio.wait((aborted, idle), return_when=asyncio.FIRST_COMPLETED)
        if service.num_live:
            logger.warning("aborting %d requests that are still running", service.num_live)
            service.fail_all(
                Unavailable("The server is shutting down and cannot finish this request.", code="shutting_down")
            )
            await service.wait_idle(_LAST_WORDS_S)
        self._uvicorn.should_exit = True
        for task in (engine, aborted, idle):
            task.cancel()
        await asyncio.gather(engine, aborted, idle, return_exceptions=True)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are handled above: the first one drains


def listening_socket(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address. Raises ConfigError naming what stands against it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}. Choose another --host or --port "
            "(0 takes a free port)."
        ) from error
    listener.setblocking(False)
    return listener


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None without a certificate. With CA certificates, clients must present one that chains to them."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None or config.ssl_ca_certs is not None:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile.")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the TLS files cannot be used ({error}): --ssl-certfile {config.ssl_certfile}, --ssl-keyfile "
            f"{config.ssl_keyfile}, --ssl-ca-certs {config.ssl_ca_certs}."
        ) from error
    return context


@contextlib.contextmanager
def _signals_to(action: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, action)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
