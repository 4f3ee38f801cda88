from __future__ import annotations

import pytest
from tests.golden.architectures import GoldenModel, Maker, make_golden_model


@pytest.fixture(scope="session")
def golden_model(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes the model of a name in `ARCHITECTURES`, once per session."""
    made: dict[str, GoldenModel] = {}

    def make(name: str) -> GoldenModel:
        if name not in made:
            made[name] = make_golden_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make
