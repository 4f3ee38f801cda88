"""Runs native functions of this process on an emulated processor with AVX-512 and AMX.

For testing kernels whose instructions the machine at hand lacks. The processor is Bochs' CPU core from the
`bochscpu-python` package (its exported C functions, called through ctypes), as a Sapphire Rapids in long mode
at privilege level 0. Its page tables are filled from this process' own memory map, on each page fault, with the
same addresses and permissions: the function reads and writes the very memory that the caller sees, and a wild
access is a Fault, not a crash. This build of Bochs has no AMX: tile instructions trap and run in tiles.py.

What runs: System V functions of integer, pointer and float arguments and what they call, libc's memcpy and the
like included. What does not, and is a Fault: system calls, and allocations and locks, as the emulator itself
allocates on the same thread between two instructions; so the first touch of a thread-local must be a native one.
Other threads may run meanwhile, but nothing emulated is atomic to them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import operator
import os
import platform
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tests.native.tiles import INVALID_OPCODE, TileFault, TileUnit

PAGE = 4096
PRESENT, WRITABLE, NO_EXECUTE = 1, 2, 1 << 63
ADDRESS_BITS = 0x000F_FFFF_FFFF_F000
BREAKPOINT, PAGE_FAULT = 3, 14
PUSH_ERROR_CODE = {8, 10, 11, 12, 13, 14, 17, 21}
VECTOR_NAMES = {0: "#DE divide error", 3: "#BP breakpoint", 6: "#UD invalid opcode", 7: "#NM no such unit",
                8: "#DF double fault", 12: "#SS stack", 13: "#GP general protection", 14: "#PF page fault",
                16: "#MF x87", 17: "#AC alignment", 19: "#XM SIMD floating point"}  # fmt: skip

# Emulated physical memory: the control block, then from 4 GiB on one page for each page of ours in use.
CONTROL_GPA, PAGES_GPA = 1 << 20, 1 << 32
# The control block: descriptors and stubs in one page, the fault stack in the next, then the page tables.
TASK_STATE, INTERRUPTS, STUBS, RETURN_STUB = 0x100, 0x200, 0x800, 0xC00
NUM_TABLES = 4096
STACK_BYTES = 4 << 20
NOT_EMULATED = ("malloc", "calloc", "realloc", "free", "pthread_mutex_lock")
# Pages around a faulting one that are mapped with it.
FAULT_AROUND = 16 * PAGE

RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI = range(8)
ARGUMENT_REGISTERS = (RDI, RSI, RDX, RCX, 8, 9)
ES, CS, SS, DS, FS, GS = range(6)
CODE_SELECTOR, DATA_SELECTOR, TASK_SELECTOR = 0x08, 0x10, 0x18
ARCH_PRCTL, ARCH_GET_FS = 158, 0x1003

Isa = Literal["avx2", "avx512", "amx"]
# The state that the operating system enables: x87, SSE, AVX; and the masks and ZMM registers of AVX-512.
XCR0 = {"avx2": 0x07, "avx512": 0xE7, "amx": 0xE7}
SAPPHIRE_RAPIDS = 30  # its place in Bochs' cpudb.h

# What CMakeLists.txt compiles the kernels of these instruction sets with.
KERNEL_FLAGS = {"avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni".split()}
KERNEL_FLAGS["amx"] = [*KERNEL_FLAGS["avx512"], *"-mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16".split()]


class Unavailable(Exception):
    """Why nothing can be emulated here."""


class Fault(Exception):
    """The function raised a processor exception: `vector`, at instruction `rip`."""

    def __init__(self, vector: int, rip: int, detail: str) -> None:
        super().__init__(
            f"{VECTOR_NAMES.get(vector, f'exception {vector}')} at rip {rip:#x} ({describe(rip)}): {detail}"
        )
        self.vector = vector
        self.rip = rip


class Emulator:
    """One emulated thread of a processor with instruction set `isa`.

    "avx512" has F, BW, DQ, VL, CD, VNNI, BF16, FP16 and the others of Sapphire Rapids; "amx" has the tile,
    int8 and bf16 sets as well. The tile configuration, the tiles and MXCSR last from call to call.
    """

    def __init__(self, isa: Isa = "amx", *, mxcsr: int = 0x1F80) -> None:
        self._core = core()
        self._xcr0 = XCR0[isa]
        self._tiles = TileUnit(self._core.check) if isa == "amx" else None
        self.mxcsr = mxcsr

    def call(self, function: Any, *arguments: Any, timeout_s: float = 60.0) -> int:
        """Call `function` (an address or a ctypes function) and return rax, unsigned.

        Arguments: int, None, ctypes c_void_p, c_float and c_double, and NumPy arrays (their address).
        Raises Fault, or TimeoutError when the function has not returned after `timeout_s`.
        """
        address = function if isinstance(function, int) else ctypes.cast(function, ctypes.c_void_p).value or 0
        core = self._core
        with core.lock:
            core.reset(self._xcr0, self.mxcsr)
            core.enter(address, arguments)
            with core.limited(timeout_s) as run:
                while (event := core.run(run)) is not None:
                    self._handle(*event)
            if run.is_late:
                raise TimeoutError(f"{describe(address)} has not returned after {timeout_s:g} s")
            self.mxcsr = core.lib.cpu_get_mxcsr(0)
            return core.register(RAX)

    def _handle(self, vector: int, rip: int, rsp: int, error: int) -> None:
        """Make the instruction at `rip` ready to be retried or skipped, or raise its Fault."""
        core = self._core
        if vector == PAGE_FAULT:
            touched = core.lib.cpu_get_cr2(0)
            if error & 1 or not core.map_around(touched):
                kind = "execution" if error & 16 else "write" if error & 2 else "read"
                raise Fault(vector, rip, f"{kind} at {touched:#x}, {'not allowed' if error & 1 else 'not mapped'}")
        elif vector == BREAKPOINT and rip - 1 in core.not_emulated:
            raise Fault(vector, rip - 1, f"{core.not_emulated[rip - 1]} is called, which cannot be emulated")
        elif vector == INVALID_OPCODE:
            code = ctypes.string_at(rip, min(16, core.readable_bytes(rip))).ljust(16, b"\0")
            try:
                # The register itself points into the fault stack now.
                length = self._tiles and self._tiles.execute(code, rip, lambda r: rsp if r == RSP else core.register(r))
            except TileFault as fault:
                raise Fault(fault.vector, rip, str(fault)) from None
            if not length:
                raise Fault(vector, rip, f"bytes {code.hex(' ')}")
            rip += length
        else:
            raise Fault(vector, rip, f"error code {error:#x}")
        core.resume(rip, rsp)


@dataclass(slots=True)
class Run:
    deadline: float
    is_late: bool = False


class Core:
    """The process' one emulated processor, its control block and its page tables."""

    def __init__(self) -> None:
        self.lib = lib = load_bochs()
        self.lock = threading.Lock()
        lib._ZN14bx_param_num_c9set_rangeEmm(lib.sim_get_param_enum(b"cpu.model"), 0, SAPPHIRE_RAPIDS)
        lib._ZN14bx_param_num_c3setEl(lib.sim_get_param_enum(b"cpu.model"), SAPPHIRE_RAPIDS)
        lib.cpu_new(0)
        self._cpu = lib.bochscpu_cpu_from(0)
        # A halt stops the run: the hooks are the context and 25 functions, of which the second is for halts.
        hooks = (ctypes.c_void_p * 26)(self._cpu, None, ctypes.cast(lib.bochscpu_cpu_stop, ctypes.c_void_p))
        self._hooks = (ctypes.c_void_p * 2)(ctypes.addressof(hooks), None), hooks

        self._block = allocate((2 + NUM_TABLES) * PAGE)
        for at in range(0, (2 + NUM_TABLES) * PAGE, PAGE):
            lib.bochscpu_mem_page_insert(CONTROL_GPA + at, self._block + at)
        self._tables = np.ctypeslib.as_array((ctypes.c_uint64 * 512 * NUM_TABLES).from_address(self._block + 2 * PAGE))
        self._num_tables = 1
        self._mapped: list[int] = []  # emulated physical pages that are in the page tables
        self._next_gpa = PAGES_GPA
        libc = ctypes.CDLL(None)
        self.not_emulated = {
            ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0: name for name in NOT_EMULATED
        }
        self._copies = {address & -PAGE: allocate(PAGE) for address in self.not_emulated}
        self._stack = allocate(STACK_BYTES)
        libc.mprotect(ctypes.c_void_p(self._stack), PAGE, 0)
        self._write_descriptors()
        self._map_text = ""
        self._regions: list[tuple[int, int, str]] = []
        self._starts: list[int] = []
        self._last_region = (0, 0, "")
        self._watching = threading.Lock()
        self._running: Run | None = None
        threading.Thread(target=self._stop_late_runs, daemon=True).start()

    def _write_descriptors(self) -> None:
        block, fault_stack = self._block, self._block + 2 * PAGE
        words = (ctypes.c_uint64 * 512).from_address(block)
        words[CODE_SELECTOR // 8], words[DATA_SELECTOR // 8] = 0x00AF_9B00_0000_FFFF, 0x00CF_9300_0000_FFFF
        ctypes.c_uint64.from_address(block + TASK_STATE + 0x24).value = fault_stack
        for vector in range(32):
            stub = block + STUBS + 16 * vector
            gate = INTERRUPTS // 8 + 2 * vector
            words[gate] = stub & 0xFFFF | CODE_SELECTOR << 16 | 0x8E01 << 32 | (stub >> 16 & 0xFFFF) << 48
            words[gate + 1] = stub >> 32
        ctypes.memset(block + STUBS, 0xF4, RETURN_STUB + 16 - STUBS)  # hlt

    def reset(self, xcr0: int, mxcsr: int) -> None:
        """Empty page tables, fresh registers, long mode."""
        lib = self.lib
        for gpa in self._mapped:
            lib.bochscpu_mem_page_remove(gpa)
        self._mapped.clear()
        self._tables[: self._num_tables] = 0
        self._num_tables = 1
        self._read_memory_map()
        for at in (0, PAGE):
            table, index = self._entry(self._block + at)
            self._tables[table, index] = CONTROL_GPA + at | PRESENT | WRITABLE

        thread_area = ctypes.c_uint64()
        ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_GET_FS, ctypes.byref(thread_area))
        for segment in (ES, SS, DS, FS, GS):
            lib.cpu_set_seg(
                0, segment, 1, DATA_SELECTOR, thread_area.value if segment == FS else 0, 0xFFFF_FFFF, 0xC093
            )
        lib.cpu_set_seg(0, CS, 1, CODE_SELECTOR, 0, 0xFFFF_FFFF, 0xA09B)
        lib.cpu_set_tr(0, 1, TASK_SELECTOR, self._block + TASK_STATE, 0x67, 0x8B)
        lib.cpu_set_gdtr(0, self._block, 0x1F)
        lib.cpu_set_idtr(0, self._block + INTERRUPTS, 32 * 16 - 1)
        lib.cpu_set_cr3(0, CONTROL_GPA + 2 * PAGE)
        lib.cpu_set_cr4(0, 1 << 18 | 1 << 16 | 1 << 10 | 1 << 9 | 1 << 5)  # OSXSAVE FSGSBASE OSXMMEXCPT OSFXSR PAE
        lib.cpu_set_efer(0, 1 << 11 | 1 << 10 | 1 << 8)  # NXE LMA LME, and no SCE: system calls are invalid opcodes
        lib.cpu_set_cr0(0, 1 << 31 | 1 << 16 | 1 << 5 | 1 << 4 | 1 << 1 | 1)  # PG WP NE ET MP PE
        lib.cpu_set_xcr0(0, xcr0)
        lib.cpu_set_mxcsr(0, mxcsr)
        lib.cpu_set_eflags(0, 2)
        for register in range(16):
            lib.cpu_set_reg64(0, register, 0)
        lib.cpu_set_mode(0)

    def enter(self, address: int, arguments: tuple[Any, ...]) -> None:
        integers: list[int] = []
        num_floats = 0
        for argument in arguments:
            if isinstance(argument, ctypes.c_float | ctypes.c_double):
                bits = int.from_bytes(bytes(argument), "little")
                self.lib.cpu_set_zmm(0, num_floats, (ctypes.c_uint64 * 8)(bits))
                num_floats += 1
            else:
                integers.append(as_integer(argument))
        on_stack = integers[len(ARGUMENT_REGISTERS) :]
        if num_floats > 8:
            raise ValueError(f"{num_floats} float arguments; at most 8 travel in registers")
        # At the first instruction, rsp + 8 is a multiple of 16.
        rsp = (self._stack + STACK_BYTES - 8 * len(on_stack) & ~15) - 8
        for at, value in enumerate((self._block + RETURN_STUB, *on_stack)):
            ctypes.c_uint64.from_address(rsp + 8 * at).value = value & (1 << 64) - 1
        for register, value in zip(ARGUMENT_REGISTERS, integers, strict=False):
            self.lib.cpu_set_reg64(0, register, value & (1 << 64) - 1)
        self.resume(address, rsp)

    def resume(self, rip: int, rsp: int) -> None:
        self.lib.cpu_set_pc(0, rip)
        self.lib.cpu_set_sp(0, rsp)

    def run(self, run: Run) -> tuple[int, int, int, int] | None:
        """Run up to the return or the time limit, then None, or up to an exception: vector, rip, rsp, error code."""
        if run.is_late:
            return None
        self.lib.bochscpu_cpu_run(self._cpu, self._hooks[0])
        halted_at = self.lib.cpu_get_pc(0) - 1 - self._block
        if halted_at == RETURN_STUB or run.is_late:
            return None
        if not STUBS <= halted_at < RETURN_STUB:
            raise RuntimeError(f"the emulator stopped at {halted_at + 1 + self._block:#x} and does not say why")
        vector = (halted_at - STUBS) // 16
        pushed = (ctypes.c_uint64 * 6).from_address(self._block + 2 * PAGE - 48)
        error, rip, _, _, rsp, _ = pushed if vector in PUSH_ERROR_CODE else (0, *pushed[1:])
        return vector, rip, rsp, error

    @contextmanager
    def limited(self, timeout_s: float) -> Iterator[Run]:
        run = Run(time.monotonic() + timeout_s)
        try:
            with self._watching:
                self._running = run
            yield run
        finally:
            with self._watching:
                self._running = None

    def _stop_late_runs(self) -> None:
        while True:
            time.sleep(0.05)
            with self._watching:
                if self._running and time.monotonic() > self._running.deadline:
                    self._running.is_late = True
                    self.lib.bochscpu_cpu_stop(self._cpu)

    def register(self, number: int) -> int:
        return int(self.lib.cpu_get_reg64(0, number))

    def map_around(self, address: int) -> bool:
        """Map the page of `address` and some around it as they are in this process; False where there is none."""
        region = self._region(address)
        if region is None:
            return False
        start, end, permissions = region
        first = max(start, address & -FAULT_AROUND)
        last = min(end, (address & -FAULT_AROUND) + FAULT_AROUND)
        flags = PRESENT | (WRITABLE if "w" in permissions else 0) | (0 if "x" in permissions else NO_EXECUTE)
        table, index = self._entry(first)
        for page in range(first, last, PAGE):
            if not self._tables[table, index]:
                # Never a number used before: Bochs keeps decoded instructions by physical address.
                self.lib.bochscpu_mem_page_insert(self._next_gpa, self._copy(page) if page in self._copies else page)
                self._tables[table, index] = self._next_gpa | flags
                self._mapped.append(self._next_gpa)
                self._next_gpa += PAGE
            index += 1
        return True

    def _copy(self, page: int) -> int:
        """A copy of a page of code with a breakpoint at each function that cannot be emulated."""
        copy = self._copies[page]
        ctypes.memmove(copy, page, PAGE)
        for address in self.not_emulated:
            if address & -PAGE == page:
                ctypes.memset(copy + address - page, 0xCC, 1)
        return copy

    def _entry(self, address: int) -> tuple[int, int]:
        """The page table that holds `address`, and its index there."""
        table = 0
        for shift in (39, 30, 21):
            index = address >> shift & 511
            if not self._tables[table, index]:
                if self._num_tables == NUM_TABLES:
                    raise MemoryError(f"the function touches too much memory: more than {NUM_TABLES} page tables")
                gpa = CONTROL_GPA + (2 + self._num_tables) * PAGE
                self._tables[table, index] = gpa | PRESENT | WRITABLE
                self._num_tables += 1
            table = ((int(self._tables[table, index]) & ADDRESS_BITS) - CONTROL_GPA) // PAGE - 2
        return table, address >> 12 & 511

    def check(self, address: int, num_bytes: int, write: bool) -> None:
        end = address + num_bytes
        while address < end:
            region = self._region(address)
            if region is None or (write and "w" not in region[2]):
                reason = "not mapped" if region is None else "not allowed"
                raise TileFault(PAGE_FAULT, f"{'write' if write else 'read'} at {address:#x}, {reason}")
            address = region[1]

    def readable_bytes(self, address: int) -> int:
        region = self._region(address)
        return region[1] - address if region else 0

    def _region(self, address: int) -> tuple[int, int, str] | None:
        start, end, permissions = self._last_region
        if not start <= address < end:
            start, end, permissions = self._regions[bisect_right(self._starts, address) - 1]
            if not start <= address < end or permissions[0] != "r":
                return None
            self._last_region = start, end, permissions
        return self._last_region

    def _read_memory_map(self) -> None:
        text = Path("/proc/self/maps").read_text()
        if text == self._map_text:
            return
        self._map_text, self._last_region = text, (0, 0, "")
        self._regions.clear()
        for line in text.splitlines():
            span, permissions = line.split(maxsplit=2)[:2]
            start, end = (int(address, 16) for address in span.split("-"))
            self._regions.append((start, end, permissions))
        self._starts = [start for start, _, _ in self._regions]


