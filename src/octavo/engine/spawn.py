"""Starts the engine process. Imports little, so that a command does it before its slower imports."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from octavo.config import Config

_BUFFER_BYTES = 4 * 1024 * 1024  # the kernel may grant less


@dataclass(frozen=True, slots=True, eq=False)
class EngineProcess:
    """An engine that loads, and our end of the socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def kill(self) -> None:
        """End it at once and release everything."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.close()

    def close(self) -> None:
        self.socket.close()
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()


def spawn_engine(config: Config) -> EngineProcess:
    """Start `python -m octavo.engine.process`, which reads `config` from its standard input."""
    ours, theirs = socket.socketpair()
    try:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    engine = EngineProcess(process, ours)
    assert process.stdin is not None
    data = msgspec.msgpack.encode(config)
    try:
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()  # stays open: its end tells the engine that we are gone
    except BrokenPipeError:  # it has ended already; who watches it will be told
        pass
    except BaseException:
        engine.kill()
        raise
    return engine
