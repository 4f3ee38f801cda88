"""A real server over a fake engine: real HTTP, real tokenizer, real detokenizer; the tokens are pseudo-random."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from octavo.batch import RequestUpdate, TokenLogprobs
from octavo.config import Config
from octavo.engine.events import ChoiceDelta, EngineInfo, GenerationRequest
from octavo.engine.output import ChoiceOutput
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest, RequestFailed, Unavailable
from octavo.metrics import Metrics
from octavo.server.run import HttpServer, new_event_loop

MODEL = "tiny"
MAX_MODEL_LEN = 512

_CORPUS = [
    "The old lighthouse keeper opened the door and looked at the sea. It was a calm evening, and the light was on.",
    "LLMs are fun. It is so; yes! OK? She said: café, naïve, 日本語, 🀄🦚, ěščř. Numbers: 1, 2, 3, 4, 5, 6, 7, 8.",
    "def main(): return {'a': [1, 2, 3]}  # comment",
]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(*, adds_bos: bool = False, chat_template: str | None = _CHATML) -> Tokenizer:
    """A byte-level BPE of a few hundred tokens: every character can be written, many need several tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(_CORPUS, trainer)
    inner.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<s>", "<|im_start|>", "<|im_end|>")]
    )
    if adds_bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    return Tokenizer(
        inner,
        special_tokens={"bos_token": "<s>", "eos_token": "<|im_end|>"},
        chat_templates={"default": chat_template} if chat_template else None,
    )


