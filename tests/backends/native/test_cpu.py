from __future__ import annotations

import inspect
import platform
import re
from pathlib import Path

import pytest

from octavo import _native
from octavo.backends.native.cpu import detect_cpu


@pytest.mark.skipif(platform.machine() != "x86_64", reason="CPUID is x86-64's")
def test_features_agree_with_the_kernels_own_list() -> None:
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert flags is not None
    listed = set(flags.group(1).split())
    found = {name: present for name, present in _native.cpu_features().items() if not name.startswith("amx")}
    assert found == {name: name in listed for name in found}


def test_the_portable_kernels_always_run_and_come_first() -> None:
    assert detect_cpu().isas[0] == "portable"


def test_vector_kernels_are_offered_exactly_when_their_features_are_present() -> None:
    cpu = detect_cpu()
    features = set(cpu.features)
    assert ("avx2" in cpu.isas) == ({"avx2", "fma", "f16c"} <= features)
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert ("avx512" in cpu.isas) == (avx512 | {"avx2", "fma", "f16c"} <= features)


def test_the_processor_has_a_name() -> None:
    assert detect_cpu().model_name.strip()


def test_the_type_stub_names_exactly_what_the_extension_holds() -> None:
    stub = Path(inspect.getfile(detect_cpu)).parents[2] / "_native.pyi"
    typed = set(re.findall(r"^(?:def |class )?([A-Za-z]\w*)(?:\(|:)", stub.read_text(), re.MULTILINE))
    assert typed == {name for name in dir(_native) if not name.startswith("_")}
