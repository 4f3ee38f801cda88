"""Many streaming clients that hang up at random: errors, gauges, blocks and memory afterwards.

    python bench/soak.py [MODEL] [--clients 64] [--requests 2000]

Ends with exit code 1 when a request failed, a gauge did not return to zero, or memory kept growing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time

import httpx
from serving import server, words


async def client(url: str, number: int, num_requests: int, seen: dict[str, int]) -> None:
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=600) as http:
        for i in range(num_requests):
            body = {
                "prompt": words(rng.randint(1, 60), (number, i) if rng.random() < 0.7 else "shared prefix"),
                "max_tokens": rng.randint(1, 40),
                "n": rng.choice((1, 1, 1, 2)),
                "temperature": rng.choice((0, 1)),
                "stream": True,
                **rng.choice(({}, {}, {"logprobs": 2}, {"stop": ["e"]}, {"frequency_penalty": 1.0}, {"min_tokens": 1})),
            }
            hang_up_after = rng.randint(0, 10) if rng.random() < 0.4 else None
            num_events = 0
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    seen["refused"] += 1
                    continue
                ended = False
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        ended = True
                    elif line.startswith("data: "):
                        num_events += 1
                        if "error" in json.loads(line[6:]):
                            seen["errors"] += 1
                    if hang_up_after is not None and num_events > hang_up_after:
                        seen["hung up"] += 1
                        break
                else:
                    seen["finished" if ended else "cut"] += 1


def gauges(url: str) -> dict[str, float]:
    found = {}
    for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        name, _, value = line.rpartition(" ")
        base = name.partition("{")[0]
        if base in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            found[base] = found.get(base, 0.0) + float(value)
        elif base == "octavo:process_resident_memory_bytes":
            found[base] = found.get(base, 0.0) + float(value)
    return found


async def load(url: str, clients: int, requests: int, seen: dict[str, int]) -> None:
    await asyncio.gather(*(client(url, number, requests // clients, seen) for number in range(clients)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5, help="the load is cut into rounds; memory is read after each")
    args, options = parser.parse_known_args()
    seen = dict.fromkeys(("finished", "hung up", "cut", "refused", "errors"), 0)
    memory_mib: list[float] = []
    trouble = []
    # A small cache is soon touched whole: what grows after that is a leak.
    limits = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "32")
    with server(args.model, *limits, "--max-queued-requests", "1000", *options) as url:
        for _ in range(args.rounds):
            asyncio.run(load(url, args.clients, args.requests // args.rounds, seen))
            deadline = time.monotonic() + 5
            while (
                (now := gauges(url))
                and any(now[k] for k in now if k.startswith("vllm:"))
                and time.monotonic() < deadline
            ):
                time.sleep(0.1)
            memory_mib.append(now.get("octavo:process_resident_memory_bytes", 0) / 2**20)
            print(f"{seen}  gauges {now}", flush=True)
            trouble += [f"{name} is {now[name]} at rest" for name in now if name.startswith("vllm:") and now[name]]
    trouble += [f"{seen[name]} requests {name}" for name in ("cut", "refused", "errors") if seen[name]]
    growth = memory_mib[-1] - memory_mib[1] if len(memory_mib) > 2 else 0.0
    each = ", ".join(f"{size:.0f}" for size in memory_mib)
    print(f"resident memory after each round: {each} MiB; growth since round 2: {growth:.0f} MiB")
    if growth > 64:
        trouble.append(f"memory grew by {growth:.0f} MiB")
    if trouble:
        sys.exit("; ".join(trouble))


if __name__ == "__main__":
    main()
