"""What continuous batching buys: output tokens/s at concurrency 1 and 8, on one server, in the same minute.

python bench/batching.py [MODEL] [--rounds 3] [-- further options of octavo serve]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from serving import concurrently, server, words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=8)
    args, serve_options = parser.parse_known_args()
    serve_options = [option for option in serve_options if option != "--"]
    rates: dict[int, list[float]] = {1: [], args.concurrency: []}
    with server(args.model, *serve_options) as url:
        asyncio.run(concurrently(url, [words(8, "warm-up")], 4, 1))
        for round_no in range(args.rounds):
            for concurrency, found in rates.items():
                num_requests = 2 * concurrency if concurrency > 1 else 2
                prompts = [words(args.prompt_tokens, (round_no, concurrency, i)) for i in range(num_requests)]
                streams, seconds = asyncio.run(concurrently(url, prompts, args.max_tokens, concurrency))
                found.append(sum(s.num_tokens for s in streams) / seconds)
                print(
                    f"round {round_no + 1}  concurrency {concurrency:2d}  {found[-1]:7.1f} output tokens/s", flush=True
                )
    one, many = (statistics.median(found) for found in rates.values())
    print(
        f"median      concurrency  1  {one:7.1f}, concurrency {args.concurrency:2d} {many:7.1f}: {many / one:.2f} times"
    )


if __name__ == "__main__":
    main()
