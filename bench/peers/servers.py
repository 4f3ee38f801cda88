"""How each engine is started, waited for, measured and stopped.

`ENTRIES` is the table to edit: which variant of a model an engine serves in which class, and with which flags. The
settings are those that the engines' own documents recommend for a CPU; README.md says where each comes from.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from client import HOST, MODEL_NAME
from environments import is_complete
from places import engine_folder
from workloads import CONTEXT

from models import Variants

CLASSES = ("16-bit", "8-bit", "4-bit")
KV_CACHE_GIB = 4
STOP_TIMEOUT_S = 30
READY_POLL_S = 0.05
CORES = sorted(os.sched_getaffinity(0))
_PROC = Path("/proc")


@dataclass(frozen=True)
class Entry:
    """One engine in one class. `kind` tells entries of an engine apart where it has several in a class."""

    engine: str
    number_class: str
    variant: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    kind: str = ""

    @property
    def label(self) -> str:
        return f"{self.engine} {self.kind}".strip()


ENTRIES = (
    Entry("octavo", "16-bit", "hf", ("--dtype", "bfloat16")),
    Entry("octavo", "8-bit", "hf", ("--quantization", "int8")),
    Entry("octavo", "4-bit", "hf", ("--quantization", "int4")),
    Entry("vllm", "16-bit", "hf", ("--dtype", "bfloat16")),
    Entry("llama.cpp", "16-bit", "gguf-bf16", kind="BF16"),
    Entry("llama.cpp", "8-bit", "gguf-q8_0", kind="Q8_0"),
    Entry("llama.cpp", "4-bit", "gguf-q4_0", kind="Q4_0"),
    Entry("llama.cpp", "4-bit", "gguf-q4_1", kind="Q4_1"),
    Entry("openvino", "16-bit", "openvino-fp16"),
    Entry("openvino", "8-bit", "openvino-int8"),
    Entry("openvino", "4-bit", "openvino-int4"),
)
ENGINES = tuple(dict.fromkeys(entry.engine for entry in ENTRIES))


class EngineUnavailable(Exception):
    """The engine cannot be started here; the message says why."""


@dataclass(frozen=True)
class Launch:
    """A server's command. `port` stands in it as the word PORT."""

    words: tuple[str, ...]
    environment: dict[str, str]
    ready_path: str

    def command(self, port: int) -> list[str]:
        return [str(port) if word == "PORT" else word for word in self.words]

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, *map(shlex.quote, self.words)])


# -- the engines ---------------------------------------------------------------------------------------------


def _octavo(entry: Entry, model: Path, envs: Path, num_slots: int) -> Launch:
    words = (
        sys.executable, "-m", "octavo.cli", "serve", str(model), "--host", HOST, "--port", "PORT",
        "--served-model-name", MODEL_NAME, "--max-model-len", str(CONTEXT),
        "--kv-cache-memory-bytes", f"{KV_CACHE_GIB}GiB", *entry.flags,
    )  # fmt: skip
    return Launch(words, dict(entry.environment), "/ready")


def _vllm(entry: Entry, model: Path, envs: Path, num_slots: int) -> Launch:
    folder = engine_folder(envs, "vllm")
    words = (
        str(folder / "bin" / "vllm"), "serve", str(model), "--host", HOST, "--port", "PORT",
        "--served-model-name", MODEL_NAME, "--max-model-len", str(CONTEXT),
        "--disable-uvicorn-access-log", *entry.flags,
    )  # fmt: skip
    patterns = ("tcmalloc/**/libtcmalloc_minimal.so.4", "lib/libiomp5.so")
    preloaded = [str(found) for pattern in patterns for found in sorted(folder.glob(pattern))[:1]]
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",  # it looks for "cpu" in its version otherwise, which this package lacks
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        # Bound by hand: the automatic choice leaves a core to the server, of which there are two at worst.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        **entry.environment,
    }
    return Launch(words, environment, "/health")


