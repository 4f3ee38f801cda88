"""One random run of the scheduler over the toy model, every answer compared with the naive loop."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from tests.fuzz.toy_model import EOS, VOCAB, Answer, ToyModel, ToyRunner, naive

from octavo.batch import RequestUpdate, ScheduledBatch, StepOutput
from octavo.config import SchedulerConfig
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.cache_spec import LayerKv, make_cache_spec
from octavo.request import Request, RequestStatus, SamplingParams
from octavo.scheduler.scheduler import Scheduler

LAYOUTS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (None, None),
    (4,),
    (None, 1),
    (None, 3),
    (None, 6, 6, None, 6, 6),
    (2, 9),
    (None, 2, 7),
)
CONTEXT = 44
MAX_STEPS = 3000


@dataclass(eq=False, slots=True)
class Family:
    """The choices of one client request, and what each should and did yield."""

    requests: list[Request]
    tenant: int
    salt: str
    extra: bytes
    expected: dict[int, Answer]
    updates: dict[int, list[RequestUpdate]] = field(default_factory=dict)
    interrupted: set[int] = field(default_factory=set)  # aborted, or failed: the answer is a prefix
    first_start: int | None = None  # where the first range of the first admission began


class Run:
    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.block_size = rng.choice((1, 2, 3, 4, 8))
        layers = [LayerKv(1, 4, window) for window in rng.choice(LAYOUTS)]
        self.spec = make_cache_spec(layers, block_size=self.block_size, dtype_bytes=2)
        native = rng.choice((None, None, rng.randint(6, 30)))
        self.model = ToyModel(tuple(group.window for group in self.spec.groups), native)
        is_chunked = rng.random() < 0.85
        budget = rng.randint(1, 24) if is_chunked else CONTEXT + rng.randint(0, 8)
        threshold = rng.choice((0, 0, rng.randint(1, 6))) if is_chunked else 0
        self.depth = rng.choice((0, 1, 1, 2))
        self.max_num_seqs = rng.randint(1, 7)
        self.config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            enable_chunked_prefill=is_chunked,
            long_prefill_token_threshold=threshold,
            scheduling_policy=rng.choice(("fcfs", "priority")),
            batching="static" if rng.random() < 0.12 else "continuous",
        )
        self.budget = budget
        most = self.spec.max_blocks_per_request(CONTEXT, min(budget, threshold or budget))
        num_blocks = most + rng.randint(0, most * rng.choice((0, 1, 4)) // 2)
        self.pool = BlockPool(num_blocks, self.block_size)
        self.caches = rng.random() < 0.85
        self.scheduler = Scheduler(
            self.config,
            self.spec,
            self.pool,
            max_model_len=CONTEXT,
            eos_token_ids=(EOS,),
            cache_identity=b"toy",
            enable_prefix_caching=self.caches,
            rope_native_len=native,
        )
        self.tenant_of: dict[int, int] = {}
        self.runner = ToyRunner(self.model, self.spec, num_blocks, self.tenant_of)
        self.families: list[Family] = []
        self.family_of: dict[int, Family] = {}
        self.texts: list[list[int]] = [self._tokens(20)]  # what later turns continue
        self.counts: Counter[str] = Counter()
        self.in_flight: deque[tuple[ScheduledBatch, StepOutput]] = deque()
        self.next_id = 0

    def play(self) -> Counter[str]:
        rng, scheduler = self.rng, self.scheduler
        todo = rng.randint(2, 9)
        for _ in range(MAX_STEPS):
            while todo and (rng.random() < 0.4 or not scheduler.has_work):
                self._arrive()
                todo -= 1
            if not todo and not scheduler.has_work and not self.in_flight:
                break
            self._step()
        else:
            raise AssertionError("no progress")
        self._check_end()
        return self.counts

    def _step(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        self._propose()
        batch = scheduler.plan()
        if batch is not None:
            self._check_batch(batch)
            if rng.random() < 0.02:
                self._fail_one(batch)
            self.in_flight.append((batch, self.runner.execute(batch)))
            live_ids = {request.request_id for request in self._live()}
            assert self.runner.rows.keys() <= live_ids, "the row of an ended request is kept"
        if self.counts["steps"] % 4 == 0:
            scheduler.check()
        self.counts["preempted_in_flight"] += sum(
            request.status is RequestStatus.WAITING and request.num_preemptions > 0
            for waiting, _ in self.in_flight
            for part in waiting.requests
            for request in self.family_of[part.request_id].requests
            if request.request_id == part.request_id and part.samples
        )
        if rng.random() < 0.04:
            self._abort_one()
        if batch is None or len(self.in_flight) > self.depth:
            assert self.in_flight or not scheduler.has_work, "nothing runs and nothing can be planned"
            if self.in_flight:
                for update in scheduler.commit(*self.in_flight.popleft()):
                    self._note(update)
        if rng.random() < 0.005:
            scheduler.reset_prefix_cache()
        scheduler.check()

    # -- what clients do -------------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _arrive(self) -> None:
        rng = self.rng
        prompt = self._prompt()
        tenant = rng.choice((0, 0, 0, 1, 2))
        salt, extra = {0: ("", b""), 1: ("salt", b""), 2: ("", b"adapter")}[tenant]
        max_tokens = rng.choice((0, 1, rng.randint(1, 8), rng.randint(8, 26), rng.randint(8, 26)))
        max_tokens = min(max_tokens, CONTEXT - len(prompt))
        min_tokens = rng.randint(0, min(3, max_tokens))
        ignore_eos = rng.random() < 0.5
        stop_token_ids = tuple(self._tokens(1)) if rng.random() < 0.2 else ()
        prompt_logprobs = 1 if rng.random() < 0.12 else None
        requests, expected = [], {}
        for choice in range(rng.choice((1, 1, 1, 2, 3, 5))):
            sampling = SamplingParams(
                seed=rng.randrange(1000),
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
                stop_token_ids=stop_token_ids,
                prompt_logprobs=prompt_logprobs if choice == 0 else None,
            )
            request = Request(
                self.next_id,
                tuple(prompt),
                sampling,
                max_tokens,
                float(len(self.families)),
                choice,
                rng.randint(0, 2),
                salt,
            )
            self.next_id += 1
            requests.append(request)
            expected[request.request_id] = naive(
                self.model,
                prompt,
                seed=sampling.seed or 0,
                tenant=tenant,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                eos=not ignore_eos,
                stop_token_ids=stop_token_ids,
            )
        family = Family(requests, tenant, salt, extra, expected)
        self.families.append(family)
        for request in requests:
            self.tenant_of[request.request_id] = tenant
            self.family_of[request.request_id] = family
            family.updates[request.request_id] = []
        if len(requests) == 1:
            self.scheduler.add(requests[0], cache_extra=extra)
        else:
            self.scheduler.add_fork(requests[0], requests[1:], cache_extra=extra)
        self.counts["requests"] += len(requests)

    def _prompt(self) -> list[int]:
        """A fresh text behind a shared beginning, or a later turn on what was said before, drafts included."""
        rng = self.rng
        live = self._live()
        if live and rng.random() < 0.2:
            text = list(rng.choice(live).token_ids)
        else:
            text = rng.choice(self.texts)
        text = text[: rng.randint(0, len(text))] if rng.random() < 0.5 else text[:]
        text += self._tokens(rng.choice((0, 1, 3, 10)))
        return text[: rng.randint(CONTEXT // 2, CONTEXT)] or [0]

    def _propose(self) -> None:
        """Drafts as a proposer would make them: often right, sometimes not."""
        chance = self.rng.choice((0.0, 0.2, 0.8))
        for request in self._live():
            if self.rng.random() < chance:
                answer = self.family_of[request.request_id].expected[request.request_id].token_ids
                drafts = list(answer[request.num_output_tokens :][:3]) + self._tokens(1)
                if self.rng.random() < 0.4:
                    drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(VOCAB)
                num_taken = self.scheduler.set_drafts(request.request_id, drafts)
                if num_taken:
                    self.texts.append([*request.token_ids, *request.draft_token_ids])
                self.counts["drafts"] += num_taken

    def _live(self) -> list[Request]:
        return [r for family in self.families for r in family.requests if not r.is_finished]

    def _abort_one(self) -> None:
        live = self._live()
        if live:
            request = self.rng.choice(live)
            self.family_of[request.request_id].interrupted.add(request.request_id)
            update = self.scheduler.abort(request.request_id)
            assert update is not None and update.finish_reason == "abort" and not update.new_token_ids
            assert self.scheduler.abort(request.request_id) is None
            self.counts["aborts"] += 1

    def _fail_one(self, batch: ScheduledBatch) -> None:
        sampling = [i for r in batch.requests if r.samples for i in (r.request_id, *r.fork_ids)]
        if sampling:
            request_id = self.rng.choice(sampling)
            self.runner.fail_ids.add(request_id)
            self.family_of[request_id].interrupted.add(request_id)
            self.counts["failures"] += 1

    # -- what must hold --------------------------------------------------------------------------------

    def _check_batch(self, batch: ScheduledBatch) -> None:
        scheduler = self.scheduler
        assert 0 < batch.num_tokens <= self.budget, "a step exceeds its budget"
        assert scheduler.last_step.num_tokens == batch.num_tokens
        assert scheduler.num_running <= self.max_num_seqs
        assert scheduler.num_running + scheduler.num_waiting == len(self._live())
        for scheduled in batch.requests:
            family = self.family_of[scheduled.request_id]
            if family.first_start is None:
                family.first_start = scheduled.start
            self.counts["forks"] += len(scheduled.fork_ids)
            self.counts["scaled"] += scheduled.rope_variant
        self.counts["steps"] += 1

    def _note(self, update: RequestUpdate) -> None:
        family = self.family_of[update.request_id]
        updates = family.updates[update.request_id]
        assert not updates or updates[-1].finish_reason is None, "an update after the last"
        assert len(update.logprobs) == len(update.new_token_ids)
        updates.append(update)
        if update.finish_reason is not None:
            request = next(r for r in family.requests if r.request_id == update.request_id)
            self.texts.append(list(request.token_ids))

    def _check_end(self) -> None:
        scheduler = self.scheduler
        assert scheduler.num_running == scheduler.num_waiting == 0 and not scheduler.has_work
        assert self.pool.num_free == self.pool.num_blocks and scheduler.kv_usage == 0
        for family in self.families:
            for request in family.requests:
                self._check_answer(family, request)
        hits = sum(family.first_start or 0 for family in self.families)
        assert scheduler.prefix_hit_tokens == hits <= scheduler.prefix_query_tokens or not hits
        if not self.caches:
            assert not self.pool.num_cached and not hits
        self.counts.update(
            preemptions=scheduler.num_preemptions,
            hit_tokens=scheduler.prefix_hit_tokens,
            copies=scheduler.num_block_copies,
            window_frees=scheduler.num_window_frees,
            rope_restarts=scheduler.num_rope_restarts,
            evictions=self.pool.num_evictions,
            accepted_drafts=scheduler.num_accepted_tokens,
            padding=scheduler.padding_tokens,
        )

    def _check_answer(self, family: Family, request: Request) -> None:
        answer, updates = family.expected[request.request_id], family.updates[request.request_id]
        tokens = tuple(token for update in updates for token in update.new_token_ids)
        scores = tuple(lp.logprob for update in updates for lp in update.logprobs)
        prompt = tuple(lp for update in updates for lp in update.prompt_logprobs)
        where = f"request {request.request_id}: {tokens} instead of {answer.token_ids}"
        assert request.token_ids == [*request.prompt_token_ids, *tokens], where
        is_whole = request.request_id not in family.interrupted
        length = len(answer.token_ids) if is_whole else len(tokens)
        assert tokens == answer.token_ids[:length], where
        assert scores == tuple(map(float, answer.scores[:length])), where
        if is_whole:
            assert updates and updates[-1].finish_reason == answer.finish_reason, where
            assert updates[-1].stop_reason == answer.stop_reason, where
        assert request.is_finished and not request.block_ids
        assert request.num_cached_tokens < request.num_prompt_tokens, where
        assert request.num_cached_tokens == (family.first_start or 0) or not is_whole, where
        if request.sampling.prompt_logprobs is not None:
            expected = answer.prompt_scores if is_whole else answer.prompt_scores[: len(prompt)]
            assert tuple(lp.logprob for lp in prompt) == tuple(map(float, expected)), where
            assert [lp.token_id for lp in prompt] == list(request.prompt_token_ids[1 : len(prompt) + 1]), where
        else:
            assert not prompt


def play(seed: int) -> Counter[str]:
    try:
        return Run(seed).play()
    except (AssertionError, IndexError, KeyError, ValueError, StopIteration) as error:
        error.add_note(f"seed {seed}")
        raise
