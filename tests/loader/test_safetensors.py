"""The safetensors reader agrees with the reference implementation, and refuses before it allocates."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from octavo.errors import CheckpointError
from octavo.loader.safetensors import DTYPES, open_safetensors, read_safetensors

LENGTHS = (0, 1, 9, 2**31, 2**63, 2**64 - 3, 2**64 - 1)


def file_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def info(dtype: str = "F32", shape=(2,), begin: int = 0, end: int = 8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("type_name", DTYPES)
def test_every_type_comes_back_with_its_values(tmp_path, type_name):
    dtype = np.dtype(DTYPES[type_name])
    stored = np.random.default_rng(0).integers(
        0, 2 if type_name == "BOOL" else 256, (6, dtype.itemsize), dtype=np.uint8
    )
    content = file_bytes({"x": info(type_name, (2, 3), 0, stored.nbytes)}, stored.tobytes())
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    tensor = read_safetensors(path)["x"]
    values = tensor.numpy()
    assert (tensor.type_name, tensor.shape, values.shape) == (type_name, (2, 3), (2, 3))
    assert values.dtype == dtype
    assert values.tobytes() == stored.tobytes()


def test_half_precision_is_ml_dtypes(tmp_path):
    for type_name, dtype in (("BF16", ml_dtypes.bfloat16), ("F8_E4M3", ml_dtypes.float8_e4m3fn)):
        assert np.dtype(DTYPES[type_name]) == np.dtype(dtype)


def test_values_are_views_of_the_file_when_they_are_aligned(tmp_path):
    save_file({"a": np.arange(3, dtype=np.int8), "b": np.arange(4, dtype=np.float32)}, tmp_path / "m.safetensors")
    tensors = read_safetensors(tmp_path / "m.safetensors")
    assert np.shares_memory(tensors["a"].numpy(), tensors["a"].data)
    assert tensors["b"].numpy().tolist() == [0, 1, 2, 3]
    assert tensors["b"].numpy().flags.aligned


# LOD-07
def test_header_claims_are_checked_before_anything_is_allocated(tmp_path, open_hostile_files):
    good = {"x": info()}
    data = bytes(8)
    mutants = {f"length {length:x}": (file_bytes(good, data, length=length), "") for length in LENGTHS}
    mutants["length of the file"] = file_bytes(good, data, length=8 + len(json.dumps(good)) + 8), "claims"
    mutants["text"] = file_bytes(b"{not json", data), "not JSON"
    mutants["list"] = file_bytes([good], data), "does not begin with '{'"
    mutants["BOM"] = file_bytes(b"\xef\xbb\xbf" + json.dumps(good).encode(), data), "does not begin"
    mutants["latin-1"] = file_bytes('{"ä": 1}'.encode("latin-1"), data), "not JSON"
    mutants["nested"] = file_bytes(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", data), "not JSON"
    mutants["digits"] = file_bytes(b'{"x":' + b"9" * 100_000 + b"}", data), "not JSON"
    mutants["duplicate"] = (
        file_bytes(b'{"x": %b, "x": %b}' % ((json.dumps(info()).encode(),) * 2), data),
        "occurs twice",
    )
    mutants["metadata"] = file_bytes({"__metadata__": {"a": 1}, **good}, data), "map of strings"
    mutants["entry"] = file_bytes({"x": 5}, data), "not just dtype"
    mutants["extra"] = file_bytes({"x": info() | {"strides": [1]}}, data), "not just dtype"
    mutants["dtype"] = file_bytes({"x": info("F4")}, data), "type 'F4'; readable are F64"
    mutants["dtype list"] = file_bytes({"x": info() | {"dtype": ["F32"]}}, data), "type ['F32']"
    for name, shape in {"negative": [-2], "float": [2.0], "bool": [True, 2], "text": "2", "huge": [2**63]}.items():
        mutants[f"shape {name}"] = file_bytes({"x": info() | {"shape": shape}}, data), "lists of sizes"
    mutants["product"] = file_bytes({"x": info(shape=(2**62, 2**62))}, data), "takes"
    mutants["offsets"] = file_bytes({"x": info(end=4)}, data), "takes 8 bytes as F32"
    mutants["beyond"] = file_bytes({"x": info(shape=(4,), end=16)}, data), "cut off"
    mutants["gap"] = file_bytes({"x": info(), "y": info(begin=12, end=20)}, bytes(20)), "begins at byte 12"
    mutants["overlap"] = file_bytes({"x": info(), "y": info(begin=4, end=12)}, bytes(12)), "begins at byte 4"
    mutants["trailing"] = file_bytes(good, bytes(9)), "1 bytes follow the last"
    mutants["empty"] = b"", "0 bytes"
    for name, (content, _) in mutants.items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "spaces").open("wb") as file:  # sparse: 200 MB that only a reader would materialise
        file.write(struct.pack("<Q", 200_000_000) + b"{")
        file.truncate(200_000_008)
    mutants["spaces"] = b"", "100000000 is the limit"
    outcomes = open_hostile_files("safetensors", tmp_path)
    for name, (_, expected) in mutants.items():
        outcome, message = outcomes[name]
        assert outcome == "CheckpointError", (name, outcome)
        assert expected in message, (name, message)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 17, -1, 2**40])
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "U8", "BF16", "BOGUS"]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": st.lists(SIZES, min_size=1, max_size=3),
    }
)
SOUND = st.lists(st.tuples(st.sampled_from(["F32", "U8", "F16"]), st.lists(st.integers(0, 3), max_size=2)), max_size=4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(entries=st.dictionaries(st.sampled_from("abc"), ENTRY, max_size=3), size=st.integers(0, 20))
def test_no_header_is_accepted_that_the_reference_implementation_refuses(scratch, entries, size):
    content = file_bytes(entries, bytes(size))
    scratch.write_bytes(content)
    try:
        ours = read_safetensors(scratch)
    except CheckpointError:
        return
    theirs = dict(safetensors.deserialize(content))
    assert {name: list(tensor.shape) for name, tensor in ours.items()} == {
        name: t["shape"] for name, t in theirs.items()
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layout=SOUND, seed=st.integers(0, 9))
def test_what_the_reference_implementation_accepts_is_read_alike(scratch, layout, seed):
    header, position = {}, 0
    for index, (dtype, shape) in enumerate(layout):
        size = int(np.prod(shape)) * np.dtype(DTYPES[dtype]).itemsize
        header[f"t{index}"] = info(dtype, shape, position, position + size)
        position += size
    content = file_bytes(header, np.random.default_rng(seed).bytes(position))
    theirs = dict(safetensors.deserialize(content))
    scratch.write_bytes(content)
    ours = read_safetensors(scratch)
    assert {name: tensor.data.tobytes() for name, tensor in ours.items()} == {
        n: bytes(t["data"]) for n, t in theirs.items()
    }


def model_folder(folder: Path, shards: int = 3) -> list[Path]:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    paths, listed = [], {}
    for number in range(1, shards + 1):
        paths.append(folder / f"model-{number:05d}-of-{shards:05d}.safetensors")
        names = [f"layer.{number}.{part}" for part in ("a", "b")]
        save_file({name: np.full(4, number, np.float32) for name in names}, paths[-1])
        listed |= dict.fromkeys(names, paths[-1].name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return paths


def test_shards_are_one_checkpoint(tmp_path):
    paths = model_folder(tmp_path)
    checkpoint = open_safetensors(tmp_path)
    assert checkpoint.files == tuple(paths)
    assert len(checkpoint.names()) == 6
    assert checkpoint.tensor("layer.2.b").numpy().tolist() == [2, 2, 2, 2]
    assert checkpoint.size_bytes == sum(path.stat().st_size for path in paths)
    assert (checkpoint.format, checkpoint.dtype_name, checkpoint.has_block_types) == ("safetensors", "F32", False)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {}


# LOD-08
def test_missing_and_truncated_shards_are_listed_with_their_tensors(tmp_path):
    paths = model_folder(tmp_path)
    whole = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of 3 weight files: model-00002.*2 tensors: layer\.2\.a, layer\.2\.b"
    ):
        open_safetensors(tmp_path)
    for length in (0, 5, len(whole) - 40, len(whole) - 1):
        paths[1].write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors is not a sound"):
            open_safetensors(tmp_path)
    save_file({"layer.2.a": np.zeros(4, np.float32)}, paths[1])
    with pytest.raises(CheckpointError, match=r"lists 1 tensors that their files do not hold: layer\.2\.b"):
        open_safetensors(tmp_path)
    save_file({"layer.2.a": np.zeros(4), "layer.2.b": np.zeros(4), "layer.1.a": np.zeros(4)}, paths[1])
    with pytest.raises(CheckpointError, match=r"model-00002.* holds layer\.1\.a, which model-00001.* holds too"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("target", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", 5])
def test_an_index_reaches_no_file_outside_its_folder(tmp_path, target):
    model_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": target}}))
    with pytest.raises(CheckpointError, match="not a safetensors file beside it"):
        open_safetensors(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path):
    model_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="holds 3 safetensors files and no model.safetensors.index.json"):
        open_safetensors(tmp_path)


def test_the_single_file_is_preferred_as_in_transformers(tmp_path):
    model_folder(tmp_path)
    save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    assert open_safetensors(tmp_path).names() == ["x"]


@pytest.mark.parametrize(
    ("text", "problem"), [("[1]", "holds a JSON list"), ("{", "is not JSON"), ("[" * 99999, "is not JSON")]
)
def test_a_damaged_config_is_named(tmp_path, text, problem):
    model_folder(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json {problem}"):
        open_safetensors(tmp_path)
