"""Messages on a stream socket between an engine and its client: a length in four bytes, then that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are whole with `data`; all of them must be taken before the next call."""
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        while end - start >= _LENGTH.size:
            stop = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
            if stop > end:
                break
            yield bytes(buffer[start + _LENGTH.size : stop])
            start = stop
        del buffer[:start]
