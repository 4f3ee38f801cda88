"""Where everything that the peers need is kept: outside the repository, in one folder that `--envs` names."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "octavo-peers"


def add_envs_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--envs",
        type=lambda text: Path(text).expanduser().resolve(),
        default=default_folder(),
        metavar="DIR",
        help="folder of the engines' environments and of the models' variants (default: %(default)s)",
    )


def engine_folder(envs: Path, engine: str) -> Path:
    return envs / engine


def models_folder(envs: Path) -> Path:
    return envs / "models"
