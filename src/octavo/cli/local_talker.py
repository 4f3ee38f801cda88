"""An engine in this process that answers in `octavo chat`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from octavo.cli.talk import Message, Settings, Usage
from octavo.config import Config
from octavo.engine.events import ChoiceDelta, GenerationRequest
from octavo.engine.limits import check_limits
from octavo.engine.llm import AsyncLLM
from octavo.errors import RequestFailed
from octavo.request import SamplingParams


class LocalTalker:
    """An engine in a thread; its event loop runs while an answer is awaited, so that Ctrl-C reaches it."""

    def __init__(self, config: Config, settings: Settings) -> None:
        self.model = config.model.model
        self.usage = Usage()
        self._settings = settings
        self._ids = itertools.count(1)
        self._runner = asyncio.Runner()
        self._llm = AsyncLLM(config=config)
        try:
            self._runner.run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        tokenizer, info = self._llm.tokenizer, self._llm.info
        prompt = tokenizer.render_chat(messages, add_generation_prompt=True)
        token_ids = tuple(tokenizer.encode(prompt, add_special_tokens=False))
        sampling = SamplingParams(**{**info.default_sampling, "max_tokens": None, **self._settings.given()})
        check_limits(token_ids, sampling, info)
        request = GenerationRequest(
            request_id=f"chat-{next(self._ids)}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            arrival_s=time.monotonic(),
        )
        self.usage = Usage(prompt_tokens=len(token_ids))
        deltas = self._llm.generate(request)
        try:
            while (delta := self._runner.run(_next(deltas))) is not None:
                self.usage.output_tokens = delta.num_output_tokens
                self.usage.cached_tokens = max(self.usage.cached_tokens, delta.num_cached_tokens)
                self.usage.finish_reason = delta.finish_reason or ""
                if delta.error is not None:
                    raise RequestFailed(delta.error)
                if delta.text:
                    yield delta.text
        finally:
            self._runner.run(deltas.aclose())

    def close(self) -> None:
        self._runner.run(self._llm.close())
        self._runner.close()


async def _next(deltas: AsyncGenerator[ChoiceDelta, None]) -> ChoiceDelta | None:
    return await anext(deltas, None)
