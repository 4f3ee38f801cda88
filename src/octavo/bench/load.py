"""Sends a workload at its times and waits for every answer. Also says what the client itself cost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from octavo.bench.client import Client, Record
from octavo.bench.process_usage import Usage, usage_of
from octavo.bench.workload import BenchRequest


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One pass over a workload."""

    records: list[Record]  # in the order of the requests
    began_s: float  # time.perf_counter
    duration_s: float  # until the last answer
    client_cpu_s: float
    send_delay_s: float  # the most that the client was late with a request that had only its time to wait for
    server_cpu_s: float | None  # None where the server's process is not known
    server_usage: Usage | None  # at the end


async def run_load(
    client: Client,
    requests: Sequence[BenchRequest],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None,
    server_pids: Sequence[int] = (),
    on_answer: Callable[[], object] = lambda: None,
) -> LoadRun:
    """Send request i at `arrivals_s[i]`, later if `max_concurrency` are in flight; first come, first sent."""
    bodies = [client.build(request) for request in requests]
    records = [Record(request.prompt_len) for request in requests]
    gate = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(i: int) -> None:
        async with gate or contextlib.nullcontext():
            records[i] = await client.run(bodies[i], requests[i].prompt_len)
        on_answer()

    before = usage_of(server_pids) if server_pids else None
    async with _quiet_collector():
        cpu_s, began_s = time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for i, due_s in enumerate(arrivals_s):
                wait_s = began_s + due_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(one(i))
        duration_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    after = usage_of(server_pids) if server_pids else None
    late = [record.start_s - began_s - due_s for record, due_s in zip(records, arrivals_s, strict=True)]
    return LoadRun(
        records,
        began_s,
        duration_s,
        cpu_s,
        send_delay_s=max(late, default=0.0) if gate is None else 0.0,
        server_cpu_s=after.cpu_s - before.cpu_s if before is not None and after is not None else None,
        server_usage=after,
    )


@contextlib.asynccontextmanager
async def _quiet_collector() -> AsyncIterator[None]:
    """The prompts are out of the garbage collector's sight meanwhile: a full pass would show as a stalled stream."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
