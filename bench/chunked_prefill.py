"""What chunked prefill bounds: the worst gap of a running stream while a 2,000-token prompt is admitted.

The same load on three servers: chunks of 128 and 512 tokens, and no chunking.

    python bench/chunked_prefill.py [MODEL] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

import httpx
from serving import Stream, concurrently, server, stream, words

VARIANTS = {
    "chunks of 128": ["--max-num-batched-tokens", "128"],
    "chunks of 512": ["--max-num-batched-tokens", "512"],
    "not chunked": ["--no-enable-chunked-prefill"],
}


async def admit_beside(url: str, prompt: str, max_tokens: int) -> tuple[Stream, Stream]:
    """A stream runs; once it has 8 tokens a long prompt arrives. Returns both."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        running = asyncio.create_task(stream(client, words(16, "running"), max_tokens))
        await asyncio.sleep(1.0)
        long = await stream(client, prompt, 4)
        return await running, long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    args = parser.parse_args()
    print(f"{'':14s} worst gap ms   median gap ms   TTFT of the long prompt ms   (medians of {args.rounds} rounds)")
    for name, options in VARIANTS.items():
        worst, usual, ttft = [], [], []
        with server(args.model, "--max-model-len", "4096", "--no-enable-prefix-caching", *options) as url:
            asyncio.run(concurrently(url, [words(8, "warm-up")], 4, 1))
            for round_no in range(args.rounds):
                running, long = asyncio.run(admit_beside(url, words(args.prompt_tokens, round_no), 160))
                worst.append(max(running.gaps_s) * 1e3)
                usual.append(statistics.median(running.gaps_s) * 1e3)
                ttft.append(long.ttft_s * 1e3)
        print(
            f"{name:14s} {statistics.median(worst):12.0f}   {statistics.median(usual):13.1f}   "
            f"{statistics.median(ttft):26.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
