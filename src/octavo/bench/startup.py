"""`octavo bench startup`: how long `octavo serve` takes to answer, to be ready, and to give its first token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from octavo.bench.client import COMPLETIONS, EventReader, Record
from octavo.bench.http_client import Address, ConnectionBroken, HttpClient
from octavo.bench.options import StartupOptions
from octavo.bench.process_usage import usage_of
from octavo.bench.report import Row, Section
from octavo.bench.statistics import confidence_interval, mean, percentile
from octavo.errors import StartError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES = (10, 25, 50, 75, 90, 99)
_TRY_AGAIN_S = 0.005
_MOMENTS = {"health": "First answer of /health", "ready": "Ready", "first_token": "First token"}
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds after the command was given."""

    health_s: float  # any answer
    ready_s: float
    first_token_s: float  # over HTTP, of a request sent when the server was ready
    peak_rss_bytes: int  # of its processes together, by then
    cpu_s: float  # the same


def run_startup(
    serve_flags: Sequence[str], headers: Mapping[str, str], options: StartupOptions
) -> tuple[dict[str, Any], list[Start]]:
    """Start `octavo serve` with `serve_flags`, which name neither address nor port. Raises StartError if one fails."""
    starts = []
    num_rounds = options.num_iters_warmup + options.num_iters
    for i in tqdm(range(num_rounds), desc="Starts", unit="start", disable=options.disable_tqdm):
        start = asyncio.run(_start(serve_flags, headers, options.start_timeout_sec))
        if i >= options.num_iters_warmup:
            starts.append(start)
    result: dict[str, Any] = {"num_iters": options.num_iters, "confidence_intervals": {}}
    for name in _MOMENTS:
        times = [getattr(start, f"{name}_s") for start in starts]
        result[f"avg_{name}_time"] = mean(times)
        result[f"{name}_times"] = times
        result[f"{name}_percentiles"] = {p: percentile(times, p) for p in PERCENTILES}
        if len(times) > 1:
            interval = confidence_interval(times)
            result["confidence_intervals"][f"avg_{name}_time"] = [interval.low, interval.high]
    result["avg_cpu_s"] = mean([start.cpu_s for start in starts])
    return result | {"peak_rss_bytes": max(start.peak_rss_bytes for start in starts)}, starts


def startup_sections(result: Mapping[str, Any]) -> list[Section]:
    rows = []
    for name, label in _MOMENTS.items():
        interval = result["confidence_intervals"].get(f"avg_{name}_time")
        shown = "" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"
        rows.append(Row(f"{label}: mean (s)", f"{result[f'avg_{name}_time']:.3f}", shown))
        rows.append(Row(f"{label}: median (s)", f"{result[f'{name}_percentiles'][50]:.3f}"))
    rows.append(Row("CPU time until then (s)", f"{result['avg_cpu_s']:.2f}"))
    rows.append(Row("Peak RSS (MiB)", f"{result['peak_rss_bytes'] / 2**20:.1f}"))
    return [Section(f"{result['num_iters']} starts", rows)]


def startup_figures(starts: Sequence[Start]) -> list[Figure]:
    from octavo.bench.html_report import draw_cdf, new_figure

    figure, axes = new_figure(1)
    for name, label in _MOMENTS.items():
        draw_cdf(axes[0], [getattr(start, f"{name}_s") for start in starts], "after the command", "s")
        axes[0].get_lines()[-1].set_label(label)
    axes[0].legend(fontsize="small")
    return [figure]


async def _start(serve_flags: Sequence[str], headers: Mapping[str, str], timeout_s: float) -> Start:
    port = _free_port()
    command = [sys.executable, "-m", "octavo.cli", "serve", *serve_flags, "--host", "127.0.0.1", "--port", str(port)]
    http = HttpClient(Address("127.0.0.1", port, False, ""), headers, keeps_connections=True)
    began_s = time.perf_counter()
    async with _running(command) as process:
        try:
            async with asyncio.timeout(timeout_s):
                await _until(process, http, "/health", lambda status: True)
                health_s = time.perf_counter() - began_s
                await _until(process, http, "/ready", lambda status: status == 200)
                ready_s = time.perf_counter() - began_s
                record = await _first_token(http)
        except TimeoutError:
            raise StartError(f"the server was not ready within {timeout_s:g} s (--start-timeout-sec).") from None
        except ConnectionBroken as error:
            raise StartError(f"the server broke the connection during its start: {error}.") from None
        finally:
            http.close()
        usage = usage_of([process.pid])
    if record.error:
        raise StartError(f"the first request failed: {record.error}")
    return Start(health_s, ready_s, record.start_s + record.ttft_s - began_s, usage.peak_rss_bytes, usage.cpu_s)


@contextlib.asynccontextmanager
async def _running(command: Sequence[str]) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The command as a process, which is ended at the end of the block; its stderr is shown when it fails."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        reader = asyncio.create_task(asyncio.to_thread(process.stderr.read))
        try:
            yield process
        except StartError as error:
            process.kill()
            said = (await reader).decode("utf-8", "replace").strip()
            raise StartError(f"{error} It said:\n{said[-2000:]}" if said else str(error)) from None
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            await reader


async def _until(
    process: subprocess.Popen[bytes], http: HttpClient, path: str, suffices: Callable[[int], bool]
) -> None:
    while True:
        with contextlib.suppress(ConnectionBroken):
            if suffices((await http.get(path))[0]):
                return
        if process.poll() is not None:
            raise StartError(f"the server ended with {process.returncode} before it was ready.")
        await asyncio.sleep(_TRY_AGAIN_S)


async def _first_token(http: HttpClient) -> Record:
    """Asks for one token and sees when it came. The model's name is asked before, as any client does."""
    record = Record(None)
    status, body = await http.get("/v1/models")
    if status != 200:
        record.error = f"status {status} of /v1/models"
        return record
    fields = {"prompt": "Hello", "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    data = http.build("POST", COMPLETIONS, {"model": json.loads(body)["data"][0]["id"], **fields})
    record.start_s = time.perf_counter()
    reader = EventReader(record)
    status = await http.send(data, reader.feed)
    if status != 200:
        record.error = f"status {status}: {reader.plain_text}"
    return record


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
