"""`octavo bench serve`: finds out about the server, makes the workload, runs it, and puts the result together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.bench.arrivals import arrival_times
from octavo.bench.client import CHAT, COMPLETIONS, Client
from octavo.bench.http_client import Address, ConnectionBroken, HttpClient
from octavo.bench.load import LoadRun, run_load
from octavo.bench.options import DatasetOptions, LoadOptions, ResultOptions, SamplingOptions, TargetOptions
from octavo.bench.process_usage import is_local, listeners
from octavo.bench.prompts import PromptMaker
from octavo.bench.summary import DETAILS, Selection, combine, summarize
from octavo.bench.workload import MADE_UP, BenchRequest, Workload, make_probe, make_workload
from octavo.config import cache_dir, read_environment
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import ConfigError, LoadError, RequestFailed, Unavailable
from octavo.loader.source import resolve_source

Note = Callable[[str], None]

_TRY_AGAIN_S = 0.5
_PROBE_TOKENS = 16
_MOST_REASONS = 5
_HIGH_CPU_SHARE = 0.8
_HIGH_DELAY_MS = 100.0
# Statuses of a server, or of a gateway before it, that is still loading; 0 is a connection that was refused.
_NOT_YET = (0, 502, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    target: TargetOptions
    dataset: DatasetOptions
    load: LoadOptions
    sampling: SamplingOptions
    result: ResultOptions


@dataclass(frozen=True, slots=True)
class ServeOutcome:
    """The result as it is saved, and what it was made of."""

    result: dict[str, Any]
    runs: list[LoadRun]

    @property
    def failures(self) -> Counter[str]:
        """How often each error came, the most frequent first."""
        errors = Counter(record.error for run in self.runs for record in run.records if record.error)
        return Counter(dict(errors.most_common(_MOST_REASONS)))

    @property
    def warnings(self) -> list[str]:
        """What makes the numbers doubtful."""
        share, delay_ms = self.result["client_cpu_share"], self.result["client_max_send_delay_ms"]
        found = []
        if share > _HIGH_CPU_SHARE:
            found.append(f"the client itself used {share:.0%} of a core; the server may be faster than it could tell")
        if delay_ms > _HIGH_DELAY_MS and self.result["request_rate"] != "inf":
            found.append(f"a request was sent {delay_ms:.0f} ms late; the client could not keep the rate")
        return found


class ServeBenchmark:
    """One invocation. The constructor refuses whatever is wrong with the options alone."""

    def __init__(self, options: ServeOptions, note: Note) -> None:
        self._options = options
        self._note = note
        self.selection = Selection.parse(options.result)
        self._metadata = key_values("--metadata", options.result.metadata)
        target = options.target
        self._is_chat = target.backend == "openai-chat"
        self._endpoint = target.endpoint or (CHAT if self._is_chat else COMPLETIONS)
        if not self._endpoint.startswith("/"):
            raise ConfigError(f"--endpoint is {self._endpoint}; it must be a path that begins with /.")
        if self._is_chat != self._endpoint.endswith("/chat/completions"):
            raise ConfigError(
                f"--endpoint {self._endpoint} does not go with --backend {target.backend}: openai-chat sends "
                f"messages, to {CHAT}, and the others a prompt, to {COMPLETIONS}."
            )
        if target.base_url is not None:
            self._address = Address.parse(target.base_url, "--base-url")
        else:
            host = f"[{target.host}]" if ":" in target.host else target.host
            self._address = Address.parse(f"http://{host}:{target.port}", "--host")
        headers = key_values("--header", target.header)
        key = target.api_key or next(iter(read_environment()[0].get("api_key", ())), None)
        if key is not None:
            headers = {"Authorization": f"Bearer {key}"} | headers
        self._http = HttpClient(self._address, headers, keeps_connections=target.connections == "pooled")

    async def run(self) -> ServeOutcome:
        """Raises ConfigError, Unavailable when the server does not answer, RequestFailed when it refuses the test."""
        _raise_open_files_limit()
        try:
            return await self._run()
        finally:
            self._http.close()

    async def _run(self) -> ServeOutcome:
        options, load = self._options, self._options.load
        deadline_s = time.monotonic() + options.target.ready_check_timeout_sec
        card = await self._model_card(deadline_s)
        model = options.target.model or str(card["id"])
        tokenizer, tokenizer_name = self._tokenizer(model, card)
        maker = None if tokenizer is None else PromptMaker(tokenizer)
        context_len = options.target.max_model_len or card.get("max_model_len")
        client = self._client(options.target.served_model_name or model)
        pids = self._server_pids()
        count = None if tokenizer is None else lambda text: len(tokenizer.encode(text, add_special_tokens=False))

        runs: list[LoadRun] = []
        results: list[dict[str, Any]] = []
        for repeat in range(load.repeats):
            seed = load.seed + repeat
            workload = make_workload(options.dataset, maker, seed=seed, context_len=context_len)
            # Other streams than the prompts': what is sent before the measured requests helps none of them.
            probe_rng, arrival_rng = (np.random.default_rng((seed, stream)) for stream in (1, 2))
            if repeat == 0:
                for text in workload.notes:
                    self._note(text)
                await self._check(client, make_probe(workload.requests[0], maker, probe_rng), deadline_s)
            await self._warm_up(client, workload, maker, probe_rng)
            arrivals_s = self._arrivals(workload, arrival_rng)
            title = f"Run {repeat + 1} of {load.repeats}" if load.repeats > 1 else "Requests"
            with tqdm(total=len(arrivals_s), desc=title, unit="request", disable=load.disable_tqdm) as progress:
                run = await run_load(
                    client,
                    workload.requests,
                    arrivals_s,
                    max_concurrency=load.max_concurrency,
                    server_pids=pids,
                    on_answer=progress.update,
                )
            runs.append(run)
            results.append(summarize(run, self.selection, count) | {"num_truncated": workload.num_truncated})
        head = self._head(model, tokenizer_name, len(runs[0].records))
        result = head | combine(results)
        if not options.result.save_detailed:
            result = {name: value for name, value in result.items() if name not in DETAILS}
        return ServeOutcome(result, runs)

    def _head(self, model: str, tokenizer_name: str | None, num_requests: int) -> dict[str, Any]:
        options, load = self._options, self._options.load
        return {
            "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": options.target.backend,
            "backend": options.target.backend,
            "label": options.result.label,
            "model_id": model,
            "tokenizer_id": tokenizer_name,
            "num_prompts": num_requests,
            **self._metadata,
            "request_rate": load.request_rate if load.request_rate != float("inf") else "inf",
            "burstiness": load.burstiness if load.burstiness != float("inf") else "inf",
            "max_concurrency": load.max_concurrency,
            "dataset_name": options.dataset.dataset_name,
            "connections": options.target.connections,
            "repeats": load.repeats,
            "seed": load.seed,
        }

    async def _model_card(self, deadline_s: float) -> Mapping[str, Any]:
        """What the server says about the model; with --model a server may say nothing."""
        wanted = self._options.target.model
        while True:
            try:
                status, body = await self._http.get("/v1/models")
                why = f"it answered {status} to /v1/models"
            except ConnectionBroken as error:
                status, body, why = 0, b"", str(error)
            if status not in _NOT_YET:
                break
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self._address} cannot be used: {why}.")
            await asyncio.sleep(_TRY_AGAIN_S)
        try:
            cards = [card for card in json.loads(body)["data"] if isinstance(card["id"], str)] if status == 200 else []
        except (ValueError, KeyError, TypeError):
            cards = []
        if wanted is not None:
            return next((card for card in cards if card["id"] == wanted), {})
        if not cards:
            raise Unavailable(f"{self._address} does not say which model it serves ({why}). Name it with --model.")
        card: Mapping[str, Any] = cards[0]
        return card

    def _tokenizer(self, model: str, card: Mapping[str, Any]) -> tuple[Tokenizer | None, str | None]:
        given = self._options.target.tokenizer
        if given is not None:
            return find_tokenizer(given), given
        for name in (model, card.get("root")):
            if isinstance(name, str) and name:
                try:
                    return find_tokenizer(name), name
                except LoadError:
                    continue
        return None, None

    def _client(self, model: str) -> Client:
        sampling, target = self._options.sampling, self._options.target
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
        fields: dict[str, Any] = {name: value for name in names if (value := getattr(sampling, name)) is not None}
        if target.logprobs is not None:
            chat = {"logprobs": True, "top_logprobs": target.logprobs}
            fields |= chat if self._is_chat else {"logprobs": target.logprobs}
        if sampling.ignore_eos or (sampling.ignore_eos is None and self._options.dataset.dataset_name in MADE_UP):
            fields["ignore_eos"] = True
        fields = {"model": model} | fields | (target.extra_body or {})
        return Client(
            self._http, self._endpoint, is_chat=self._is_chat, fields=fields, timeout_s=target.request_timeout_sec
        )

    def _server_pids(self) -> list[int]:
        given = self._options.target.server_pid
        if given is not None:
            if not Path(f"/proc/{given}").is_dir():
                raise ConfigError(f"--server-pid is {given}; there is no such process here.")
            return [given]
        return listeners(self._address.port) if is_local(self._address.host) else []

    async def _check(self, client: Client, probe: BenchRequest, deadline_s: float) -> None:
        """Send one request, again while the server is loading. Without a ready check none is sent."""
        if not self._options.target.ready_check_timeout_sec:
            return
        data = client.build(BenchRequest(probe.prompt, probe.prompt_len, min(probe.output_len, _PROBE_TOKENS)))
        while True:
            record = await client.run(data, probe.prompt_len)
            if record.has_succeeded:
                return
            if record.status not in _NOT_YET:
                raise RequestFailed(
                    f"{self._address} refuses the test request, before anything is measured: {record.error}"
                )
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self._address} does not serve the test request: {record.error}")
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _warm_up(
        self, client: Client, workload: Workload, maker: PromptMaker | None, rng: np.random.Generator
    ) -> None:
        load = self._options.load
        requests = [
            make_probe(workload.requests[i % len(workload.requests)], maker, rng) for i in range(load.num_warmups)
        ]
        if requests:
            await run_load(client, requests, [0.0] * len(requests), max_concurrency=load.max_concurrency)

    def _arrivals(self, workload: Workload, rng: np.random.Generator) -> list[float]:
        """A finite --request-rate replaces the times of a trace."""
        load, requests = self._options.load, workload.requests
        recorded = [request.arrival_s for request in requests if request.arrival_s is not None]
        if recorded and load.request_rate == float("inf"):
            return recorded
        return arrival_times(len(requests), load.request_rate, load.burstiness, rng)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: the client shares the cores with the server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _raise_open_files_limit() -> None:
    """Each request in flight is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse what they name as the most
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer at a path, or of a model of this machine. Raises LoadError; nothing is fetched."""
    path = Path(name).expanduser()
    if not path.exists():
        path = resolve_source(name, cache=cache_dir()).path
    return load_tokenizer(path)


def key_values(flag: str, pairs: tuple[str, ...]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} has {pair!r}; it must be KEY=VALUE.")
        values[name.strip()] = value.strip()
    return values


def result_path(options: ServeOptions, result: Mapping[str, Any]) -> Path:
    """Where the result is saved, by vLLM's rule where no name is given."""
    load = options.load
    label = options.result.label or options.target.backend
    limit = f"-concurrency{load.max_concurrency}" if load.max_concurrency is not None else ""
    model = str(result["model_id"]).rpartition("/")[2]
    name = options.result.result_filename or f"{label}-{load.request_rate}qps{limit}-{model}-{result['date']}.json"
    return Path(options.result.result_dir or ".") / name


def save_result(path: Path, result: Mapping[str, Any], *, append: bool) -> None:
    """Write one JSON object; `append` adds it to what is there, on a line of its own. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(("\n" if append and file.tell() else "") + json.dumps(result))
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error.strerror}.") from None
