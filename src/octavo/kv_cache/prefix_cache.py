"""What makes two KV blocks the same, and how much of a prompt the pool already holds.

A block's key is a 256-bit digest of everything that decides its KV: the chain of keys before it, back to a
root made of the model's identity, the RoPE variant, the tenant's salt and whatever else a feature mixes in,
and its own tokens. Names are never identity. `cache_key` is the only function that digests.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from octavo.kv_cache.cache_spec import first_visible_block, num_blocks

KEY_BYTES = 32

_LENGTH = struct.Struct("<cQ")


def cache_key(domain: str, *fields: bytes | str | int | float | Sequence[int]) -> bytes:
    """Digest typed fields under a domain: two calls agree only if domain, types, lengths and values all do."""
    digest = blake2b(digest_size=KEY_BYTES)
    for field in (domain, *fields):
        tag, data = _encode(field)
        digest.update(_LENGTH.pack(tag, len(data)))
        digest.update(data)
    return digest.digest()


def _encode(field: bytes | str | int | float | Sequence[int]) -> tuple[bytes, bytes]:
    match field:
        case bytes():
            return b"b", field
        case str():
            return b"s", field.encode("utf-8", "surrogatepass")
        case int():
            return b"i", field.to_bytes(16, "little", signed=True)
        case float():
            return b"f", struct.pack("<d", field)
        case _:
            return b"t", array("q", field).tobytes()


def model_identity(*, weights: bytes, kv_dtype: str, rope: str) -> bytes:
    """Identity of all KV that one loaded model writes.

    `weights` digests the model's configuration and tensors; `rope` describes every RoPE variant in use.
    """
    return cache_key("model", weights, kv_dtype, rope)


def adapter_identity(content: bytes, scale: float) -> bytes:
    """What an adapter adds to the key: the digest of its tensors and the scale in use, never its name."""
    return cache_key("adapter", content, float(scale))


def root_key(identity: bytes, *, rope_variant: int, salt: str, extra: bytes = b"") -> bytes:
    """The parent of a prompt's first block. `extra` is what further features made with `cache_key`."""
    return cache_key("root", identity, rope_variant, salt, extra)


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full block whose predecessor has key `parent` (the root, for the first)."""
    return cache_key("block", parent, token_ids)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The first `num_blocks` blocks of a prompt, by group; -1 where no query behind them looks."""

    num_blocks: int
    block_ids: tuple[list[int], ...]


def match_prefix(
    keys: Sequence[bytes],
    windows: Sequence[int | None],
    block_size: int,
    lookup: Callable[[int, bytes], int | None],
) -> PrefixHit:
    """The longest prefix of `keys` from which a request can go on.

    Groups without a window must hold all its blocks; a group with one must hold those that cover the last
    `window - 1` tokens before its end. Cutting the prefix for one group may break it for another, so the
    groups are asked again until they agree. The caller leaves out the block of the last known token, which
    is always computed: a full hit would leave no logits to sample from.
    """
    length = len(keys)
    for group, window in enumerate(windows):
        if window is None:
            length = next((i for i in range(length) if lookup(group, keys[i]) is None), length)
    agreed = False
    while not agreed:
        agreed = True
        for group, window in enumerate(windows):
            if window is not None:
                cut = _longest_window_hit(keys[:length], group, num_blocks(window - 1, block_size), lookup)
                agreed = agreed and cut == length
                length = cut
    return PrefixHit(length, tuple(_visible(keys[:length], g, w, block_size, lookup) for g, w in enumerate(windows)))


def _longest_window_hit(
    keys: Sequence[bytes], group: int, num_needed: int, lookup: Callable[[int, bytes], int | None]
) -> int:
    """The longest prefix whose last `num_needed` blocks (or all, if it has fewer) are present."""
    run = 0
    for index in range(len(keys) - 1, -1, -1):
        if run == num_needed:
            return index + 1 + run
        run = run + 1 if lookup(group, keys[index]) is not None else 0
    return run


def _visible(
    keys: Sequence[bytes], group: int, window: int | None, block_size: int, lookup: Callable[[int, bytes], int | None]
) -> list[int]:
    first = first_visible_block(len(keys) * block_size, window, block_size)
    found = [lookup(group, key) for key in keys[first:]]
    assert None not in found, f"a block of group {group} vanished between match and use"
    return [-1] * first + [block_id for block_id in found if block_id is not None]
