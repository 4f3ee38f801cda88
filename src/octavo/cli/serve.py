"""`octavo serve`: the HTTP server, and its engine in a process of its own."""

from __future__ import annotations

import argparse
import logging
import signal
import sys

from octavo.cli.flags import Parser, add_config_flags, config_from
from octavo.config import MIB, Config
from octavo.engine.spawn import EngineProcess, spawn_engine
from octavo.engine.startup import StartupClock, startup_report
from octavo.errors import StartError


def add_flags(parser: Parser) -> None:
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    clock = StartupClock("interpreter, flags")
    config = config_from(args)
    clock.begin("spawning the engine")
    spawned = spawn_engine(config)  # it loads while the server's imports run
    clock.begin("imports")
    try:
        return _serve(config, spawned, clock)
    finally:
        spawned.kill()


def _serve(config: Config, spawned: EngineProcess, clock: StartupClock) -> int:
    # Until the server listens for signals, Ctrl-C ends the command at once; the engine follows by itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s server %(levelname)s %(message)s", stream=sys.stderr)
    # Heavy: --help and mistakes in flags answer without them, and the engine has been started already.
    import asyncio
    import contextlib

    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.model_files import load_model_tokenizer
    from octavo.engine.transport import ProcessTransport
    from octavo.server.run import new_event_loop, serve

    listening = asyncio.Event()

    def on_listening(url: str) -> None:
        _print(f"listening on {url}")
        clock.begin("tokenizer, waiting for the engine")
        listening.set()

    async def main() -> int:
        clock.begin("listening")
        engine = AsyncEngine(config, ProcessTransport(spawned), lambda: load_model_tokenizer(config))
        serving = asyncio.create_task(serve(engine, config, on_listening=on_listening))
        ready = asyncio.create_task(_announce(engine, config))
        try:
            await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.exception() is not None:
                await ready
            return await serving
        finally:
            for task in (serving, ready):
                task.cancel()
            await asyncio.gather(serving, ready, return_exceptions=True)
            await engine.close()

    async def _announce(engine: AsyncEngine, config: Config) -> None:
        # Reading a tokenizer holds up everything else in this process, and /health is to answer before it.
        await listening.wait()
        await engine.start()
        try:
            info = await engine.wait_ready(config.server.engine_start_timeout_s)
        except TimeoutError:
            raise StartError(
                f"the engine was not ready after {config.server.engine_start_timeout_s:g} s ({engine.state_reason}); "
                "raise --engine-start-timeout-s."
            ) from None
        for name, value, why in info.decisions:
            _print(f"  {name} = {value}  ({why})")
        for note in info.notes:
            _print(f"  {note}")
        _print(f"ready: {info.model} as {', '.join(info.served_model_names)}")
        _print(
            f"KV cache of {info.kv_cache_bytes / MIB:.0f} MiB: room for {info.max_concurrency:.1f} requests of "
            f"{info.max_model_len} tokens"
        )
        if config.server.startup_report:
            clock.begin("serving")
            for line in startup_report([("server", clock.phases()), ("engine", engine.startup_phases)]):
                _print(line)

    with contextlib.closing(asyncio.Runner(loop_factory=new_event_loop)) as runner:
        return runner.run(main())


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