def _llama_cpp(entry: Entry, model: Path, envs: Path, num_slots: int) -> Launch:
    threads = str(len(CORES))
    words = (
        str(engine_folder(envs, "llama.cpp") / "build" / "bin" / "llama-server"), "--model", str(model),
        "--host", HOST, "--port", "PORT", "--alias", MODEL_NAME, "-t", threads, "-tb", threads,
        "-np", str(num_slots), "-c", str(num_slots * CONTEXT), "--cont-batching", "-b", "2048", "-ub", "512",
        "--no-ui", *entry.flags,
    )  # fmt: skip
    return Launch(words, dict(entry.environment), "/health")


def _openvino(entry: Entry, model: Path, envs: Path, num_slots: int) -> Launch:
    words = (
        str(engine_folder(envs, "openvino") / "bin" / "python"), str(Path(__file__).with_name("openvino_server.py")),
        str(model), "--host", HOST, "--port", "PORT", "--cache-gib", str(KV_CACHE_GIB), *entry.flags,
    )  # fmt: skip
    return Launch(words, dict(entry.environment), "/health")


_LAUNCHES: dict[str, Callable[[Entry, Path, Path, int], Launch]] = {
    "octavo": _octavo,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
}


def launch_of(entry: Entry, variants: Variants, envs: Path, num_slots: int) -> Launch:
    """Makes the model's variant if need be. Raises EngineUnavailable."""
    if entry.engine != "octavo" and not is_complete(envs, entry.engine):
        script = Path(__file__).with_name("environments.py")
        raise EngineUnavailable(f"it has no environment; make it with: python {script} --engine {entry.engine}")
    try:
        model = variants.get(entry.variant)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        raise EngineUnavailable(f"variant {entry.variant} of {variants.model.name} cannot be made: {error}") from error
    return _LAUNCHES[entry.engine](entry, model, envs, num_slots)


# -- processes -----------------------------------------------------------------------------------------------


class Server:
    """A running server: a session of its own, so that all its processes can be found and ended."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, started_s: float) -> None:
        self.process = process
        self.port = port
        self.started_s = started_s

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def pids(self) -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir(_PROC))) if _session_of(pid) == self.process.pid]

    def peak_rss_bytes(self) -> int:
        """The processes' high-water marks added up; pages that they share count for each."""
        return sum(_status_bytes(pid, "VmHWM") for pid in self.pids())

    def cpu_s(self) -> float:
        return sum(map(_cpu_seconds, self.pids()))


@contextlib.contextmanager
def running(launch: Launch, log: Path, timeout_s: float) -> Iterator[Server]:
    """The server once it is ready. Its output goes to `log`. Raises EngineUnavailable when it does not become ready."""
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        started_s = time.perf_counter()
        process = subprocess.Popen(
            launch.command(port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **launch.environment},
            start_new_session=True,
        )
    server = Server(process, port, started_s)
    try:
        _wait_until_ready(server, launch.ready_path, log, timeout_s)
        yield server
    finally:
        _stop(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(server: Server, path: str, log: Path, timeout_s: float) -> None:
    while True:
        if not server.is_running:
            raise EngineUnavailable(f"it ended with {server.process.returncode} while starting: {tail(log)}")
        if _answers(server.port, path):
            return
        if time.perf_counter() - server.started_s > timeout_s:
            raise EngineUnavailable(f"it was not ready within {timeout_s:g} s: {tail(log)}")
        time.sleep(READY_POLL_S)


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(server: Server) -> None:
    """Ask the server to end, then end what is left of its session."""
    pids = server.pids()
    server.process.terminate()
    try:
        server.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    for pid in pids:
        if _session_of(pid) == server.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def tail(log: Path, num_bytes: int = 1500) -> str:
    """The end of a log, which usually says what went wrong."""
    data = log.read_bytes() if log.is_file() else b""
    return f"{data[-num_bytes:].decode(errors='replace').strip()} (all of it: {log})"


# -- /proc ---------------------------------------------------------------------------------------------------


def _stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on, as the name before may hold anything; empty when it has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _session_of(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[3]) if fields and fields[0] != "Z" else None


def _cpu_seconds(pid: int) -> float:
    fields = _stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _status_bytes(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def machine_busy_s() -> float:
    """Seconds for which the machine's cores, all together, have been busy or were taken by the hypervisor."""
    fields = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
