"""The names of the files of a split GGUF model."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import CheckpointError

SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` belongs to, by its name: itself alone unless NAME-00001-of-00003.gguf."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["part"]) <= count <= 10000:
        raise CheckpointError(f"{path.name} names part {match['part']} of {match['count']}; there is no such part.")
    return tuple(path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1))
