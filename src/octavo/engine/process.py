"""The engine process: `python -m octavo.engine.process FD`, its end of a socket pair, its config on standard input.

It ends when its client says stop, or when standard input closes: a server that dies leaves no orphan.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time

import msgspec

from octavo.config import Config
from octavo.engine.channel import SocketChannel
from octavo.engine.messages import Loading, Ready, StartFailed
from octavo.engine.startup import StartupClock
from octavo.errors import StartError

_PROGRESS_INTERVAL_S = 0.1


def main() -> int:
    clock = StartupClock("interpreter, first imports")
    # Ctrl-C reaches the whole foreground group; the server decides when its engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    config = msgspec.msgpack.decode(_read_frame(), type=Config)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    channel = SocketChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        return _serve(config, channel, clock)
    finally:
        channel.close()


def _serve(config: Config, channel: SocketChannel, clock: StartupClock) -> int:
    clock.begin("imports")
    from octavo.engine.build import build_engine
    from octavo.engine.loop import EngineLoop, StoppedWhileStarting, receive_vocabulary

    last_report = 0.0

    def report(phase: str, done: int, total: int) -> None:
        nonlocal last_report
        clock.begin(phase)
        now = time.monotonic()
        if done >= total or now - last_report > _PROGRESS_INTERVAL_S:
            last_report = now
            channel.send(Loading(phase, done, total))

    try:
        core, info = build_engine(config, report, lambda: receive_vocabulary(channel))
    except StoppedWhileStarting:
        return 0
    except StartError as error:
        channel.send(StartFailed(str(error)))
        return 2
    clock.begin("serving")
    channel.send(Ready(info, clock.phases()))
    EngineLoop(core, channel, overlap="auto" if config.scheduler.async_scheduling else "never").run()
    return 0


def _read_frame() -> bytes:
    """A length in eight bytes, then that many bytes; what follows is only ever the end of the stream."""
    return _read_exactly(int.from_bytes(_read_exactly(8), "little"))


def _read_exactly(size: int) -> bytes:
    # os.read, not sys.stdin: a thread that waits inside a buffered reader would break the interpreter's exit.
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise EOFError("standard input closed before the config had arrived")
        data += part
    return data


def _exit_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
