"""One client request while the engine works on it: the deltas of all its prompts as one stream, and their usage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from octavo.engine.client import EngineClient
from octavo.engine.events import ChoiceDelta, GenerationRequest, TokenDetail
from octavo.errors import RequestFailed
from octavo.request import FinishReason


class Generation:
    """Runs one engine request per prompt. Choices count over all prompts: prompt_index * n + choice.

    `prompt_details[prompt_index]` is complete before the first delta of any choice of that prompt.
    """

    def __init__(self, client: EngineClient, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self.num_choices_per_prompt = requests[0].sampling.n
        self.num_choices = len(requests) * self.num_choices_per_prompt
        self.prompt_details: list[tuple[TokenDetail, ...]] = [()] * len(requests)
        self._client = client
        self._num_output_tokens = [0] * self.num_choices
        self._num_cached_tokens = [0] * len(requests)

    def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Every delta of every choice. Raises the RequestError that ends the request; closing it aborts the rest."""
        return self._of_prompt(0) if len(self.requests) == 1 else self._merged()

    @property
    def num_output_tokens(self) -> int:
        return sum(self._num_output_tokens)

    def usage(self, *, details: bool) -> dict[str, Any]:
        """What has been used so far; a prompt counts once, however many choices it has."""
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": num_prompt_tokens + self.num_output_tokens,
        }
        if details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._num_cached_tokens)}
        return usage

    async def _of_prompt(self, index: int) -> AsyncGenerator[ChoiceDelta, None]:
        first_choice = index * self.num_choices_per_prompt
        # The details of the prompt come with choice 0; what other choices said before has to wait for them.
        waits_for_details = self.requests[index].sampling.prompt_logprobs is not None
        held: list[ChoiceDelta] = []
        async with aclosing(self._source(self.requests[index])) as deltas:
            async for delta in deltas:
                if delta.finish_reason == FinishReason.ERROR.value:
                    raise RequestFailed(delta.error or "The engine failed on this request.")
                if waits_for_details:
                    if delta.choice != 0:
                        held.append(delta)
                        continue
                    waits_for_details = False
                    self.prompt_details[index] = delta.prompt_logprobs
                    for early in (delta, *held):
                        yield self._count(early, index, first_choice)
                    continue
                yield self._count(delta, index, first_choice)

    def _count(self, delta: ChoiceDelta, index: int, first_choice: int) -> ChoiceDelta:
        choice = first_choice + delta.choice
        self._num_output_tokens[choice] = delta.num_output_tokens
        if delta.num_cached_tokens > self._num_cached_tokens[index]:
            self._num_cached_tokens[index] = delta.num_cached_tokens
        return delta if first_choice == 0 else replace(delta, choice=choice)

    def _source(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        if request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None:
            return _nothing(request.sampling.n)
        return self._client.generate(request)

    async def _merged(self) -> AsyncGenerator[ChoiceDelta, None]:
        arrived: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue()

        async def forward(index: int) -> None:
            try:
                async with aclosing(self._of_prompt(index)) as deltas:
                    async for delta in deltas:
                        arrived.put_nowait(delta)
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(forward(index)) for index in range(len(self.requests))]
        num_open = len(tasks)
        try:
            while num_open:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _nothing(num_choices: int) -> AsyncGenerator[ChoiceDelta, None]:
    """A request for no tokens and no scores: the engine has nothing to do."""
    for choice in range(num_choices):
        yield ChoiceDelta(choice, finish_reason=FinishReason.LENGTH.value)
