"""The GGUF reader: what it returns, and that no file can make it crash, hang or eat memory."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.loader.gguf import GgufFile

TYPES = gguf.GGUFValueType
EXTREMES = (2**31, 2**63, 2**64 - 1)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def key(name: str, code: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", code) + payload


def entry(name: str, shape=(4,), code: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


def file_bytes(keys=(), entries=(), data=b"", *, magic=b"GGUF", version=3, num_keys=None, num_tensors=None) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(entries) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    body = head + b"".join(keys) + b"".join(entries)
    return body + bytes(-len(body) % 32) + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def sample(path: Path) -> Path:
    """About 2 kB: every kind of metadata and two tensors, the last of which ends with the file."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": 1,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "context_length": 64,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {index}" for index in range(20)])
    writer.add_token_types([1] * 20)
    writer.add_eos_token_id(3)
    writer.add_array("test.nested", [[1, 2], [3, 4, 5]])
    writer.add_bool("test.flag", True)
    writer.add_tensor("token_embd.weight", np.arange(160, dtype=np.float32).reshape(20, 8))
    writer.add_tensor("blk.0.attn_norm.weight", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_keeps_its_declared_types(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    scalars = {TYPES.UINT8: 200, TYPES.INT8: -100, TYPES.UINT16: 60000, TYPES.INT16: -30000, TYPES.UINT32: 2**32 - 1}
    scalars |= {
        TYPES.INT32: -(2**31),
        TYPES.UINT64: 2**64 - 1,
        TYPES.INT64: -(2**63),
        TYPES.FLOAT32: 0.5,
        TYPES.FLOAT64: 0.1,
    }
    scalars |= {TYPES.BOOL: True, TYPES.STRING: "käse"}
    for type_, value in scalars.items():
        writer.add_key_value(f"scalar.{type_.name}", value, type_)
    writer.add_array("array.strings", ["a", "", "ü"])
    writer.add_array("array.bools", [True, False])
    writer.add_key_value("array.scores", [1, 2, 3], TYPES.ARRAY, sub_type=TYPES.UINT8)
    writer.add_key_value("array.wide", [1.5, -2.0], TYPES.ARRAY, sub_type=TYPES.FLOAT64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GgufFile.open(tmp_path / "types.gguf").metadata
    for type_, value in scalars.items():
        assert metadata[f"scalar.{type_.name}"] == value
        assert type(metadata[f"scalar.{type_.name}"]) is type(value)
    assert metadata["array.strings"] == ["a", "", "ü"]
    # LOD-03: the reader of an array sees which type it was declared with
    for name, dtype, values in (
        ("bools", bool, [True, False]),
        ("scores", np.uint8, [1, 2, 3]),
        ("wide", float, [1.5, -2]),
    ):
        assert metadata[f"array.{name}"].dtype == dtype
        assert metadata[f"array.{name}"].tolist() == values


def test_nested_arrays_are_read_to_a_depth(tmp_path):
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 7, 8)
    for depth, is_read in ((3, True), (4, False), (4000, False)):
        payload = struct.pack("<IQ", 9, 1) * depth + inner
        path = write(tmp_path / "nested.gguf", file_bytes([key("deep", 9, payload)]))
        if is_read:
            assert GgufFile.open(path).metadata["deep"][0][0][0].tolist() == [7, 8]
        else:
            with pytest.raises(CheckpointError, match="nests arrays deeper than 4"):
                GgufFile.open(path)


def test_token_strings_that_are_not_utf8_keep_their_bytes(tmp_path):
    payload = struct.pack("<IQ", 8, 2) + string("a") + struct.pack("<Q", 2) + b"\xff\xfe"
    metadata = GgufFile.open(write(tmp_path / "bytes.gguf", file_bytes([key("tokens", 9, payload)]))).metadata
    assert metadata["tokens"][1].encode("utf-8", "surrogateescape") == b"\xff\xfe"


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path, version):
    data = np.arange(8, dtype=np.float32)
    content = file_bytes([], [entry("x", (4, 2))], data.tobytes(), version=version)
    tensor = GgufFile.open(write(tmp_path / "v.gguf", content)).tensors["x"]
    assert tensor.shape == (2, 4)
    assert tensor.numpy().tolist() == data.reshape(2, 4).tolist()


@pytest.mark.parametrize("name", ["F64", "F32", "F16", "I64", "I32", "I16", "I8"])
def test_plain_types_are_views_of_the_file(tmp_path, name):
    writer = gguf.GGUFWriter(tmp_path / "plain.gguf", "llama")
    dtype = np.dtype({"F": "float", "I": "int"}[name[0]] + name[1:])
    values = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    writer.add_tensor("x", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile.open(tmp_path / "plain.gguf").tensors["x"]
    read = tensor.numpy()
    assert tensor.type_name == name
    assert read.dtype == dtype
    assert np.array_equal(read, values)
    assert np.shares_memory(read, tensor.blocks)
    assert not read.flags.writeable


# LOD-01
def test_any_truncation_is_a_clear_error(tmp_path, open_hostile_files):
    content = sample(tmp_path / "valid").read_bytes()
    assert len(content) < 3000
    folder = tmp_path / "cut"
    folder.mkdir()
    for length in range(len(content)):
        write(folder / f"{length:05d}.gguf", content[:length])
    outcomes = open_hostile_files("gguf", folder)
    assert len(outcomes) == len(content)
    assert {outcome for outcome, _ in outcomes.values()} == {"CheckpointError"}


# LOD-01
def test_no_field_at_any_place_can_crash_hang_or_allocate(tmp_path, open_hostile_files):
    content = sample(tmp_path / "valid").read_bytes()
    folder = tmp_path / "mutants"
    folder.mkdir()
    header = content.index(b"blk.0.attn_norm.weight") + 60
    for at in range(4, header):
        for value in EXTREMES:
            mutant = content[:at] + struct.pack("<Q", value) + content[at + 8 :]
            write(folder / f"{at:05d}-{value:x}.gguf", mutant)
    outcomes = open_hostile_files("gguf", folder)
    assert len(outcomes) == 3 * (header - 4)
    refused = [outcome for outcome, _ in outcomes.values() if outcome != "ok"]
    assert len(refused) > len(outcomes) / 2


# LOD-01
def test_claims_beyond_the_file_are_refused_by_what_they_claim(tmp_path, open_hostile_files):
    def array(code: int, count: int) -> bytes:
        return key("a", 9, struct.pack("<IQ", code, count))

    huge = {f"{power:x}": power for power in EXTREMES}
    mutants = {}
    for label, size in huge.items():
        mutants[f"tensors {label}"] = file_bytes(num_tensors=size), "declares"
        mutants[f"keys {label}"] = file_bytes(num_keys=size), "declares"
        mutants[f"string {label}"] = file_bytes([key("s", 8, struct.pack("<Q", size))]), "bytes are needed"
        mutants[f"name {label}"] = file_bytes([struct.pack("<Q", size) + b"x" * 20]), "the limit is 65535"
        mutants[f"numbers {label}"] = file_bytes([array(12, size)]), "bytes are needed"
        mutants[f"strings {label}"] = file_bytes([array(8, size)]), "strings in a"
        mutants[f"arrays {label}"] = file_bytes([array(9, size)]), "arrays in a"
        mutants[f"dims {label}"] = file_bytes([], [entry("t", (size, size))]), "cut off or damaged"
        mutants[f"offset {label}"] = file_bytes([], [entry("t", (4,), 0, size)], bytes(64)), "cut off or damaged"
    one = [entry("t")]
    mutants["ndims"] = file_bytes([], [entry("t", (1,) * 5)], bytes(64)), "5 dimensions"
    mutants["no dims"] = file_bytes([], [entry("t", ())], bytes(64)), "0 dimensions"
    mutants["empty"] = file_bytes([], [entry("t", (4, 0))], bytes(64)), r"shape [0, 4]"
    mutants["unaligned"] = file_bytes([], [entry("t", (4,), 0, 4)], bytes(64)), "offset 4"
    mutants["overlap"] = file_bytes([], [entry("t", (16,)), entry("u", (4,), 0, 32)], bytes(64)), "t and u overlap"
    mutants["twice"] = file_bytes([], [entry("t"), entry("t", (4,), 0, 32)], bytes(64)), "occurs twice"
    mutants["key twice"] = file_bytes([key("k", 0, b"1")] * 2, one, bytes(64)), "'k' occurs twice"
    mutants["rows"] = file_bytes([], [entry("t", (33, 2), 8)], bytes(128)), "Q8_0 packs 32"
    mutants["type 99"] = file_bytes([], [entry("t", (4,), 99)], bytes(64)), "stored as type 99"
    mutants["value type"] = file_bytes([key("k", 77, b"1")]), "unknown value type 77"
    mutants["key text"] = file_bytes([struct.pack("<Q", 2) + b"\xff\xff" + bytes(9)]), "not UTF-8"
    mutants["alignment 0"] = file_bytes([key("general.alignment", 4, bytes(4))]), "alignment is 0"
    mutants["alignment 48"] = file_bytes([key("general.alignment", 4, struct.pack("<I", 48))]), "alignment is 48"
    mutants["alignment 2^31"] = file_bytes([key("general.alignment", 4, struct.pack("<I", 2**31))]), "power of two"
    mutants["alignment text"] = file_bytes([key("general.alignment", 8, string("32"))]), "alignment is '32'"
    mutants["magic"] = file_bytes(magic=b"GGML"), "begins with b'GGML'"
    mutants["version 1"] = file_bytes(version=1), "version is 1"
    mutants["big endian"] = file_bytes(version=3 << 24), "big-endian"
    mutants["nothing"] = b"", "0 bytes"
    folder = tmp_path / "mutants"
    folder.mkdir()
    for name, (content, _) in mutants.items():
        write(folder / name, content)
    outcomes = open_hostile_files("gguf", folder)
    for name, (_, expected) in mutants.items():
        outcome, message = outcomes[name]
        assert outcome == ("UnsupportedModel" if name == "type 99" else "CheckpointError"), (name, outcome, message)
        assert expected in message, (name, message)


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ1_M", "TQ2_0", "NVFP4"])
def test_types_that_are_not_read_are_refused_by_name(tmp_path, name):
    code = gguf.GGMLQuantizationType[name]
    path = write(tmp_path / "model.gguf", file_bytes([], [entry("t", (256, 1), code)], bytes(512)))
    with pytest.raises(UnsupportedModel, match=f"tensor t is stored as {name}.*Readable: F32.*Q4_K"):
        GgufFile.open(path)


def split(folder: Path, counts=(1, 1, 1), *, total: int = 3) -> list[Path]:
    paths = []
    for index, count in enumerate(counts):
        keys = [key("split.no", 2, struct.pack("<H", index)), key("split.count", 2, struct.pack("<H", len(counts)))]
        keys += [key("split.tensors.count", 5, struct.pack("<i", total))]
        keys += [key("general.name", 8, string("whole"))] if index == 0 else []
        entries = [entry(f"t{index}.{number}", (8,), 0, 32 * number) for number in range(count)]
        data = np.full(8 * count, index, np.float32).tobytes()
        paths.append(write(folder / f"m-{index + 1:05d}-of-{len(counts):05d}.gguf", file_bytes(keys, entries, data)))
    return paths


def test_a_split_model_is_opened_by_any_of_its_parts(tmp_path):
    paths = split(tmp_path)
    for path in paths:
        file = GgufFile.open(path)
        assert file.files == tuple(paths)
        assert file.metadata["general.name"] == "whole"
        assert [tensor.numpy()[0] for tensor in file.tensors.values()] == [0, 1, 2]


# LOD-08
def test_missing_truncated_and_shuffled_parts_of_a_split_model_are_named(tmp_path):
    paths = split(tmp_path)
    second = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 files; missing beside it: m-00002-of-00003\.gguf"):
        GgufFile.open(paths[0])
    paths[1].write_bytes(second[:-8])
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf.*cut off"):
        GgufFile.open(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match="part 2 .from 0. of 3; its name makes it part 1 of 3"):
        GgufFile.open(paths[0])
    split(tmp_path, (1, 2, 1), total=3)
    with pytest.raises(CheckpointError, match="hold 4 tensors of 3"):
        GgufFile.open(paths[0])
    paths[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="part 0 .from 0. of 3"):
        GgufFile.open(tmp_path / "alone.gguf")


def test_a_missing_file_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no file .*absent\.gguf"):
        GgufFile.open(tmp_path / "absent.gguf")
