"""Greedy answers of the native backend against the reference backend in the same number format, prompt by prompt.

    python bench/backend_agreement.py smollm2-135m-instruct --dtype bfloat16 --prompts ../shared/data/gsm8k_400.jsonl

Where two answers part, the reference's log-probabilities say how near its two choices were: a tie within rounding, or
a fault. The exit code is 1 if any first divergence is farther apart than `--tie`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from octavo import LLM, SamplingParams


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a `question` or `prompt` each")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument(
        "--tie", type=float, help="largest gap of log-probabilities that is a tie (default: by --dtype)"
    )
    args = parser.parse_args()
    tie = args.tie if args.tie is not None else {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}[args.dtype]
    prompts = [prompt for line in args.prompts.read_text().splitlines() if (prompt := _prompt_of(json.loads(line)))]
    prompts = prompts[: args.num_prompts]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True, logprobs=5)
    answers = {}
    for backend in ("native", "reference"):
        options = {"dtype": args.dtype, "quantization": "none", "max_model_len": 1024, "backend": backend}
        llm = LLM(args.model, **options)
        answers[backend] = [output.outputs[0] for output in llm.generate(prompts, params)]
    num_equal, gaps = 0, []
    for native, reference in zip(answers["native"], answers["reference"], strict=True):
        parted = next(
            (i for i, pair in enumerate(zip(native.token_ids, reference.token_ids, strict=True)) if len({*pair}) > 1),
            None,
        )
        if parted is None:
            num_equal += 1
            continue
        detail = reference.logprobs[parted]
        others = {choice.token_id: choice.logprob for choice in detail.top}
        gaps.append(detail.logprob - others.get(native.token_ids[parted], float("-inf")))
    print(f"{num_equal} of {len(prompts)} answers of {args.max_tokens} tokens are equal ({args.dtype})")
    if gaps:
        print(f"gaps where the others part: {', '.join(f'{gap:.4f}' for gap in sorted(gaps))}")
    return int(any(gap > tie for gap in gaps))


def _prompt_of(row: dict[str, str]) -> str | None:
    return row.get("question") or row.get("prompt")


if __name__ == "__main__":
    sys.exit(main())