@cache
def core() -> Core:
    return Core()


def as_integer(argument: Any) -> int:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data
    if isinstance(argument, ctypes.c_void_p):
        argument = argument.value
    return 0 if argument is None else operator.index(argument)


def allocate(num_bytes: int) -> int:
    """Zeroed pages that live as long as the process."""
    pages = mmap.mmap(-1, num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    _allocated.append(pages)
    return address


_allocated: list[mmap.mmap] = []


def load_bochs() -> ctypes.CDLL:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"emulation needs Linux on x86-64, not {platform.system()} on {platform.machine()}")
    spec = importlib.util.find_spec("bochscpu")
    found = [
        file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("_bochscpu*.so")
    ]
    if not found:
        raise Unavailable("emulation needs the package bochscpu-python (pip install bochscpu-python==0.4.0)")
    # Bound lazily and not imported: the wheel names two functions of glibc 2.38 that are never called here.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    handle = dlopen(os.fsencode(found[0]), os.RTLD_LAZY)
    if not handle:
        raise Unavailable(f"{found[0]} cannot be loaded; with LD_BIND_NOW set it needs glibc 2.38")
    lib = ctypes.CDLL(str(found[0]), handle=handle)
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    signatures = {
        "sim_get_param_enum": (pointer, ctypes.c_char_p),
        "_ZN14bx_param_num_c9set_rangeEmm": (None, pointer, u64, u64),
        "_ZN14bx_param_num_c3setEl": (None, pointer, ctypes.c_int64),
        "cpu_new": (None, u32),
        "bochscpu_cpu_from": (pointer, u32),
        "bochscpu_cpu_run": (None, pointer, pointer),
        "bochscpu_cpu_stop": (None, pointer),
        "bochscpu_mem_page_insert": (None, u64, pointer),
        "bochscpu_mem_page_remove": (None, u64),
        "cpu_set_seg": (None, u32, u32, u32, ctypes.c_uint16, u64, u32, ctypes.c_uint16),
        "cpu_set_tr": (None, u32, u32, ctypes.c_uint16, u64, u32, ctypes.c_uint16),
        "cpu_set_gdtr": (None, u32, u64, ctypes.c_uint16),
        "cpu_set_idtr": (None, u32, u64, ctypes.c_uint16),
        "cpu_set_reg64": (None, u32, u32, u64),
        "cpu_get_reg64": (u64, u32, u32),
        "cpu_set_zmm": (None, u32, u32, pointer),
        "cpu_set_pc": (None, u32, u64),
        "cpu_get_pc": (u64, u32),
        "cpu_set_sp": (None, u32, u64),
        "cpu_get_cr2": (u64, u32),
        "cpu_set_cr3": (None, u32, u64),
        "cpu_get_mxcsr": (u32, u32),
        "cpu_set_mode": (None, u32),
        **dict.fromkeys(
            ("cpu_set_cr0", "cpu_set_cr4", "cpu_set_efer", "cpu_set_xcr0", "cpu_set_mxcsr", "cpu_set_eflags"),
            (None, u32, u32),
        ),
    }
    for name, (result, *parameters) in signatures.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise Unavailable(f"{found[0]} has no {name}; bochscpu-python 0.4.0 has") from None
        function.restype, function.argtypes = result, parameters
    return lib


class _SymbolInfo(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("name", ctypes.c_char_p), ("address", ctypes.c_void_p)]  # fmt: skip


def describe(address: int) -> str:
    """The nearest exported symbol at or before `address`, or else its place in the file that holds it."""
    info = _SymbolInfo()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    if not dladdr(address, ctypes.byref(info)):
        return "outside any library"
    if info.name:
        return f"{os.fsdecode(info.name)}+{address - info.address:#x}"
    return f"{Path(os.fsdecode(info.file)).name}+{address - info.base:#x}"
