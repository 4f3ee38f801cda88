"""A fake engine behind a server in a process of its own: `python -m tests.server.serve_fake '{"step_s": 0.01, ...}'`.

Prints the URL once it listens; the exit code is the server's.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.harness import FakeEngine, build_tokenizer, configured

from octavo.server.run import new_event_loop, serve

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(engine: dict[str, Any], **server: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process; kills it at the end of the block if it still runs."""
    command = [sys.executable, "-m", "tests.server.serve_fake", json.dumps(engine), json.dumps(server)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


async def main(engine: dict[str, Any], server: dict[str, Any]) -> int:
    config = configured(**server)
    client = FakeEngine(build_tokenizer(), config, **engine)
    return await serve(client, config, on_listening=lambda url: print(url, flush=True))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        sys.exit(runner.run(main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))))
