"""`octavo pull`: fetches models that `octavo serve` can then load; without a name it lists the catalogue."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from octavo.cli.flags import Parser
from octavo.config import cache_dir
from octavo.loader.catalogue import CATALOGUE, pulled_models
from octavo.loader.source import resolve_source


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="catalogue names or Hugging Face ids; none: list the catalogue"
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a Hugging Face model")
    parser.add_argument("--quiet", action="store_true", help="no progress bar; print paths and licence terms alone")


def run(args: argparse.Namespace) -> int:
    if not args.names:
        print(_catalogue())
        return 0
    for name in args.names:
        with _Bars(name, is_hidden=args.quiet or not sys.stderr.isatty()) as bars:
            model = resolve_source(
                name, cache=cache_dir(), revision=args.revision, fetch=True, progress=bars.show, notice=_notice
            )
        print(model.path)
    return 0


def _notice(text: str) -> None:
    print(text, file=sys.stderr)


def _catalogue() -> str:
    pulled = {model.name for model in pulled_models(cache_dir())}
    width = max(map(len, CATALOGUE))
    return "\n".join(
        f"{model.name:<{width}}  {model.size_bytes / 1e6:4.0f} MB  {'pulled' if model.name in pulled else '      '}  "
        f"{model.description} ({model.license})"
        for model in CATALOGUE.values()
    )


class _Bars:
    """One progress bar for each phase of a pull."""

    def __init__(self, name: str, *, is_hidden: bool) -> None:
        self._name = name
        self._is_hidden = is_hidden
        self._phase = ""
        self._bar: tqdm[NoReturn] | None = None

    def show(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase or self._bar is None:
            self._close()
            self._phase = phase
            self._bar = tqdm(
                desc=f"{self._name}: {phase}", total=total or None, unit="B", unit_scale=True, disable=self._is_hidden
            )
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
