"""A language model small enough to check by hand, and a worker that runs it over the real block tables.

The KV of a token is an integer that depends on the token, the KV of the token before it and the first KV that
its query sees, in the group's window; so any wrong, stale, foreign or early-freed block changes what follows.
`naive` computes the same answer from a list of tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.batch import NewRow, ScheduledBatch, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.kv_cache.cache_spec import KvCacheSpec

VOCAB = 6
EOS = 5
MASK = (1 << 61) - 1


@dataclass(frozen=True, slots=True)
class ToyModel:
    windows: tuple[int | None, ...]  # by KV group
    rope_native_len: int | None = None

    def variant(self, num_known_tokens: int) -> int:
        return int(self.rope_native_len is not None and num_known_tokens > self.rope_native_len)

    def first_key(self, group: int, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def value(
        self, read: Callable[[int], int], group: int, position: int, token_id: int, variant: int, tenant: int
    ) -> int:
        """The KV of one token; `read` gives the KV of an earlier position of the same group."""
        first = self.first_key(group, position)
        before = (read(position - 1), read(first)) if first < position else (0, 0)
        return hash((*before, token_id, group, variant, tenant)) & MASK

    def score(self, visible: Sequence[Sequence[int]]) -> int:
        """What the logits are made of: everything that the last query sees, group by group."""
        return hash(tuple(map(tuple, visible))) & MASK


def pick(score: int, seed: int) -> int:
    return (hash((score, seed)) & MASK) % VOCAB


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | None
    prompt_scores: tuple[int, ...]  # of prompt tokens 1 ...
    scores: tuple[int, ...]


def naive(
    model: ToyModel,
    prompt: Sequence[int],
    *,
    seed: int,
    tenant: int,
    max_tokens: int,
    min_tokens: int = 0,
    eos: bool = True,
    stop_token_ids: Sequence[int] = (),
) -> Answer:
    """One token after the other, the whole context in a list, nothing shared with anybody."""
    token_ids = list(prompt)
    groups = range(len(model.windows))
    kv: list[list[int]] = [[] for _ in groups]
    kv_variant = model.variant(len(token_ids))

    def extend() -> None:
        for g in groups:
            for p in range(len(kv[g]), len(token_ids)):
                kv[g].append(model.value(kv[g].__getitem__, g, p, token_ids[p], kv_variant, tenant))

    def score(p: int) -> int:
        return model.score([kv[g][model.first_key(g, p) : p + 1] for g in groups])

    extend()
    prompt_scores = tuple(score(p) for p in range(len(prompt) - 1))
    scores: list[int] = []
    while len(scores) < max_tokens:
        if model.variant(len(token_ids)) != kv_variant:
            kv_variant, kv = 1, [[] for _ in groups]
        extend()
        scores.append(score(len(token_ids) - 1))
        token_ids.append(pick(scores[-1], seed))
        if min_tokens <= len(scores) < max_tokens:
            if eos and token_ids[-1] == EOS:
                return Answer(tuple(token_ids[len(prompt) :]), "stop", None, prompt_scores, tuple(scores))
            if token_ids[-1] in stop_token_ids:
                return Answer(tuple(token_ids[len(prompt) :]), "stop", token_ids[-1], prompt_scores, tuple(scores))
    return Answer(tuple(token_ids[len(prompt) :]), "length", None, prompt_scores, tuple(scores))


@dataclass(slots=True)
class Row:
    new: NewRow
    token_ids: list[int] = field(default_factory=list)


class ToyRunner:
    """Executes batches as the worker does. Asserts the contract on rows, ranges and tables."""

    def __init__(self, model: ToyModel, spec: KvCacheSpec, num_blocks: int, tenant_of: Mapping[int, int]) -> None:
        self.model = model
        self.size = spec.block_size
        self.slots: list[int | None] = [None] * (num_blocks * spec.block_size)
        self.rows: dict[int, Row] = {}
        self.tenant_of = tenant_of
        self.step_id = -1
        self.fail_ids: set[int] = set()  # requests whose next sample fails

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        assert batch.step_id == self.step_id + 1, "steps execute in order"
        self.step_id = batch.step_id
        for request_id in batch.freed_request_ids:
            del self.rows[request_id]
        for new in batch.new_rows:
            assert new.request_id not in self.rows, "a row is sent once"
            self.rows[new.request_id] = Row(new, list(new.token_ids))
        for source, destination in batch.block_copies:
            a, b = source * self.size, destination * self.size
            self.slots[b : b + self.size] = self.slots[a : a + self.size]
        ids = [request_id for r in batch.requests for request_id in (r.request_id, *r.fork_ids)]
        assert len(set(ids)) == len(ids), "a request is scheduled twice in one step"
        output = StepOutput(batch.step_id)
        for request in batch.requests:
            self._compute(request, output)
        return output

    def _compute(self, request: ScheduledRequest, output: StepOutput) -> None:
        model, row = self.model, self.rows[request.request_id]
        end = request.start + request.num_tokens
        num_known = end - len(request.draft_token_ids)
        assert request.num_tokens > 0 and num_known <= len(row.token_ids), "the range is beyond the row's tokens"
        assert request.samples <= (num_known == len(row.token_ids)), "sampling would skip a known token"
        token_ids = [*row.token_ids[:num_known], *request.draft_token_ids]
        tenant = self.tenant_of[request.request_id]
        for group, table in enumerate(request.block_ids):

            def read(position: int, table: tuple[int, ...] = table) -> int:
                return self._read(table, position)

            for p in range(request.start, end):
                slot = self._slot(table, p)
                self.slots[slot] = model.value(read, group, p, token_ids[p], request.rope_variant, tenant)
        self._score_prompt(request, row, output)
        if request.samples:
            for request_id in (request.request_id, *request.fork_ids):
                self._sample(request, self.rows[request_id], num_known, token_ids, output)

    def _sample(
        self, request: ScheduledRequest, row: Row, num_known: int, token_ids: Sequence[int], output: StepOutput
    ) -> None:
        request_id = row.new.request_id
        if request_id in self.fail_ids:
            self.fail_ids.remove(request_id)
            output.failed[request_id] = "non-finite logits"
            row.token_ids.append(0)  # the next step may be planned already, beyond this token
            return
        seed = row.new.sampling.seed
        assert seed is not None
        new: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for position in range(num_known - 1, request.start + request.num_tokens):
            score = self._score(request, position)
            new.append(pick(score, seed))
            logprobs.append(TokenLogprobs(new[-1], float(score), 1))
            if position + 1 < len(token_ids) and token_ids[position + 1] != new[-1]:
                break
        row.token_ids += new
        output.token_ids[request_id] = tuple(new)
        output.logprobs[request_id] = tuple(logprobs)

    def _score_prompt(self, request: ScheduledRequest, row: Row, output: StepOutput) -> None:
        if row.new.sampling.prompt_logprobs is None:
            return
        end = min(request.start + request.num_tokens, row.new.num_prompt_tokens - 1)
        entries = [
            TokenLogprobs(row.token_ids[p + 1], float(self._score(request, p)), 1) for p in range(request.start, end)
        ]
        if entries:
            output.prompt_logprobs[request.request_id] = tuple(entries)

    def _score(self, request: ScheduledRequest, position: int) -> int:
        return self.model.score(
            [
                [self._read(table, p) for p in range(self.model.first_key(group, position), position + 1)]
                for group, table in enumerate(request.block_ids)
            ]
        )

    def _slot(self, table: tuple[int, ...], position: int) -> int:
        block_id = table[position // self.size]
        assert block_id >= 0, f"position {position} lies in a block that was given up"
        return block_id * self.size + position % self.size

    def _read(self, table: tuple[int, ...], position: int) -> int:
        value = self.slots[self._slot(table, position)]
        assert value is not None, f"position {position} was never written"
        return value
