"""Where an engine runs and how its client reaches it: in a process of its own, or in a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

from octavo.config import Config
from octavo.engine.channel import QueueChannel
from octavo.engine.framing import FrameReader, framed
from octavo.engine.messages import FromEngine, Loading, Ready, StartFailed, Stop, ToEngine, decode_from_engine, encode
from octavo.engine.spawn import EngineProcess, spawn_engine
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
    """An engine process, spoken to over a socket pair. `spawned`: one that has been started for it already."""

    def __init__(self, spawned: EngineProcess | None = None) -> None:
        self._engine = spawned
        self._connection: asyncio.Transport | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._runs_loop = False  # and so reads messages

    async def start(self, config: Config, on_message: OnMessage, on_exit: OnExit) -> None:
        engine = self._engine = self._engine or spawn_engine(config)

        def deliver(message: FromEngine) -> None:
            self._runs_loop = self._runs_loop or isinstance(message, Ready)
            on_message(message)

        loop = asyncio.get_running_loop()
        self._connection, _ = await loop.create_unix_connection(lambda: _Receiver(deliver), sock=engine.socket)
        self._watcher = asyncio.create_task(self._watch(engine.process, on_exit))

    @property
    def pid(self) -> int | None:
        return None if self._engine is None else self._engine.process.pid

    def send(self, message: ToEngine) -> None:
        data = framed(encode(message))
        if self._connection is not None and not self._connection.is_closing():
            self._connection.write(data)  # a dead engine is reported by on_exit

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.process.poll() is None:
            if self._runs_loop:
                self.send(Stop())
            else:
                engine.process.kill()  # nothing is lost while it loads, and it would not hear us
            await asyncio.to_thread(_end, engine.process)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort()
        engine.close()
        self._connection = self._watcher = None
        self._runs_loop = False

    def kill(self) -> None:
        """End at once, without a loop: for a command that failed before it could `stop`."""
        if self._engine is not None:
            self._engine.kill()
            self._engine = None

    async def _watch(self, process: subprocess.Popen[bytes], on_exit: OnExit) -> None:
        code = await asyncio.to_thread(process.wait)
        await asyncio.sleep(0.05)  # its last messages first
        on_exit(f"signal {-code}" if code < 0 else f"exit code {code}")


class _Receiver(asyncio.Protocol):
    def __init__(self, deliver: OnMessage) -> None:
        self._deliver = deliver
        self._frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._deliver(decode_from_engine(frame))


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
    from octavo.engine.loop import EngineLoop, StoppedWhileStarting, receive_vocabulary

    why = "stopped"
    try:
        core, info = build_engine(
            config,
            lambda phase, done, total: channel.send(Loading(phase, done, total)),
            lambda: receive_vocabulary(channel),
        )
        channel.send(Ready(info))
        EngineLoop(core, channel, overlap="auto" if config.scheduler.async_scheduling else "never").run()
    except StoppedWhileStarting:
        pass
    except StartError as error:
        channel.send(StartFailed(str(error)))
    except BaseException as error:
        logger.exception("the engine's thread failed")
        why = f"{type(error).__name__}: {error}"
    on_exit(why)
