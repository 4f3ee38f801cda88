"""Messages over a socket: whole frames however they are cut, and a client that goes away."""

from __future__ import annotations

import random
import socket

import pytest

from octavo.engine.channel import SocketChannel
from octavo.engine.framing import FrameReader, framed
from octavo.engine.messages import AbortRequests, Reply, Stop, Vocabulary, decode_from_engine, encode


@pytest.mark.parametrize("most", [1, 3, 7, 1000, 10**6])
def test_frames_come_whole_however_the_bytes_are_cut(most: int) -> None:
    rng = random.Random(most)
    sent = [rng.randbytes(rng.choice((0, 1, 5, 300, 70_000 if most > 100 else 50))) for _ in range(40)]
    data = b"".join(map(framed, sent))
    reader, received = FrameReader(), []
    while data:
        size = rng.randint(1, most)
        received += reader.feed(data[:size])
        data = data[size:]
    assert received == sent


def test_a_channel_takes_what_has_come_and_waits_only_when_asked() -> None:
    client, end = socket.socketpair()
    channel = SocketChannel(end)
    assert channel.receive(wait=False) == []
    messages = [Vocabulary(9, (1,)), AbortRequests(tuple(range(50_000)))]
    client.sendall(framed(encode(messages[0])) + framed(encode(messages[1]))[:100])
    assert channel.receive(wait=True) == messages[:1]
    client.sendall(framed(encode(messages[1]))[100:])
    received: list[object] = []
    while not received:
        received += channel.receive(wait=True)
    assert received == messages[1:]
    channel.send(Reply(3, True))
    reader = FrameReader()
    assert [decode_from_engine(frame) for frame in reader.feed(client.recv(4096))] == [Reply(3, True)]
    client.close()
    channel.close()


def test_a_client_that_has_gone_is_one_that_said_stop() -> None:
    client, end = socket.socketpair()
    channel = SocketChannel(end)
    client.sendall(framed(encode(Vocabulary(9, ()))))
    client.close()
    channel.send(Reply(1, True))
    assert channel.receive(wait=True)[-1] == Stop()
    assert channel.receive(wait=False) == [Stop()]
    channel.close()
