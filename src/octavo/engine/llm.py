"""`LLM`: the engine in the caller's process, for offline work. `AsyncLLM`: the same for asyncio programs."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from octavo.config import Config, make_config
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.build import build_engine
from octavo.engine.events import ChoiceDelta, GenerationRequest, TokenDetail
from octavo.engine.limits import check_limits
from octavo.engine.messages import AddRequest, Vocabulary
from octavo.engine.model_files import load_model_tokenizer
from octavo.engine.output import ChoiceOutput
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.transport import ThreadTransport
from octavo.errors import InvalidRequest
from octavo.request import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One choice, folded."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenDetail] | None = None
    finish_reason: str | None = None  # stop, length, or error: then `error` says why
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the output tokens; None unless logprobs were asked for."""
        return None if self.logprobs is None else sum(detail.logprob or 0.0 for detail in self.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenDetail] | None = None
    num_cached_tokens: int = 0

    def add(self, delta: ChoiceDelta) -> None:
        output = self.outputs[delta.choice]
        output.text += delta.text
        output.token_ids += delta.token_ids
        if output.logprobs is not None:
            output.logprobs += delta.logprobs
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += delta.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        output.finish_reason, output.stop_reason, output.error = delta.finish_reason, delta.stop_reason, delta.error


class LLM:
    """A model in this process.

    `options` are those of `octavo serve`, with underscores: LLM("model", max_model_len=4096, dtype="float32").
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        config = make_config(options)
        self.tokenizer: Tokenizer = load_model_tokenizer(config)
        known = Vocabulary(self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        self._core, self.info = build_engine(config, vocabulary=lambda: known)
        self._heeds_priority = config.scheduler.scheduling_policy == "priority"
        self._ids = itertools.count(1)

    def default_sampling_params(self) -> SamplingParams:
        """Neutral parameters with the model's own defaults over them."""
        return SamplingParams(**self.info.default_sampling)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, token ids, or {"prompt": text} / {"prompt_token_ids": ids, "cache_salt": ...}.

        Results come in the order of the prompts. Raises InvalidRequest before anything runs when one of them
        cannot be served; one that fails on the way ends alone, with finish_reason "error".
        """
        many = _as_list(prompts)
        params = self._params(sampling_params, len(many))
        if priority is not None:
            self._check_priorities(priority, len(many))
        requests = [self._request(prompt, params[i], priority[i] if priority else 0) for i, prompt in enumerate(many)]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        conversations: Sequence[Any] = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        params = self._params(sampling_params, len(conversations))
        requests = []
        for conversation, sampling in zip(conversations, params, strict=True):
            text = self.tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            # The template writes its own special tokens.
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            requests.append(self._request({"prompt": text, "prompt_token_ids": token_ids}, sampling, 0))
        return self._run(requests, use_tqdm)

    def reset_prefix_cache(self) -> bool:
        return self._core.reset_prefix_cache()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, or a list with one for each prompt; got {given!r:.200}.",
                param="sampling_params",
            )
        if len(given) != count:
            raise InvalidRequest(
                f"{count} prompts came with {len(given)} sampling parameters.", param="sampling_params"
            )
        return list(given)

    def _check_priorities(self, given: Sequence[int], count: int) -> None:
        if not self._heeds_priority:
            raise InvalidRequest(
                'priority is not heeded: this LLM was made without scheduling_policy="priority".', param="priority"
            )
        if not isinstance(given, Sequence) or any(type(one) is not int for one in given):
            raise InvalidRequest(f"priority must be a list of integers, got {given!r:.200}.", param="priority")
        if len(given) != count:
            raise InvalidRequest(f"{count} prompts came with {len(given)} priorities.", param="priority")

    def _request(self, prompt: Prompt, sampling: SamplingParams, priority: int) -> GenerationRequest:
        text, token_ids, cache_salt = self._tokenize(prompt)
        check_limits(token_ids, sampling, self.info)
        return GenerationRequest(
            request_id=f"offline-{next(self._ids)}",
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            prompt_text=text,
            arrival_s=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt), ""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
                raise InvalidRequest(
                    "a prompt given as a mapping has 'prompt' or 'prompt_token_ids', and 'cache_salt'; "
                    f"got {sorted(prompt)}.",
                    param="prompt",
                )
            text, cache_salt = prompt.get("prompt"), prompt.get("cache_salt", "")
            for name, value in (("prompt", text or ""), ("cache_salt", cache_salt)):
                if not isinstance(value, str):
                    raise InvalidRequest(f"{name} must be a string, got {value!r:.200}.", param=name)
            if "prompt_token_ids" in prompt:
                return text, _checked_ids(prompt["prompt_token_ids"]), cache_salt
            return text, self.tokenizer.encode(text or ""), cache_salt
        return None, _checked_ids(prompt), ""

    def _run(self, requests: Sequence[GenerationRequest], use_tqdm: bool) -> list[RequestOutput]:
        results: list[RequestOutput] = []
        open_choices: dict[int, tuple[RequestOutput, ChoiceOutput]] = {}
        with _interrupts_between_steps() as interrupt:
            try:
                for request in requests:
                    results.append(self._add(request, open_choices))
                with tqdm(total=len(open_choices), desc="Generating", unit="choice", disable=not use_tqdm) as progress:
                    while open_choices:
                        progress.update(self._step(open_choices))
                        interrupt()
            finally:
                self._core.abort(tuple(open_choices))
        return results

    def _add(
        self, request: GenerationRequest, open_choices: dict[int, tuple[RequestOutput, ChoiceOutput]]
    ) -> RequestOutput:
        sampling = request.sampling
        first_id = next(self._ids)
        for _ in range(sampling.n - 1):
            next(self._ids)
        bad_words = self.tokenizer.bad_words_token_ids(sampling.bad_words) if sampling.bad_words else ()
        result = RequestOutput(
            request.request_id,
            request.prompt_text,
            list(request.prompt_token_ids),
            [CompletionOutput(i, logprobs=None if sampling.logprobs is None else []) for i in range(sampling.n)],
            None if sampling.prompt_logprobs is None else [],
        )
        for choice in range(sampling.n):
            output = ChoiceOutput(choice, self.tokenizer, request.prompt_token_ids, sampling)
            open_choices[first_id + choice] = (result, output)
        self._core.add(
            AddRequest(
                first_id,
                request.prompt_token_ids,
                sampling,
                request.arrival_s,
                request.priority,
                request.cache_salt,
                bad_words,
            )
        )
        return result

    def _step(self, open_choices: dict[int, tuple[RequestOutput, ChoiceOutput]]) -> int:
        """Run one step; returns how many choices it ended."""
        report = self._core.step()
        assert report is not None, f"{len(open_choices)} choices are open, but the engine has nothing to do"
        num_ended = 0
        for update in report.updates:
            if update.request_id not in open_choices:
                continue
            result, output = open_choices[update.request_id]
            delta = output.push(update)
            if delta is None:
                continue
            result.add(delta)
            if output.is_finished:
                del open_choices[update.request_id]
                num_ended += 1
                if update.finish_reason is None:  # a stop string, which the engine cannot see
                    self._core.abort((update.request_id,))
        return num_ended


class AsyncLLM(AsyncEngine):
    """The engine in a thread of this process, for asyncio programs: `await start()`, then `generate`."""

    def __init__(self, model: str | None = None, *, config: Config | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        config = make_config(options, base=config)
        super().__init__(config, ThreadTransport(), lambda: load_model_tokenizer(config))

    async def start(self) -> None:
        """Load the model and return when requests can be served."""
        await super().start()
        await self.wait_ready()

    def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """As `AsyncEngine.generate`. Raises InvalidRequest at once for what the model cannot serve."""
        check_limits(request.prompt_token_ids, request.sampling, self.info)
        return super().generate(request)


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts must be a prompt or a list of them, got {prompts!r:.200}.", param="prompt")
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], int) else many


def _checked_ids(token_ids: object) -> Sequence[int]:
    if (
        isinstance(token_ids, bytes)
        or not isinstance(token_ids, Sequence)
        or any(type(token_id) is not int for token_id in token_ids)
    ):
        raise InvalidRequest(f"a prompt must be text or a list of token ids, got {token_ids!r:.200}.", param="prompt")
    return token_ids


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the yielded function is called, or the block ends; a second one does not wait.

    A step that is cut off in the middle would leave an engine that cannot go on.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        held.append((number, frame))
        if len(held) > 1:
            deliver()

    def deliver() -> None:
        if held:
            arguments = held[-1]
            held.clear()
            handler(*arguments)

    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
    deliver()
