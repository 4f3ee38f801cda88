"""A scheduler and a scripted worker: what each request samples is written down, so a test can aim at one rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from octavo.batch import RequestUpdate, ScheduledBatch, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.config import SchedulerConfig
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.cache_spec import LayerKv, make_cache_spec
from octavo.request import Request, SamplingParams
from octavo.scheduler.scheduler import Scheduler

EOS = 0
FILLER = 99  # sampled where the script ends


class Harness:
    def __init__(
        self,
        *,
        windows: Sequence[int | None] = (None,),
        block_size: int = 4,
        num_blocks: int = 64,
        max_model_len: int = 128,
        caches: bool = True,
        rope_native_len: int | None = None,
        **config: Any,
    ) -> None:
        config.setdefault("max_num_batched_tokens", 64)
        layers = [LayerKv(1, 8, window) for window in windows]
        self.spec = make_cache_spec(layers, block_size=block_size, dtype_bytes=2)
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(
            SchedulerConfig(**config),
            self.spec,
            self.pool,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            cache_identity=b"test",
            enable_prefix_caching=caches,
            rope_native_len=rope_native_len,
        )
        self.script: dict[int, Sequence[int]] = {}
        self.failing: dict[int, str] = {}
        self.rows: dict[int, int] = {}  # output tokens sampled so far, by request id
        self.num_scored: dict[int, int] = {}  # prompt tokens of requests with prompt logprobs
        self.planned: deque[tuple[ScheduledBatch, StepOutput]] = deque()
        self.updates: list[RequestUpdate] = []
        self.batches: list[ScheduledBatch] = []
        self._next_id = 0

    def request(self, prompt: int | Sequence[int], max_tokens: int = 4, **fields: Any) -> Request:
        """A number stands for that many tokens that no other prompt has."""
        request_id = self._next_id
        self._next_id += 1
        tokens = range(1000 * (request_id + 1), 1000 * (request_id + 1) + prompt) if isinstance(prompt, int) else prompt
        own = {name: fields.pop(name) for name in ("priority", "choice", "cache_salt", "arrival_s") if name in fields}
        own.setdefault("arrival_s", float(request_id))
        sampling = SamplingParams(seed=request_id, max_tokens=max_tokens, **fields)
        return Request(request_id, tuple(tokens), sampling, max_tokens, **own)

    def add(self, prompt: int | Sequence[int], max_tokens: int = 4, *, extra: bytes = b"", **fields: Any) -> Request:
        request = self.request(prompt, max_tokens, **fields)
        self.scheduler.add(request, cache_extra=extra)
        return request

    def add_fork(self, prompt: int | Sequence[int], n: int, max_tokens: int = 4, **fields: Any) -> list[Request]:
        leader = self.request(prompt, max_tokens, **fields)
        fields = {**fields, "arrival_s": leader.arrival_s, "prompt_logprobs": None}
        family = [leader] + [self.request(leader.prompt_token_ids, max_tokens, choice=i, **fields) for i in range(1, n)]
        self.scheduler.add_fork(family[0], family[1:])
        return family

    def plan(self) -> ScheduledBatch | None:
        """Plan a step and let the worker run it; its output waits for `commit`."""
        batch = self.scheduler.plan()
        self.scheduler.check()
        if batch is not None:
            self.batches.append(batch)
            self.planned.append((batch, self._execute(batch)))
        return batch

    def commit(self) -> list[RequestUpdate]:
        updates = self.scheduler.commit(*self.planned.popleft())
        self.scheduler.check()
        self.updates += updates
        return updates

    def step(self) -> ScheduledBatch:
        batch = self.plan()
        assert batch is not None, "nothing was planned"
        self.commit()
        return batch

    def run(self, *, depth: int = 0, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.planned:
                return
            batch = self.plan()
            if batch is None or len(self.planned) > depth:
                self.commit()
        raise AssertionError("no end")

    def output(self, request: Request) -> list[int]:
        return [t for update in self.updates if update.request_id == request.request_id for t in update.new_token_ids]

    def last_update(self, request: Request) -> RequestUpdate:
        return [update for update in self.updates if update.request_id == request.request_id][-1]

    def scheduled(self, request: Request) -> list[tuple[int, int]]:
        """(start, tokens) of each step that computed for `request`."""
        return [
            (part.start, part.num_tokens)
            for batch in self.batches
            for part in batch.requests
            if part.request_id == request.request_id
        ]

    def _execute(self, batch: ScheduledBatch) -> StepOutput:
        output = StepOutput(batch.step_id)
        for request_id in batch.freed_request_ids:
            del self.rows[request_id]
        for row in batch.new_rows:
            self.rows[row.request_id] = 0
            if row.sampling.prompt_logprobs is not None:
                self.num_scored[row.request_id] = row.num_prompt_tokens
        for part in batch.requests:
            if part.samples:
                for request_id in (part.request_id, *part.fork_ids):
                    self._sample(request_id, part, output)
            self._score(part, output)
        return output

    def _sample(self, request_id: int, part: ScheduledRequest, output: StepOutput) -> None:
        if request_id in self.failing:
            output.failed[request_id] = self.failing[request_id]
            return
        new = []
        for draft in (*part.draft_token_ids, None):
            script = self.script.get(request_id, ())
            new.append(script[self.rows[request_id]] if self.rows[request_id] < len(script) else FILLER)
            self.rows[request_id] += 1
            if draft != new[-1]:
                break
        output.token_ids[request_id] = tuple(new)
        output.logprobs[request_id] = tuple(TokenLogprobs(token, -1.0, 1) for token in new)

    def _score(self, part: ScheduledRequest, output: StepOutput) -> None:
        end = min(part.start + part.num_tokens, self.num_scored.get(part.request_id, 0) - 1)
        entries = tuple(TokenLogprobs(p + 1, -1.0, 1) for p in range(part.start, end))
        if entries:
            output.prompt_logprobs[part.request_id] = entries
