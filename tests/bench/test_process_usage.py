"""Whose memory and CPU time are measured, and that they are those of the processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from octavo.bench.process_usage import is_local, listeners, usage_of

MIB = 2**20

# Takes 64 MiB, works for 0.3 s, starts a child that takes 32 MiB, says that it is done, and waits.
PARENT = """
import subprocess, sys, time
filled = bytearray(b"x") * (64 << 20)
end = time.process_time() + 0.3
while time.process_time() < end: pass
child = 'import sys; filled = bytearray(b"x") * (32 << 20); print("ready", flush=True); sys.stdin.read()'
process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.communicate("")


def test_a_tree_of_processes_is_added_up() -> None:
    with running(PARENT) as process:
        usage = usage_of([process.pid])
    assert usage.num_processes == 2
    assert 96 * MIB < usage.peak_rss_bytes < 250 * MIB
    assert 96 * MIB < usage.pss_bytes <= usage.peak_rss_bytes
    assert 0.3 <= usage.cpu_s < 5


def test_memory_that_was_given_back_stays_in_the_peak() -> None:
    code = 'filled = bytearray(b"x") * (96 << 20)\ndel filled\nprint("ready", flush=True)\ninput()'
    with running(code.replace("input()", "import sys; sys.stdin.read()")) as process:
        usage = usage_of([process.pid])
    assert usage.peak_rss_bytes > 96 * MIB
    assert usage.pss_bytes < 60 * MIB


def test_cpu_time_grows_with_work() -> None:
    before = usage_of([os.getpid()]).cpu_s
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert 0.15 <= usage_of([os.getpid()]).cpu_s - before < 2


def test_a_process_that_has_ended_counts_as_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (usage_of([process.pid]).peak_rss_bytes, usage_of([process.pid]).cpu_s) == (0, 0)


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens_on_a_port_is_found(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip(f"{address} cannot be bound here")
        port = server.getsockname()[1]
        assert listeners(port) == []  # bound, but not listening
        server.listen()
        assert listeners(port) == [os.getpid()]
    assert listeners(port) == []


def test_addresses_of_this_machine_are_known() -> None:
    assert is_local("127.0.0.1") and is_local("localhost")
    assert not is_local("192.0.2.1")  # kept for documentation
