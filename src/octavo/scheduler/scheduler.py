"""Plans steps and commits their outputs. The only place where the progress of a request is recorded.

    batch = scheduler.plan()             # decides, allocates or preempts; a frozen value
    output = worker.execute(batch)
    updates = scheduler.commit(batch, output)

`plan` may run again before `commit`; steps execute and commit strictly in the order of their plans.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence

from octavo.batch import RequestUpdate, ScheduledBatch, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.config import SchedulerConfig
from octavo.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.block_tables import BlockCopies, BlockTables
from octavo.kv_cache.cache_spec import KvCacheSpec
from octavo.kv_cache.prefix_cache import root_key
from octavo.request import FinishReason, Request, RequestStatus
from octavo.scheduler import policy
from octavo.scheduler.live import InFlight, Live, Step, StepStats


class Scheduler:
    """Continuous batching over one token budget.

    A request computes `min(tokens it has not computed, budget)`. Prefill, chunk, decode and draft
    verification are this one rule; there is no phase. Each step serves the running requests in the order of
    the policy, then admits waiting ones while budget, rows and blocks last. A long range leaves one token of
    budget to every running request behind it, so a prompt never stops the decodes.

    Preemption. When a running request finds no block, the last one behind it in order loses its KV and
    waits to compute it again (from the prefix cache, as far as that still holds it). A request is never
    preempted for a worse one; if nobody is behind it, it keeps its blocks and skips the step. The first in
    order thus always gets on, and since a request that cannot fit alone is refused by `add`, all end.

    A step in flight. A planned range may end in a token that is still being sampled: the worker's row will
    have it. Blocks that a preempted, finished or aborted request gives up may be handed out at once: their
    next writer is a later step, and nothing but committed tokens is ever published. A step planned before
    its request lost its KV still delivers its tokens at commit, so no sampled token is ever taken back.

    Forks. The n choices of a request are a leader and its siblings. The leader computes the prompt; the step
    that reaches the prompt's end samples once for every sibling that has room, and from then on each is a
    request like any other, sharing all blocks; a shared block that is partly filled is copied before it is
    written. Siblings without room wait behind a new leader of their own.

    RoPE variants. A request that outgrows the native context drops its KV and computes it again, scaled.

    The same answer. What a request yields depends on its own tokens only: nothing is decided by the clock
    (arrival order aside), and `tests/fuzz` holds every path to the tokens of a naive loop.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        spec: KvCacheSpec,
        pool: BlockPool,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        cache_identity: bytes,
        enable_prefix_caching: bool,
        rope_native_len: int | None = None,
    ) -> None:
        """Without chunked prefill every prompt must fit into one step: ConfigError if the budget is below
        `max_model_len`, so that no step ever exceeds its budget."""
        budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
        assert budget is not None, "resolve() sets the budget"
        if threshold < 0:
            raise ConfigError(f"--long-prefill-token-threshold is {threshold}; it must be at least 0 (0: no limit).")
        if not config.enable_chunked_prefill:
            if budget < max_model_len:
                raise ConfigError(
                    f"--max-num-batched-tokens is {budget}, but without chunked prefill a step must hold the "
                    f"longest prompt, {max_model_len} tokens. Raise it to that, or enable chunked prefill."
                )
            if threshold:
                raise ConfigError(
                    f"--long-prefill-token-threshold {threshold} splits long prompts, which "
                    "--no-enable-chunked-prefill forbids. Give one of the two."
                )
        self._budget = budget
        self._max_chunk = min(budget, threshold) if threshold else budget
        self._max_num_seqs = config.max_num_seqs
        self._is_chunked = config.enable_chunked_prefill
        self._is_static = config.batching == "static"
        self._order = policy.ORDERS[config.scheduling_policy]
        self._spec = spec
        self._pool = pool
        self._tables = BlockTables(spec, pool, max_chunk=self._max_chunk, enable_prefix_caching=enable_prefix_caching)
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cache_identity = cache_identity
        self._enable_prefix_caching = enable_prefix_caching
        self._rope_native_len = rope_native_len

        self._live: dict[int, Live] = {}
        self._waiting: list[Live] = []  # by rank; siblings hang on their leader
        self._running: list[Live] = []  # by rank
        self._static_ids: set[int] = set()  # the static batch that runs, ended members included
        self._in_flight: deque[tuple[int, list[InFlight]]] = deque()
        self._freed_ids: list[int] = []  # rows that the next batch frees
        self._next_step_id = 0

        self.last_step = StepStats()
        self.num_preemptions = 0
        self.num_rope_restarts = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.padding_tokens = 0  # static batching: rows computed for nothing, one token a step, had they been kept
        self.num_block_copies = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0  # drafts delivered; every sampling step delivers one token beside them

    # -- gauges ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks; each choice of a fork counts."""
        return len(self._live) - len(self._running)

    @property
    def kv_usage(self) -> float:
        return self._pool.usage

    @property
    def num_window_frees(self) -> int:
        return self._tables.num_window_frees

    # -- requests come and go --------------------------------------------------------------------------

    def add(self, request: Request, *, cache_extra: bytes = b"") -> None:
        """Queue a request. Raises RequestError if it can never be served. `cache_extra`: see `root_key`."""
        self.add_fork(request, (), cache_extra=cache_extra)

    def add_fork(self, leader: Request, siblings: Sequence[Request], *, cache_extra: bytes = b"") -> None:
        """Queue the choices of one prompt: all of them, or none and RequestError."""
        for request in (leader, *siblings):
            self._check_servable(request)
            assert request.request_id not in self._live, f"request id {request.request_id} is live already"
            assert request.prompt_token_ids == leader.prompt_token_ids, "choices share one prompt"
        family = [self._make_live(request, cache_extra) for request in (leader, *siblings)]
        self._live.update((live.request.request_id, live) for live in family)
        self._queue_family(family)

    def abort(self, request_id: int) -> RequestUpdate | None:
        """End a request now, wherever it stands; None when no such request lives."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(
        self, request_id: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> RequestUpdate | None:
        """End a request for a reason that only the caller sees, such as a stop string in its text."""
        live = self._live.get(request_id)
        if live is None:
            return None
        live.request.stop_reason = stop_reason
        self._finish(live, reason)
        return _update(live)

    def set_drafts(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Propose the tokens that may follow the last known one; the next step verifies them.

        Returns how many were taken: none unless the request runs with all but its last known token committed,
        nothing in flight and no fork to come; never more than its remaining tokens, its RoPE variant or a
        step allow.
        """
        live = self._live.get(request_id)
        if live is None or live.request.status is not RequestStatus.RUNNING or live.num_pending_tokens:
            return 0
        request = live.request
        num_known = len(request.token_ids)
        if request.num_in_flight_tokens or request.num_computed_tokens != num_known - 1 or live.siblings:
            return 0
        room = min(live.end - num_known, self._max_chunk - 1)
        if self._rope_native_len is not None and live.rope_variant == 0:
            room = min(room, self._rope_native_len - num_known)
        request.draft_token_ids = tuple(token_ids[: max(room, 0)])
        return len(request.draft_token_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every published block; False while requests hold some (those stay valid for their holders)."""
        return self._pool.reset_prefix_cache()

    # -- plan ------------------------------------------------------------------------------------------

    def plan(self) -> ScheduledBatch | None:
        """The next step, or None: nothing to do, or everything to do awaits a commit."""
        step = Step(self._budget)
        self._plan_running(step)
        if not step.num_preemptions:  # who was just thrown out would be first to come back
            self._plan_waiting(step)
        if not step.requests:
            return None
        batch = ScheduledBatch(
            self._next_step_id,
            tuple(step.requests),
            tuple(step.new_rows),
            tuple(self._freed_ids),
            tuple(step.block_copies),
        )
        self._next_step_id += 1
        self._freed_ids = []
        self._in_flight.append((batch.step_id, step.in_flight))
        self.num_block_copies += len(step.block_copies)
        self.padding_tokens += sum(request_id not in self._live for request_id in self._static_ids)
        num_tokens = self._budget - step.budget
        self.last_step = StepStats(len(step.requests), step.num_prefill_tokens, num_tokens - step.num_prefill_tokens)
        return batch

    def _plan_running(self, step: Step) -> None:
        running = list(self._running)
        for index, live in enumerate(running):
            if not step.budget:
                break
            request = live.request
            if request.status is not RequestStatus.RUNNING:
                continue  # gave way to a better one
            num_behind = len(running) - index - 1
            num_tokens, num_drafts = self._next_range(live, max(1, step.budget - num_behind))
            if not num_tokens:
                continue
            if self._rope_native_len is not None and self._variant(live) != live.rope_variant:
                self._drop_kv(live)
                self.num_rope_restarts += 1
                continue
            start = request.num_computed_tokens + request.num_in_flight_tokens
            copies = self._tables.grow(request, start, start + num_tokens)
            if copies is None:  # nobody gives way to drafts
                num_tokens, num_drafts = num_tokens - num_drafts, 0
                copies = self._make_room(live, running[index:], start, start + num_tokens, step)
            if copies is not None:
                step.block_copies.extend(copies)
                self._schedule(live, start, num_tokens, num_drafts, step)

    def _next_range(self, live: Live, budget: int) -> tuple[int, int]:
        """(tokens, drafts among them) that a running request computes next; (0, 0) when it awaits a commit."""
        request = live.request
        num_known = live.num_known_tokens
        if num_known > live.end or live.num_draft_steps:
            return 0, 0
        num_tokens = num_known - request.num_computed_tokens - request.num_in_flight_tokens
        if num_tokens > self._max_chunk:
            return min(self._max_chunk, budget), 0
        if num_tokens >= budget or not request.draft_token_ids:
            return min(num_tokens, budget), 0
        num_drafts = min(len(request.draft_token_ids), budget - num_tokens)
        return num_tokens + num_drafts, num_drafts

    def _make_room(
        self, live: Live, candidates: Sequence[Live], start: int, end: int, step: Step
    ) -> BlockCopies | None:
        """Blocks for [start, end) of `live`, if need be those of `candidates`: itself and who comes behind it."""
        while (copies := self._tables.grow(live.request, start, end)) is None:
            holders = [other.request for other in candidates if other.request.status is RequestStatus.RUNNING]
            victim = policy.victim(holders, self._order)
            if victim is live.request:
                return None
            self._preempt(self._live[victim.request_id])
            step.num_preemptions += 1
        return copies

    def _plan_waiting(self, step: Step) -> None:
        if self._is_static:
            self._form_static_batch()
        for live in tuple(self._waiting):
            if not step.budget or len(self._running) >= self._max_num_seqs:
                break
            if self._is_static and live.request.request_id not in self._static_ids:
                continue
            if not self._admit(live, step):
                break

    def _form_static_batch(self) -> None:
        """Once every member has ended, the next requests in line form the batch; the choices of one stay together."""
        if not self._static_ids.isdisjoint(self._live):
            return
        self._static_ids = set()
        for live in self._waiting:
            family = [live.request.request_id, *(sibling.request.request_id for sibling in live.siblings)]
            if self._static_ids and len(self._static_ids) + len(family) > self._max_num_seqs:
                break
            self._static_ids.update(family)

    def _admit(self, live: Live, step: Step) -> bool:
        """Let a waiting request run: its prefix hit, and a first range. False: it, and who is behind it, must wait.

        Everything is derived anew on each attempt; counters move only when it succeeds.
        """
        request = live.request
        num_known = live.num_known_tokens
        headroom = len(self._running) * self._tables.num_groups
        if num_known > live.end or live.num_draft_steps or self._pool.num_free <= headroom:
            return False
        self._set_root(live)
        is_scored = (
            request.sampling.prompt_logprobs is None or live.num_prompt_logprobs >= request.num_prompt_tokens - 1
        )
        # Cached KV has no logits, so whoever still owes prompt logprobs computes the whole prompt.
        reads_cache = self._enable_prefix_caching and is_scored
        hit = self._tables.match(request, live.root) if reads_cache else self._tables.no_match()
        start = hit.num_blocks * self._spec.block_size
        num_tokens = min(num_known - start, step.budget, self._max_chunk)
        if not self._is_chunked and num_tokens < num_known - start:
            return False
        if not self._tables.admit(request, hit, end=start + num_tokens, num_known=num_known, headroom=headroom):
            return False
        self._waiting.remove(live)
        self._run(live)
        request.num_computed_tokens = start
        if not live.is_counted:
            for choice in (live, *live.siblings):
                choice.is_counted = True
                choice.request.num_cached_tokens = start
            if reads_cache:
                self.prefix_query_tokens += request.num_prompt_tokens
                self.prefix_hit_tokens += start
        self._schedule(live, start, num_tokens, 0, step)
        return True

    def _schedule(self, live: Live, start: int, num_tokens: int, num_drafts: int, step: Step) -> None:
        """Put a range, for which there are blocks, into the step."""
        request = live.request
        end = start + num_tokens
        samples = end - num_drafts == live.num_known_tokens and request.max_tokens > 0
        drafts = request.draft_token_ids[:num_drafts]
        request.draft_token_ids = ()
        if not live.has_row:
            live.has_row = True
            step.new_rows.append(live.new_row())
        step.in_flight.append(InFlight(live, live.epoch, start, end, num_drafts, samples))
        request.num_in_flight_tokens += num_tokens
        live.num_pending_tokens += samples
        live.num_draft_steps += num_drafts > 0
        forks = self._fork(live, start, end, step) if samples and live.siblings else []
        step.requests.append(
            ScheduledRequest(
                request.request_id,
                start,
                num_tokens,
                self._tables.frozen(request),
                samples,
                drafts,
                tuple(sibling.request.request_id for sibling in forks),
                live.rope_variant,
            )
        )
        step.budget -= num_tokens
        if num_tokens - num_drafts > 1 or start < request.num_prompt_tokens:
            step.num_prefill_tokens += num_tokens

    def _fork(self, leader: Live, start: int, end: int, step: Step) -> list[Live]:
        """Let the siblings that have room sample in the step that computes [start, end), the end of the prompt."""
        request = leader.request
        # Each fork writes its next token to a block of its own.
        room = min(self._max_num_seqs - len(self._running), self._pool.num_free // self._tables.num_groups)
        siblings, leader.siblings = leader.siblings, []
        forks, others = siblings[:room], siblings[room:]
        for sibling in siblings:
            sibling.leader = None
            sibling.num_prompt_logprobs = request.num_prompt_tokens - 1
        for sibling in forks:
            self._tables.share(request, sibling.request)
            sibling.root, sibling.rope_variant = leader.root, leader.rope_variant
            sibling.request.num_computed_tokens = request.num_computed_tokens
            sibling.request.num_in_flight_tokens = request.num_in_flight_tokens
            sibling.num_pending_tokens = 1
            sibling.has_row = True
            self._run(sibling)
            step.new_rows.append(sibling.new_row())
            step.in_flight.append(InFlight(sibling, sibling.epoch, start, end, 0, True, request.request_id))
        if others:
            self._queue_family(others)
        return forks

    # -- commit ----------------------------------------------------------------------------------------

    def commit(self, batch: ScheduledBatch, output: StepOutput) -> list[RequestUpdate]:
        """Record what a step yielded. Requests that ended meanwhile are skipped."""
        step_id, parts = self._in_flight.popleft()
        assert step_id == batch.step_id == output.step_id, (
            f"steps commit in order: step {step_id} is next, got batch {batch.step_id}, output {output.step_id}"
        )
        updates: list[RequestUpdate] = []
        for part in parts:
            if part.live.request.status is not RequestStatus.FINISHED:
                self._commit_part(part, output, updates)
        return updates

    def _commit_part(self, part: InFlight, output: StepOutput, updates: list[RequestUpdate]) -> None:
        live, request = part.live, part.live.request
        request_id = request.request_id
        live.num_pending_tokens -= part.samples
        live.num_draft_steps -= part.num_drafts > 0
        sampled = output.token_ids.get(request_id, ())
        if output.failed and (error := _failure(part, output)) is not None:
            self._finish(live, FinishReason.ERROR)
            updates.append(_update(live, error=error))
            return
        assert bool(sampled) == part.samples and len(sampled) <= part.num_drafts + 1, (request_id, part, sampled)

        prompt_logprobs = self._new_prompt_logprobs(part, output) if output.prompt_logprobs else ()
        reason, new = self._append_sampled(part, sampled)
        if part.epoch == live.epoch:
            # [start, end - drafts) known tokens, then the drafts that were accepted
            num_computed = part.end - part.num_drafts + max(len(sampled) - 1, 0)
            request.num_in_flight_tokens += request.num_computed_tokens - part.end
            self._tables.advance(request, live.root, min(num_computed, len(request.token_ids)))
        if request.max_tokens == 0 and part.end == request.num_prompt_tokens:
            reason = FinishReason.LENGTH
            for sibling in list(live.siblings):  # nothing is sampled, so nothing sets choices apart
                self._finish(sibling, reason)
                updates.append(_update(sibling))
        if reason is not None:
            self._finish(live, reason)
        if new or prompt_logprobs or reason is not None:
            logprobs = output.logprobs.get(request_id, ())[: len(new)]
            updates.append(_update(live, new, logprobs, prompt_logprobs))

    def _append_sampled(self, part: InFlight, sampled: tuple[int, ...]) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Take sampled tokens until one of them ends the request; what stands behind it is dropped."""
        reason = None
        num_new = 0
        for token_id in sampled:
            reason = part.live.append(token_id)
            num_new += 1
            if reason is not None:
                break
        if part.num_drafts:
            self.num_draft_tokens += part.num_drafts
            self.num_accepted_tokens += num_new - 1
        return reason, sampled[:num_new]

    def _new_prompt_logprobs(self, part: InFlight, output: StepOutput) -> tuple[TokenLogprobs, ...]:
        """Those not delivered yet: a prompt that is computed again yields them again."""
        entries = output.prompt_logprobs.get(part.live.request.request_id, ())
        if not entries:
            return ()
        num_old = part.live.num_prompt_logprobs - part.start
        assert num_old >= 0, f"prompt logprobs of {part} leave a gap"
        new = entries[num_old:]
        part.live.num_prompt_logprobs += len(new)
        return new

    # -- one request changes state ---------------------------------------------------------------------

    def _check_servable(self, request: Request) -> None:
        num_prompt, longest = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
        if not num_prompt:
            raise InvalidRequest("the prompt has no tokens; give at least one.", param="prompt")
        if longest > self._max_model_len or request.max_tokens < 0:
            raise ContextLengthExceeded(
                f"prompt has {num_prompt} tokens and max_tokens is {request.max_tokens}; this model serves "
                f"{self._max_model_len} (--max-model-len). Shorten the prompt or lower max_tokens.",
                param="prompt",
            )
        num_needed = self._spec.max_blocks_per_request(_kv_end(request), self._max_chunk)
        if num_needed > self._pool.num_blocks:
            raise ContextLengthExceeded(
                f"a prompt of {num_prompt} tokens with max_tokens {request.max_tokens} needs up to {num_needed} KV "
                f"blocks; the cache has {self._pool.num_blocks}. Shorten it, or raise --kv-cache-memory-bytes to at "
                f"least {num_needed * self._spec.bytes_per_block}.",
                param="prompt",
            )

    def _make_live(self, request: Request, cache_extra: bytes) -> Live:
        sampling = request.sampling
        return Live(
            request=request,
            rank=self._order(request),
            cache_extra=cache_extra,
            end=_kv_end(request),
            eos_token_ids=frozenset() if sampling.ignore_eos else self._eos_token_ids,
            stop_token_ids=frozenset(sampling.stop_token_ids),
        )

    def _queue_family(self, family: Sequence[Live]) -> None:
        leader, *siblings = family
        leader.leader, leader.siblings = None, siblings
        for sibling in siblings:
            sibling.leader = leader
        insort(self._waiting, leader, key=_rank)

    def _variant(self, live: Live) -> int:
        return int(self._rope_native_len is not None and live.num_known_tokens > self._rope_native_len)

    def _set_root(self, live: Live) -> None:
        variant = self._variant(live)
        if live.root and variant == live.rope_variant:
            return
        live.rope_variant = variant
        live.root = root_key(
            self._cache_identity, rope_variant=variant, salt=live.request.cache_salt, extra=live.cache_extra
        )
        self._tables.forget_keys(live.request)

    def _run(self, live: Live) -> None:
        live.request.status = RequestStatus.RUNNING
        insort(self._running, live, key=_rank)

    def _preempt(self, live: Live) -> None:
        self._drop_kv(live)
        live.request.num_preemptions += 1
        self.num_preemptions += 1

    def _drop_kv(self, live: Live) -> None:
        """Back to the queue without KV; tokens, row and pending samples stay."""
        request = live.request
        self._running.remove(live)
        self._tables.free(request)
        live.epoch += 1
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_in_flight_tokens = 0
        request.draft_token_ids = ()
        insort(self._waiting, live, key=_rank)

    def _finish(self, live: Live, reason: FinishReason) -> None:
        """The only way out. Siblings that still wait for this request's prompt get a new leader."""
        request = live.request
        if request.status is RequestStatus.RUNNING:
            self._running.remove(live)
            self._tables.free(request)
        elif live.leader is not None:
            live.leader.siblings.remove(live)
        else:
            self._waiting.remove(live)
        if live.siblings:
            self._queue_family(live.siblings)
        del self._live[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_in_flight_tokens = 0
        if live.has_row:
            self._freed_ids.append(request.request_id)

    def check(self) -> None:
        """Assert the invariants of the queues and of the pool."""
        self._pool.check(live.request for live in self._live.values())
        siblings = [sibling for live in self._live.values() for sibling in live.siblings]
        queued = [*self._running, *self._waiting, *siblings]
        assert {id(live) for live in queued} == {id(live) for live in self._live.values()}, "a request is in no queue"
        assert len(queued) == len(self._live), "a request is in two queues"
        assert len(self._running) <= self._max_num_seqs
        for queue in (self._running, self._waiting):
            assert [live.rank for live in queue] == sorted(live.rank for live in queue), "a queue is out of order"
        for live in self._live.values():
            request = live.request
            is_running = request.status is RequestStatus.RUNNING
            assert is_running == bool(request.block_ids) and is_running == (live in self._running), request.request_id
            assert request.num_computed_tokens + request.num_in_flight_tokens <= live.end, request.request_id
            if not self._in_flight:
                assert not live.num_pending_tokens and not live.num_draft_steps and not request.num_in_flight_tokens


def _rank(live: Live) -> policy.Rank:
    return live.rank


def _kv_end(request: Request) -> int:
    """KV of tokens at and beyond this position is never needed: the last token is only sampled."""
    return request.num_prompt_tokens + max(request.max_tokens - 1, 0)


def _failure(part: InFlight, output: StepOutput) -> str | None:
    """Why this request cannot go on. A fork without logits of its own shares the failure of its leader."""
    request_id = part.live.request.request_id
    if request_id in output.failed:
        return output.failed[request_id]
    if part.leader_id is not None and request_id not in output.token_ids:
        return output.failed.get(part.leader_id)
    return None


def _update(
    live: Live,
    new_token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    error: str | None = None,
) -> RequestUpdate:
    request = live.request
    return RequestUpdate(
        request.request_id,
        request.choice,
        new_token_ids,
        logprobs,
        prompt_logprobs,
        None if request.finish_reason is None else request.finish_reason.value,
        request.stop_reason,
        request.num_cached_tokens,
        request.num_preemptions,
        error,
    )
