"""Checksums of tensors in GPU memory, computed there: the algorithm "mix64-sum".

    words      a tensor's bytes as little-endian 64-bit words w[0], w[1], ..., the last one filled up with zeros
    sum        of mix64(w[i] + (i + 1) * GOLDEN) over all i, modulo 2^64
    checksum   mix64(sum ^ number of bytes)

mix64 is the finaliser of the generator splitmix64. It is one-to-one, so a tensor with one changed word always has
another checksum; any other change is missed with a chance of about 2^-64. It is no proof against someone who wants to
deceive. A sum does not depend on the order, so all threads of a GPU read at once, at the speed of its memory.

The kernel is PTX, which the driver translates for its GPU: no compiler is needed where this runs. In CUDA C:

    __global__ void weightcached_mix64_sum(const u64 *chunks, u64 *sums)
    {
        const u64 *chunk = chunks + blockIdx.x;  // four columns, of as many rows as there are blocks
        u64 address = chunk[0], nbytes = chunk[gridDim.x];
        u64 first = chunk[2 * gridDim.x], tensor = chunk[3 * gridDim.x];  // number of the first word, of the tensor
        u64 whole = nbytes & -16, sum = 0;
        for (u64 at = 16 * threadIdx.x; at < whole; at += 16 * blockDim.x) {  // in the PTX four at once, while it can
            ulonglong2 words = *(ulonglong2 *)(address + at);
            u64 step = (first + at / 8 + 1) * GOLDEN;
            sum += mix64(words.x + step) + mix64(words.y + step + GOLDEN);
        }
        u64 at = whole + 8 * threadIdx.x;  // the last 0 to 15 bytes are one word each of two threads
        if (at < nbytes) {
            u64 word = 0;
            for (u64 byte = 0; byte < min(nbytes - at, 8); byte++)
                word |= (u64)*(unsigned char *)(address + at + byte) << 8 * byte;
            sum += mix64(word + (first + at / 8 + 1) * GOLDEN);
        }
        for (int lanes = 16; lanes; lanes /= 2)
            sum += __shfl_down_sync(0xffffffff, sum, lanes);
        if (threadIdx.x % 32 == 0)
            atomicAdd(&sums[tensor], sum);
    }
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from . import cuda
from .manifest import MIX64_SUM, Checksums, TensorEntry

THREADS = 256  # of a block; one block reads one chunk
CHUNK_BYTES = 1 << 20  # a multiple of 16, so that every chunk begins where two words can be read at once
KERNEL = b"weightcached_mix64_sum"
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_STEP = 16 * THREADS  # bytes that a block reads with one load of each thread


def mix64(word: int) -> int:
    """The finaliser of splitmix64, of 64 bits to 64 bits, one-to-one."""
    word = (word ^ word >> 30) * _MULTIPLIERS[0] & _MASK
    word = (word ^ word >> 27) * _MULTIPLIERS[1] & _MASK
    return word ^ word >> 31


def checksum_slab(context: cuda.PrimaryContext, address: int, entries: Sequence[TensorEntry]) -> Checksums:
    """One checksum for each entry, in order, of its `nbytes` bytes at `address + offset` of device memory.

    `address` is where a slab, or a range of several, is mapped, readable, and a multiple of 16, as are the offsets. All
    work on the memory must be finished (`context.synchronize`); the checksums' own is when this returns. Takes some 32
    bytes a MiB of device memory meanwhile. `DeviceError` for any refusal of the driver, with everything given back;
    after a fault of the kernel itself the process's context is lost, as after any.
    """
    chunks = _chunks(address, entries)
    sums = array("Q", bytes(8 * len(entries)))
    if chunks:
        with context.current():
            _launch(chunks, sums)
    numbers = zip(entries, sums, strict=True)
    return Checksums(MIX64_SUM, tuple(f"{mix64(total ^ entry.nbytes):016x}" for entry, total in numbers))


def _chunks(address: int, entries: Sequence[TensorEntry]) -> array[int]:
    """The kernel's table: the columns address, bytes, first word and tensor. Empty tensors have no chunk.

    Column by column, since a row at a time takes Python longer than the kernel takes.
    """
    addresses, sizes, words, numbers = (array("Q") for _ in range(4))
    for number, entry in enumerate(entries):
        whole, rest = divmod(entry.nbytes, CHUNK_BYTES)
        begin = address + entry.offset
        addresses.extend(range(begin, begin + entry.nbytes, CHUNK_BYTES))
        sizes.extend([CHUNK_BYTES] * whole + ([rest] if rest else []))
        words.extend(range(0, -(-entry.nbytes // 8), CHUNK_BYTES // 8))
        numbers.extend([number] * (whole + bool(rest)))
    return addresses + sizes + words + numbers


def _launch(chunks: array[int], sums: array[int]) -> None:
    """Runs the kernel in the current context, on its default stream, and waits; `sums` are zeros before."""
    driver = cuda.driver()
    data = chunks.tobytes() + sums.tobytes()
    with ExitStack() as undo:
        module = cuda.check(driver.cuModuleLoadData(PTX), "cuModuleLoadData")
        undo.callback(_free, driver.cuModuleUnload, module, "cuModuleUnload")
        kernel = cuda.check(driver.cuModuleGetFunction(module, KERNEL), "cuModuleGetFunction")
        table = int(cuda.check(driver.cuMemAlloc(len(data)), f"cuMemAlloc of {len(data)} bytes"))
        undo.callback(_free, driver.cuMemFree, table, "cuMemFree")
        results = table + chunks.itemsize * len(chunks)
        cuda.check(driver.cuMemcpyHtoD(table, data, len(data)), "cuMemcpyHtoD")
        arguments = (ctypes.c_uint64 * 2)(table, results)
        first = ctypes.addressof(arguments)
        pointers = (ctypes.c_void_p * 2)(first, first + 8)
        grid, block = (len(chunks) // 4, 1, 1), (THREADS, 1, 1)
        result = driver.cuLaunchKernel(kernel, *grid, *block, 0, 0, ctypes.addressof(pointers), 0)
        cuda.check(result, "cuLaunchKernel")
        found = bytearray(8 * len(sums))
        # Waits for the kernel, and reports what went wrong in it.
        cuda.check(driver.cuMemcpyDtoH(found, results, len(found)), "checksum kernel")
    sums[:] = array("Q", bytes(found))


def _free(function: Any, what: Any, name: str) -> None:
    cuda.check(function(what), name)


def _mixed(word: str) -> str:
    """PTX that adds mix64 of a register to the sum."""
    return f"""
    shr.u64 %high, {word}, 30;
    xor.b64 {word}, {word}, %high;
    mul.lo.u64 {word}, {word}, {_MULTIPLIERS[0]:#x};
    shr.u64 %high, {word}, 27;
    xor.b64 {word}, {word}, %high;
    mul.lo.u64 {word}, {word}, {_MULTIPLIERS[1]:#x};
    shr.u64 %high, {word}, 31;
    xor.b64 {word}, {word}, %high;
    add.u64 %sum, %sum, {word};"""


def _pair(even: str, odd: str, step: int) -> str:
    """PTX that adds two loaded words, the first of which is `step` words after the thread's own."""
    return f"""
    add.u64 {even}, {even}, %step;
    add.u64 {even}, {even}, {step * GOLDEN & _MASK:#x};{_mixed(even)}
    add.u64 {odd}, {odd}, %step;
    add.u64 {odd}, {odd}, {(step + 1) * GOLDEN & _MASK:#x};{_mixed(odd)}"""


def _lane_sum(lanes: int) -> str:
    """PTX that adds the sum of the thread `lanes` further on in the warp."""
    return f"""
    mov.b64 {{%low32, %high32}}, %sum;
    shfl.sync.down.b32 %low32, %low32, {lanes}, 31, 0xffffffff;
    shfl.sync.down.b32 %high32, %high32, {lanes}, 31, 0xffffffff;
    mov.b64 %word, {{%low32, %high32}};
    add.u64 %sum, %sum, %word;"""


_SOURCE = f"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry {KERNEL.decode()}(
    .param .u64 chunks,
    .param .u64 sums
)
.maxntid {THREADS}, 1, 1
{{
    .reg .pred %past;
    .reg .b32 %thread, %lane, %block, %blocks, %shift, %low32, %high32;
    .reg .b64 %chunk, %address, %nbytes, %first, %tensor, %sums;
    .reg .b64 %whole, %at, %last, %step, %left, %sum, %word, %high;
    .reg .b64 %a, %b, %c, %d, %e, %f, %g, %h;

    ld.param.u64 %chunk, [chunks];
    cvta.to.global.u64 %chunk, %chunk;
    mov.u32 %block, %ctaid.x;
    mul.wide.u32 %at, %block, 8;
    add.u64 %chunk, %chunk, %at;
    mov.u32 %blocks, %nctaid.x;
    mul.wide.u32 %at, %blocks, 8;
    ld.global.nc.u64 %address, [%chunk];
    add.u64 %chunk, %chunk, %at;
    ld.global.nc.u64 %nbytes, [%chunk];
    add.u64 %chunk, %chunk, %at;
    ld.global.nc.u64 %first, [%chunk];
    add.u64 %chunk, %chunk, %at;
    ld.global.nc.u64 %tensor, [%chunk];
    cvta.to.global.u64 %address, %address;
    add.u64 %first, %first, 1;

    // Where the thread begins: %at in the chunk, %chunk in memory, %step for its first word.
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %thread, 16;
    add.u64 %chunk, %address, %at;
    shr.u64 %word, %at, 3;
    add.u64 %word, %word, %first;
    mul.lo.u64 %step, %word, {GOLDEN:#x};
    and.b64 %whole, %nbytes, -16;
    add.u64 %last, %at, {3 * _STEP};
    mov.u64 %sum, 0;

FOUR:
    setp.ge.u64 %past, %last, %whole;
    @%past bra ONE;
    ld.global.nc.v2.u64 {{%a, %b}}, [%chunk];
    ld.global.nc.v2.u64 {{%c, %d}}, [%chunk+{_STEP}];
    ld.global.nc.v2.u64 {{%e, %f}}, [%chunk+{2 * _STEP}];
    ld.global.nc.v2.u64 {{%g, %h}}, [%chunk+{3 * _STEP}];{_pair("%a", "%b", 0)}{_pair("%c", "%d", _STEP // 8)}\
{_pair("%e", "%f", 2 * _STEP // 8)}{_pair("%g", "%h", 3 * _STEP // 8)}
    add.u64 %at, %at, {4 * _STEP};
    add.u64 %last, %last, {4 * _STEP};
    add.u64 %chunk, %chunk, {4 * _STEP};
    add.u64 %step, %step, {4 * _STEP // 8 * GOLDEN & _MASK:#x};
    bra FOUR;

ONE:
    setp.ge.u64 %past, %at, %whole;
    @%past bra TAIL;
    ld.global.nc.v2.u64 {{%a, %b}}, [%chunk];{_pair("%a", "%b", 0)}
    add.u64 %at, %at, {_STEP};
    add.u64 %chunk, %chunk, {_STEP};
    add.u64 %step, %step, {_STEP // 8 * GOLDEN & _MASK:#x};
    bra ONE;

TAIL:
    mul.wide.u32 %at, %thread, 8;
    add.u64 %at, %at, %whole;
    setp.ge.u64 %past, %at, %nbytes;
    @%past bra WARP;
    add.u64 %chunk, %address, %at;
    sub.u64 %left, %nbytes, %at;
    min.u64 %left, %left, 8;
    mov.u64 %word, 0;
    mov.u32 %shift, 0;

BYTE:
    ld.global.nc.u8 %a, [%chunk];
    shl.b64 %a, %a, %shift;
    or.b64 %word, %word, %a;
    add.u32 %shift, %shift, 8;
    add.u64 %chunk, %chunk, 1;
    sub.u64 %left, %left, 1;
    setp.ne.u64 %past, %left, 0;
    @%past bra BYTE;
    shr.u64 %a, %at, 3;
    add.u64 %a, %a, %first;
    mul.lo.u64 %a, %a, {GOLDEN:#x};
    add.u64 %word, %word, %a;{_mixed("%word")}

WARP:{"".join(_lane_sum(lanes) for lanes in (16, 8, 4, 2, 1))}
    and.b32 %lane, %thread, 31;
    setp.ne.u32 %past, %lane, 0;
    @%past bra DONE;
    ld.param.u64 %sums, [sums];
    cvta.to.global.u64 %sums, %sums;
    shl.b64 %tensor, %tensor, 3;
    add.u64 %sums, %sums, %tensor;
    red.global.add.u64 [%sums], %sum;

DONE:
    ret;
}}
"""
PTX = _SOURCE.encode() + b"\0"