class FakeEngine:
    """An `EngineClient` whose model is a hash: the same prompt, seed, choice and position give the same token.

    `step_s` is the time of a step; `script` replaces the model; `failure` is raised at step `fails_at`. When
    `steps` is set, every step waits for a permit of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: Config,
        *,
        step_s: float = 0.0,
        script: Callable[[GenerationRequest, int, int], int] | None = None,
        fails_at: int | None = None,
        failure: Exception | None = None,
        tokens_per_step: int = 1,
        default_sampling: Mapping[str, float | int] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.metrics = Metrics()
        self.state = "ready"
        self.state_reason = "ready"
        self.num_queued = 0
        self.step_s = step_s
        self.fails_at = fails_at
        self.failure = failure or RequestFailed("The logits of this request are not finite.")
        self.steps: asyncio.Semaphore | None = None
        self.live: dict[str, GenerationRequest] = {}
        self.seen: list[GenerationRequest] = []
        self.num_aborted = 0
        self.prefix_cache_is_free = True
        self._tokenizer = tokenizer
        self._script = script or self._hashed
        self._tokens_per_step = tokens_per_step
        self._aborting: set[str] = set()
        self._max_queued = config.server.max_queued_requests
        self._info = EngineInfo(
            model="models/tiny",
            served_model_names=config.model.served_model_name or (MODEL,),
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            default_sampling=dict(default_sampling or {}),
            created_s=1_700_000_000,
        )

    @property
    def info(self) -> EngineInfo:
        if self.state == "starting":
            raise Unavailable("The model is not ready.", retry_after_s=1.0)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def generate(self, request: GenerationRequest) -> AsyncIterator[ChoiceDelta]:
        if self.state != "ready":
            raise Unavailable("The server takes no requests now.", retry_after_s=1.0)
        if request.request_id in self.live:
            raise InvalidRequest(f"request_id {request.request_id!r} is taken.", param="request_id")
        n = request.sampling.n
        if self.num_queued + n > self._max_queued:
            raise Unavailable("The queue is full.", code="queue_full", retry_after_s=1.0)
        self.live[request.request_id] = request
        self.seen.append(request)
        self.num_queued += n
        queued, ended = n, False
        try:
            outputs = [ChoiceOutput(i, self._tokenizer, request.prompt_token_ids, request.sampling) for i in range(n)]
            step = 0
            while not all(output.is_finished for output in outputs):
                if self.steps is not None:
                    await self.steps.acquire()
                await asyncio.sleep(self.step_s)
                self.num_queued -= queued
                queued = 0
                if step == self.fails_at:
                    raise self.failure
                for output in outputs:
                    if output.is_finished:
                        continue
                    if request.request_id in self._aborting:
                        yield output.abort()
                    elif (delta := output.push(self._update(request, output, step))) is not None:
                        yield delta
                step += 1
            ended = True
        finally:
            self.num_queued -= queued
            self.num_aborted += not ended
            self.live.pop(request.request_id, None)
            self._aborting.discard(request.request_id)

    async def abort(self, request_id: str) -> bool:
        if request_id not in self.live:
            return False
        self._aborting.add(request_id)
        return True

    def allow(self, num_steps: int) -> None:
        assert self.steps is not None
        for _ in range(num_steps):
            self.steps.release()

    async def reset_prefix_cache(self) -> bool:
        return self.prefix_cache_is_free

    def timeline(self, request_id: str) -> dict[str, object] | None:
        return {"request_id": request_id, "state": "running"} if request_id in self.live else None

    async def drain(self, timeout_s: float) -> None:
        self.state, self.state_reason = "draining", "the server is shutting down"
        deadline = time.monotonic() + timeout_s
        while self.live and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._aborting |= set(self.live)

    async def close(self) -> None:
        self.state = "dead"

    def _update(self, request: GenerationRequest, output: ChoiceOutput, step: int) -> RequestUpdate:
        """What the engine would report of this choice for one step."""
        sampling, position = request.sampling, step * self._tokens_per_step
        token_ids, finish_reason, stop_reason = [], None, None
        for i in range(position, min(position + self._tokens_per_step, sampling.max_tokens)):
            token_id = self._script(request, output.choice, i)
            token_ids.append(token_id)
            may_end = i + 1 > sampling.min_tokens
            if token_id in self._info.eos_token_ids and not sampling.ignore_eos and may_end:
                finish_reason = "stop"
            elif token_id in sampling.stop_token_ids and may_end:
                finish_reason, stop_reason = "stop", token_id
            if finish_reason is not None:
                break
        if finish_reason is None and position + self._tokens_per_step >= sampling.max_tokens:
            finish_reason = "length"
        logprobs = prompt_logprobs = ()
        if sampling.logprobs is not None:
            logprobs = tuple(self._logprobs(token_id, sampling.logprobs) for token_id in token_ids)
        if sampling.prompt_logprobs is not None and step == 0 and output.choice == 0:
            rest = request.prompt_token_ids[1:]
            prompt_logprobs = tuple(self._logprobs(token_id, sampling.prompt_logprobs) for token_id in rest)
        return RequestUpdate(
            request_id=0,
            choice=output.choice,
            new_token_ids=tuple(token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=len(request.prompt_token_ids) // 16 * 16 if step == 0 else 0,
        )

    def _hashed(self, request: GenerationRequest, choice: int, position: int) -> int:
        random_ = random.Random(repr((request.prompt_token_ids, request.sampling.seed, choice, position)))
        ordinary = self._info.vocab_size - 3
        bias = request.sampling.logit_bias
        if bias:
            return max(bias, key=lambda token_id: (bias[token_id], -token_id))
        return random_.randrange(ordinary) if random_.random() > 0.02 else self._info.eos_token_ids[0]

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        others = [(token_id * 7 + 13 * i) % self._info.vocab_size for i in range(num_top)]
        logprobs = tuple(-0.5 - 0.25 * i for i in range(num_top))
        return TokenLogprobs(token_id, -0.5 - token_id / 1000, 1 + token_id % 5, tuple(others), logprobs)


@dataclasses.dataclass(eq=False)
class Running:
    """A server in a thread. `call` runs a function in its event loop."""

    url: str
    engine: FakeEngine
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    exit_codes: list[int]

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, **options)


def configured(**server: Any) -> Config:
    """The default configuration with these server options."""
    base = Config()
    return dataclasses.replace(base, server=dataclasses.replace(base.server, **{"port": 0, **server}))


@contextmanager
def running(config: Config, make_engine: Callable[[], FakeEngine]) -> Iterator[Running]:
    """Serve on a free port for the length of the block; asserts at its end that nothing is left behind."""
    listening = threading.Event()
    started: list[Running] = []
    failures: list[BaseException] = []
    exit_codes: list[int] = []

    async def main() -> None:
        engine = make_engine()
        server = HttpServer(engine, config)

        def on_listening(url: str) -> None:
            started.append(Running(url, engine, server, asyncio.get_running_loop(), thread, exit_codes))
            listening.set()

        exit_codes.append(await server.run(on_listening))

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            listening.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    listening.wait(10)
    if failures:
        raise failures[0]
    it = started[0]
    try:
        yield it
    finally:
        if thread.is_alive():
            it.loop.call_soon_threadsafe(it.server.shut_down)
            thread.join(10)
            if thread.is_alive():
                it.loop.call_soon_threadsafe(it.server.shut_down)
                thread.join(10)
    assert not thread.is_alive(), "the server did not stop"
    assert not failures, failures
    assert not it.engine.live, "requests are still running in the engine"
    assert it.engine.num_queued == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
