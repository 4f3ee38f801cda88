"""The ledger fills every parameter once and leaves no tensor over; the fingerprint is the content's."""

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import CheckpointError
from octavo.loader import file_digest as digests
from octavo.loader.checkpoint import Checkpoint, Ledger, MissingTensor
from octavo.loader.file_digest import file_digest
from octavo.loader.safetensors import open_safetensors

E = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass
class Stored:
    values: np.ndarray
    type_name: str = "F32"
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self):
        self.shape = self.values.shape

    def numpy(self) -> np.ndarray:
        return self.values


def checkpoint(**tensors: np.ndarray) -> Checkpoint:
    stored = {name.replace("__", "."): Stored(values) for name, values in tensors.items()}
    return Checkpoint("safetensors", {}, {}, stored, (Path("model.safetensors"),))


def test_a_complete_checkpoint_passes():
    ledger = Ledger(checkpoint(a=np.zeros((2, 3)), b=np.ones(4)))
    assert ledger.take("a", (2, 3)).numpy().shape == (2, 3)
    assert ledger.take_optional("b", (4,)) is not None
    assert ledger.take_optional("c", (4,)) is None
    ledger.finish()


def test_everything_that_is_wrong_is_listed_at_once():
    ledger = Ledger(checkpoint(a=np.zeros((2, 3)), extra=np.ones(4), other=np.ones(4)))
    ledger.take("a", (3, 2))
    ledger.take("gone", (7,))
    ledger.take("lost", (8, 9))
    with pytest.raises(CheckpointError) as caught:
        ledger.finish()
    for part in (
        "a has shape [2, 3]; the configuration makes it [3, 2]",
        "gone [7] is missing",
        "lost [8, 9] is missing",
        "2 tensors have no use in this model: extra, other",
    ):
        assert part in str(caught.value)


# LOD-08: what is missing can never be served, even if finish() is forgotten
def test_a_missing_tensor_has_no_values():
    missing = Ledger(checkpoint()).take("gone", (2,))
    assert isinstance(missing, MissingTensor)
    with pytest.raises(CheckpointError, match=r"gone \[2\] is missing"):
        missing.numpy()


def test_filling_a_parameter_twice_is_a_bug():
    ledger = Ledger(checkpoint(a=np.zeros(1)))
    ledger.take("a", (1,))
    with pytest.raises(AssertionError, match="a was filled twice"):
        ledger.take("a", (1,))


def test_derived_buffers_and_named_parts_may_be_left_over():
    rotary = {"model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(2), "vision_tower__x": np.ones(2)}
    Ledger(checkpoint(**rotary), ignore=("vision_tower.",)).finish()
    with pytest.raises(CheckpointError, match=r"no use in this model: vision_tower\.x"):
        Ledger(checkpoint(**rotary)).finish()


# LOD-10: the four combinations of flag and presence
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["absent", "equal", "unequal", "other shape"])
def test_tied_and_untied_heads(tied, stored, caplog):
    embedding = np.arange(12, dtype=np.float32).reshape(4, 3)
    heads = {
        "equal": embedding.copy(),
        "unequal": embedding + (np.arange(12).reshape(4, 3) == 11),
        "other shape": embedding.T,
    }
    tensors = {E.replace(".", "__"): embedding} | (
        {HEAD.replace(".", "__"): heads[stored]} if stored != "absent" else {}
    )
    ledger = Ledger(checkpoint(**tensors))
    with caplog.at_level(logging.WARNING):
        table = ledger.take(E, (4, 3))
        head = ledger.take_head((4, 3), tied=tied, embedding=table)
    warned = "differs from the embedding, and is ignored" in caplog.text
    assert warned is (tied and stored == "unequal")
    if stored == "other shape" or (stored == "absent" and not tied):
        with pytest.raises(CheckpointError, match="lm_head.weight"):
            ledger.finish()
        return
    ledger.finish()
    assert (head is None) is tied
    if not tied:
        assert np.array_equal(head.numpy(), heads[stored])


def test_unknown_names_are_errors_that_name_the_file():
    with pytest.raises(CheckpointError, match="model.safetensors holds no tensor 'x'"):
        checkpoint().tensor("x")


def model(folder: Path, values: np.ndarray, config: str = "{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    save_file({"x": values}, folder / "model.safetensors")
    return folder


def test_the_fingerprint_is_the_content_and_nothing_else(tmp_path):
    values = np.zeros(50_000, np.float32)
    first = open_safetensors(model(tmp_path / "a", values)).fingerprint
    assert len(first) == 32
    assert open_safetensors(model(tmp_path / "b", values)).fingerprint == first
    changed = values.copy()
    changed[31_415] = 1e-30  # one value in the middle
    assert open_safetensors(model(tmp_path / "c", changed)).fingerprint != first
    assert open_safetensors(model(tmp_path / "d", values, '{"rope_theta": 5}')).fingerprint != first


def test_digests_do_not_depend_on_how_chunks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "CHUNK_BYTES", 1000)
    path = tmp_path / "file"
    contents = [b"", b"a", bytes(999), bytes(1000), bytes(1001), bytes(2500), bytes(2499) + b"\1", b"\1" + bytes(2499)]
    seen = set()
    for content in contents:
        path.write_bytes(content)
        seen.add(file_digest(path))
    assert len(seen) == len(contents)


def test_a_digest_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    old = time.time() - 100
    os.utime(path, (old, old))
    monkeypatch.setattr(digests, "SETTLED_S", -1)
    calls = []
    compute = digests._digest
    monkeypatch.setattr(digests, "_digest", lambda *args: calls.append(args) or compute(*args))
    first = file_digest(path, cache=cache)
    assert file_digest(path, cache=cache) == first
    assert len(calls) == 1
    path.write_bytes(b"two")
    os.utime(path, (old, old))  # same size, same time: the change time tells
    assert file_digest(path, cache=cache) != first
    assert len(calls) == 2


def test_a_file_that_may_still_change_is_not_remembered(tmp_path):
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"fresh")
    file_digest(path, cache=cache)
    assert not cache.exists()


def test_a_damaged_or_unusable_cache_only_costs_time(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_S", -1)
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"x")
    expected = file_digest(path, cache=cache)
    next(cache.iterdir()).write_bytes(b"short")
    assert file_digest(path, cache=cache) == expected
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    assert file_digest(path, cache=blocked) == expected
