"""Routes about the server, the tokenizer routes, the documentation, TLS."""

from __future__ import annotations

import dataclasses
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.server.harness import MAX_MODEL_LEN, MODEL, FakeEngine, Running, configured, running

import octavo
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError
from octavo.request import SamplingParams
from octavo.server.app import create_app
from octavo.server.openai.fields import IGNORED, UNSUPPORTED
from octavo.server.openai.schema import ChatBody, CompletionBody
from octavo.server.run import tls_context

ROUTES = {
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id:path}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/requests/{request_id}"),
    ("POST", "/v1/requests/{request_id}/abort"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/ping"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/load"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
}


def test_the_routes_are_these(server: Running) -> None:
    """A new route is a decision: also whether it needs a key."""
    app = create_app(server.engine, configured())
    assert {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}} == ROUTES


def test_models_are_listed_under_every_served_name(tokenizer: Tokenizer) -> None:
    config = configured()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, served_model_name=("a", "org/b")))
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        cards = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["a", "org/b"]
        assert all(card["object"] == "model" and card["max_model_len"] == MAX_MODEL_LEN for card in cards)
        assert client.get("/v1/models/org/b").json() == cards[1]
        for name, expected in (("a", "a"), ("org/b", "org/b"), (None, "a")):
            answer = client.post("/v1/completions", json={"prompt": "x", "model": name})
            assert answer.json()["model"] == expected


def test_the_small_routes(server: Running, client: httpx.Client) -> None:
    assert client.get("/health").json() == {"state": "ready"}
    assert client.head("/health").status_code == 200
    assert client.get("/ping").status_code == 200
    assert client.get("/ready").json() == {"ready": True}
    assert client.get("/version").json() == {"version": octavo.__version__}
    assert client.get("/load").json() == {"server_load": 0, "queued": 0}
    for is_free in (True, False):
        server.engine.prefix_cache_is_free = is_free
        assert client.post("/reset_prefix_cache").json() == {"reset": is_free}
    metrics = client.get("/metrics")
    assert metrics.status_code == 200 and metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running" in metrics.text


def test_a_guarded_server_tells_strangers_its_state_only(tokenizer: Tokenizer) -> None:
    for keys, expected in (((), {"state": "starting", "reason": "reading /srv/x"}), (("key",), {"state": "starting"})):
        config = configured(api_key=keys)
        with running(config, lambda config=config: FakeEngine(tokenizer, config)) as it, it.client() as client:
            it.engine.state, it.engine.state_reason = "starting", "reading /srv/x"
            response = client.get("/health")
            assert response.status_code == 503 and response.json() == expected


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "The sea, 🀄 日本語"
    answer = client.post("/tokenize", json={"model": MODEL, "prompt": text}).json()
    assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert client.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]}).json() == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    named = client.post("/tokenize", json={"prompt": "the sea", "return_token_strs": True}).json()
    assert "".join(named["token_strs"]) == "the sea"
    long = client.post("/tokenize", json={"prompt": "the sea " * 20_000}).json()
    assert long["count"] > MAX_MODEL_LEN, "what does not fit the context can still be counted"
    lenient = client.post("/tokenize", json={"prompt": "a", "add_special": False})
    assert lenient.status_code == 200 and lenient.headers["x-octavo-warnings"] == "ignored fields: add_special"


def test_special_tokens_are_shown_or_hidden(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user")
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "<|im_start|>user"
    hidden = client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()
    assert hidden["prompt"] == "user"


def test_messages_are_tokenized_as_chat_would(client: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    asked = {**body, "max_tokens": 1, "return_token_ids": True}
    assert client.post("/v1/chat/completions", json=asked).json()["prompt_token_ids"] == tokens
    open_ended = client.post("/tokenize", json={**body, "add_generation_prompt": False}).json()["tokens"]
    assert tokens[: len(open_ended)] == open_ended and len(tokens) > len(open_ended)


def test_the_documentation_describes_every_body(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0" and set(document["paths"]) > {"/v1/models/{model_id}", "/health"}
    page = client.get("/docs").text
    assert "POST /v1/chat/completions" in page and "repetition_penalty" in page
    assert "<script" not in page and "http" not in page, "the page loads nothing"
    for path, name in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        properties = document["components"]["schemas"][name]["properties"]
        assert {"temperature", "max_tokens", "stop", "logprobs", "stream"} <= properties.keys()
    missing = {ref for ref in _references(document) if ref not in document["components"]["schemas"]}
    assert not missing


def _references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"].removeprefix("#/components/schemas/")} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(_references, node.values()))
    return set().union(*map(_references, node)) if isinstance(node, list) else set()


def test_every_field_has_one_reading() -> None:
    """Honoured, refused or ignored; what sampling offers can be asked for."""
    for body in (CompletionBody, ChatBody):
        honoured = set(body.__struct_fields__)
        assert {field.name for field in dataclasses.fields(SamplingParams)} <= honoured
        assert not honoured & IGNORED
    assert not UNSUPPORTED.keys() & IGNORED
    assert not UNSUPPORTED.keys() & set(CompletionBody.__struct_fields__) & set(ChatBody.__struct_fields__)


def make_certificate(folder: Path, name: str, issuer: tuple[Path, Path] | None = None) -> tuple[Path, Path]:
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    signed_by = ["-CA", str(issuer[0]), "-CAkey", str(issuer[1])] if issuer else []
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    run = subprocess.run(
        [*command, *names, "-keyout", str(key), "-out", str(certificate), *signed_by], capture_output=True
    )
    if run.returncode:
        pytest.skip(f"openssl cannot make a certificate here: {run.stderr.decode()[-200:]}")
    return certificate, key


def test_tls_is_spoken_and_client_certificates_are_required(tokenizer: Tokenizer, tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    certificate, key = make_certificate(tmp_path, "server", authority)
    client_certificate = make_certificate(tmp_path, "client", authority)
    context = ssl.create_default_context(cafile=str(authority[0]))
    tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    config = configured(**tls)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        assert it.url.startswith("https://")
        with httpx.Client(base_url=it.url, verify=context, trust_env=False) as client:
            assert client.post("/v1/completions", json={"prompt": "a", "stream": True}).status_code == 200
            assert client.get("/v1/models", headers={"X-Big": "b" * 70_000}).status_code == 431
    config = configured(**tls, ssl_ca_certs=str(authority[0]))
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        with (
            httpx.Client(base_url=it.url, verify=context, trust_env=False) as client,
            pytest.raises(httpx.TransportError),
        ):
            client.get("/health")
        context.load_cert_chain(*client_certificate)
        with httpx.Client(base_url=it.url, verify=context, trust_env=False) as client:
            assert client.get("/health").status_code == 200


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.crt"):
        tls_context(configured(ssl_certfile=str(tmp_path / "nothing.crt")).server)
    (tmp_path / "empty.crt").write_text("")
    with pytest.raises(ConfigError, match=r"empty\.crt"):
        tls_context(configured(ssl_certfile=str(tmp_path / "empty.crt")).server)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        tls_context(configured(ssl_keyfile="x").server)
