"""A checkpoint: its configuration and its tensors, named as in Hugging Face, whatever the file format.

Opened by `loader.source.open_checkpoint`. A model claims its parameters through a `Ledger`, which sees to it that
every parameter is filled once and that every tensor of the files has a use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octavo.backends.ops import HostTensor
from octavo.errors import CheckpointError
from octavo.loader.file_digest import file_digest

log = logging.getLogger(__name__)

PLAIN_TYPES = frozenset(
    "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split()
)  # every other type name is a GGUF block type
COMPARE_BYTES = 16 * 1024 * 1024

# Buffers that older checkpoints stored although they follow from the configuration.
DERIVED_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Weights on disk, mapped, and what their files say about them.

    `config` has the shape of a Hugging Face config.json; for GGUF it is made from the metadata. `tensors` are
    lazy: opening reads headers only.
    """

    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, HostTensor]
    files: tuple[Path, ...]  # that hold the tensors
    digest_cache: Path | None = None  # folder that remembers the digests of unchanged files

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> HostTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.files[0]} holds no tensor {name!r}.") from None

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that identify the content: SHA-256 of the configuration and of every byte of `files`.

        Samples would miss what users really do, such as training a few rows of an embedding. The first use reads
        the files once; `digest_cache` makes later starts free. Names, paths and times are not part of it.
        """
        digest = hashlib.sha256(b"octavo checkpoint 1\0")
        config = json.dumps(self.config, sort_keys=True, separators=(",", ":")).encode()
        digest.update(len(config).to_bytes(8, "little") + config)
        for path in self.files:
            digest.update(file_digest(path, cache=self.digest_cache))
        return digest.digest()

    @cached_property
    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @cached_property
    def has_block_types(self) -> bool:
        return any(tensor.type_name not in PLAIN_TYPES for tensor in self.tensors.values())

    @cached_property
    def dtype_name(self) -> str:
        """The type that most weights are stored in: 'BF16', 'Q4_1' ..."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.type_name] = counts.get(tensor.type_name, 0) + math.prod(tensor.shape)
        return max(counts, key=lambda name: counts[name], default="F32")


@dataclass(frozen=True, slots=True)
class MissingTensor:
    """Stands in for a tensor that the ledger could not give; its values cannot be read."""

    name: str
    shape: tuple[int, ...]
    problem: str
    type_name: str = "F32"

    def numpy(self) -> np.ndarray:
        raise CheckpointError(self.problem)

    @property
    def identity(self) -> str:
        return self.name

    def stored_blocks(self) -> None:
        return None


class Ledger:
    """Hands out each tensor of a checkpoint once, and knows what is missing, misshapen or left over.

    `take` everything, then `finish()`, then read values: so one error lists all that is wrong. A tensor whose name
    starts with an entry of `ignore` belongs to a part that the model does not have, such as a vision tower.
    """

    def __init__(self, checkpoint: Checkpoint, *, ignore: Sequence[str] = ()) -> None:
        self.checkpoint = checkpoint
        self._left = dict(checkpoint.tensors)
        self._taken: set[str] = set()
        self._problems: list[str] = []
        for name in list(self._left):
            if DERIVED_BUFFERS.search(name) or name.startswith(tuple(ignore)):
                del self._left[name]

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, shape: tuple[int, ...]) -> HostTensor:
        """The tensor `name`, which must have `shape`; a problem is reported by `finish`."""
        tensor = self.take_optional(name, shape)
        return tensor if tensor is not None else self._problem(name, shape, f"{name} {list(shape)} is missing")

    def take_optional(self, name: str, shape: tuple[int, ...]) -> HostTensor | None:
        """As `take`, but None where the checkpoint has no such tensor."""
        if name in self._taken:
            raise AssertionError(f"parameter {name} was filled twice")
        tensor = self._left.pop(name, None)
        if tensor is None:
            return None
        self._taken.add(name)
        if tensor.shape != shape:
            found = f"{name} has shape {list(tensor.shape)}; the configuration makes it {list(shape)}"
            return self._problem(name, shape, found)
        return tensor

    def take_head(
        self, shape: tuple[int, ...], *, tied: bool, embedding: HostTensor, name: str = "lm_head.weight"
    ) -> HostTensor | None:
        """The output matrix, or None when it is tied: then `embedding` serves.

        A tied checkpoint that stores one all the same has it ignored, as in `transformers`; with a warning if it
        is not the embedding's equal. An untied one must store it.
        """
        if not tied:
            return self.take(name, shape)
        head = self.take_optional(name, shape)
        if head is not None and not isinstance(head, MissingTensor) and not _equal(head, embedding):
            log.warning("%s differs from the embedding, and is ignored: tie_word_embeddings is true.", name)
        return None

    def finish(self) -> None:
        """Raise CheckpointError unless every `take` succeeded and no tensor is left over."""
        problems = list(self._problems)
        if self._left:
            problems.append(f"{len(self._left)} tensors have no use in this model: {_listing(sorted(self._left))}")
        if problems:
            raise CheckpointError(
                f"{self.checkpoint.files[0]} does not fit its configuration: {_listing(problems, '; ')}. "
                "The download may be incomplete, or config.json may belong to another model."
            )

    def _problem(self, name: str, shape: tuple[int, ...], problem: str) -> MissingTensor:
        self._problems.append(problem)
        return MissingTensor(name, shape, f"{self.checkpoint.files[0]}: {problem}.")


def _listing(items: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(items[:20])
    return shown if len(items) <= 20 else f"{shown} and {len(items) - 20} more"


def _equal(a: HostTensor, b: HostTensor) -> bool:
    if a.type_name != b.type_name or a.shape != b.shape:
        return False
    x, y = a.numpy(), b.numpy()
    step = max(1, COMPARE_BYTES // max(1, x[0].nbytes))
    return all(x[i : i + step].tobytes() == y[i : i + step].tobytes() for i in range(0, len(x), step))
