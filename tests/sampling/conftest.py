"""The sampler over NumPy, which is the definition, and over the extension's kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo import _native
from octavo.backends.native.sampler import NativeSampler
from octavo.sampling.sampler import LogprobsMode, Sampler


@pytest.fixture(params=["numpy", "native"])
def make_sampler(request: pytest.FixtureRequest) -> Callable[..., Sampler]:
    if request.param == "numpy":
        return Sampler
    team = _native.Team(2)

    def make(vocab_size: int, logprobs_mode: LogprobsMode = "raw") -> Sampler:
        return Sampler(vocab_size, logprobs_mode, NativeSampler(team, vocab_size))

    return make
