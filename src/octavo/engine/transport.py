"""Where an engine runs and how its client reaches it: in a process of its own, or in a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from octavo.config import Config
from octavo.engine.channel import QueueChannel
from octavo.engine.messages import FromEngine, Loading, Ready, StartFailed, Stop, ToEngine, decode_from_engine, encode
from octavo.errors import StartError

logger = logging.getLogger(__name__)

OnMessage = Callable[[FromEngine], None]
OnExit = Callable[[str], None]  # why the engine ended, in a few words

_STOP_TIMEOUT_S = 5.0


class Transport(Protocol):
    """The client's end. Callbacks run on the client's event loop, `on_exit` exactly once a start."""

    @property
    def pid(self) -> int | None:
        """The engine's process; None where it shares the client's."""
        ...

    async def start(self, config: Config, on_message: OnMessage, on_exit: OnExit) -> None: ...

    def send(self, message: ToEngine) -> None: ...

    async def stop(self) -> None:
        """Ask the engine to end, make sure that it does, and release everything."""
        ...


class ProcessTransport:
    """An engine process, spoken to over a ZeroMQ pair on a private path."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._folder: Path | None = None
        self._runs_loop = False  # and so reads messages
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, config: Config, on_message: OnMessage, on_exit: OnExit) -> None:
        self.spawn(config)
        assert self._socket is not None and self._process is not None
        self._tasks = [
            asyncio.create_task(self._receive(self._socket, on_message)),
            asyncio.create_task(self._watch(self._process, on_exit)),
        ]

    def spawn(self, config: Config) -> None:
        """Start the process. Needs no event loop, so a command can do it before its slower imports."""
        if self._process is not None:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-"))  # mode 0700: nobody else reaches the socket
        address = f"ipc://{self._folder}/engine"
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process", address], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        data = msgspec.msgpack.encode(config)
        self._process.stdin.write(len(data).to_bytes(8, "little") + data)
        self._process.stdin.flush()  # stays open: its end tells the engine that we are gone

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def send(self, message: ToEngine) -> None:
        if self._socket is not None:
            # Sent at once; the asyncio method also looks at what the socket has received meanwhile, which its
            # edge-triggered descriptor would not tell again. A dead engine is reported by on_exit.
            sent = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK))
            sent.add_done_callback(_ignore_error)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                if self._runs_loop:
                    self.send(Stop())
                else:
                    process.kill()  # nothing is lost while it loads, and it would not hear us
                await asyncio.to_thread(_end, process)
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._runs_loop = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._remove_folder()

    def kill(self) -> None:
        """End at once, without a loop: for a command that failed before it could `stop`."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _receive(self, socket: zmq.asyncio.Socket, on_message: OnMessage) -> None:
        while True:
            data = await socket.recv()
            self._remove_folder()  # the two are connected: a process that is killed from here on leaves no file
            message = decode_from_engine(data)
            self._runs_loop = self._runs_loop or isinstance(message, Ready)
            on_message(message)

    async def _watch(self, process: subprocess.Popen[bytes], on_exit: OnExit) -> None:
        code = await asyncio.to_thread(process.wait)
        await asyncio.sleep(0.05)  # its last messages first
        on_exit(f"signal {-code}" if code < 0 else f"exit code {code}")


def _ignore_error(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning("engine process %d did not stop in %g s; killing it", process.pid, _STOP_TIMEOUT_S)
        process.kill()
        process.wait()


class ThreadTransport:
    """An engine in a thread of this process."""

    def __init__(self) -> None:
        self._channel: QueueChannel | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> None:
        return None

    async def start(self, config: Config, on_message: OnMessage, on_exit: OnExit) -> None:
        loop = asyncio.get_running_loop()

        def call(callback: Callable[..., None], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the client's loop has closed: nobody listens
                loop.call_soon_threadsafe(callback, *args)

        channel = QueueChannel(lambda message: call(on_message, message))
        self._channel = channel
        self._thread = threading.Thread(
            target=_run_engine, args=(config, channel, lambda why: call(on_exit, why)), daemon=True
        )
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        if self._channel is not None:
            self._channel.post(message)

    async def stop(self) -> None:
        if self._thread is not None:
            self.send(Stop())
            await asyncio.to_thread(self._thread.join)
            self._thread = None


def _run_engine(config: Config, channel: QueueChannel, on_exit: OnExit) -> None:
    from octavo.engine.build import build_engine
    from octavo.engine.loop import EngineLoop

    why = "stopped"
    try:
        core, info = build_engine(config, lambda phase, done, total: channel.send(Loading(phase, done, total)))
        channel.send(Ready(info))
        EngineLoop(core, channel, overlap="auto" if config.scheduler.async_scheduling else "never").run()
    except StartError as error:
        channel.send(StartFailed(str(error)))
    except BaseException as error:
        logger.exception("the engine's thread failed")
        why = f"{type(error).__name__}: {error}"
    on_exit(why)
