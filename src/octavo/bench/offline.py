"""`LLM` with a clock: what each step took, and what came out of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.backends.ops import Program
from octavo.config import Config
from octavo.engine.llm import LLM, Prompt, RequestOutput
from octavo.engine.output import ChoiceOutput
from octavo.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Step:
    began_s: float  # time.perf_counter
    ended_s: float
    num_new_tokens: int
    num_running: int  # choices that were not yet done before it
    num_without_token: int  # choices that have no token after it

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One batch of prompts from its start to its last token."""

    began_s: float
    ended_s: float
    cpu_s: float
    steps: list[Step]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


class TimedLLM(LLM):
    """Steps include detokenizing, as a caller of LLM sees them."""

    def __init__(self, config: Config) -> None:
        sections = (config.model, config.cache, config.scheduler, config.server)
        super().__init__(**{f.name: getattr(part, f.name) for part in sections for f in dataclasses.fields(part)})
        self.steps: list[Step] = []

    @property
    def program(self) -> Program | None:
        """The model, as its backend compiled it."""
        return self._core.program

    def run(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], *, use_tqdm: bool) -> OfflineRun:
        """Raises InvalidRequest for what does not fit into the model's context."""
        self.steps = []
        cpu_s, began_s = time.process_time(), time.perf_counter()
        outputs = self.generate(prompts, sampling, use_tqdm=use_tqdm)
        ended_s = time.perf_counter()
        return OfflineRun(
            began_s,
            ended_s,
            time.process_time() - cpu_s,
            self.steps,
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
            sum(output.num_cached_tokens for output in outputs),
        )

    def _step(self, open_choices: dict[int, tuple[RequestOutput, ChoiceOutput]]) -> int:
        token_ids = [result.outputs[output.choice].token_ids for result, output in open_choices.values()]
        num_before = sum(map(len, token_ids))
        began_s = time.perf_counter()
        num_ended = super()._step(open_choices)
        ended_s = time.perf_counter()
        num_new = sum(map(len, token_ids)) - num_before
        num_without = sum(not ids for ids in token_ids)
        self.steps.append(Step(began_s, ended_s, num_new, len(token_ids), num_without))
        return num_ended
