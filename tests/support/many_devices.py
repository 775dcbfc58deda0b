"""More than 256 pretended devices in one process.

XLA's CPU client (jaxlib 0.10.2) gives the work that runs side by side at most 256 threads, and each device's part of a
collective holds one until all devices have come: with 512 of them a wide program stops for good. No flag raises that
number, so `lift_the_cap` raises it in this process's copy of the library, before the client exists. For tests only, and
only for the build in which that instruction stands exactly once.
"""

import mmap
import re
from pathlib import Path

# cmp r13, 256; mov r8d, 256; cmovb r8, r13: min(threads, 256) in PjRtCpuClient's constructor, x86-64
MINIMUM = "4981fd {cap} 41b8 {cap} 4d0f42c5"


def code(cap: int) -> bytes:
    return bytes.fromhex(MINIMUM.format(cap=cap.to_bytes(4, "little").hex()))


def library() -> Path:
    import jaxlib

    return Path(jaxlib.__file__).with_name("libjax_common.so")


def offsets() -> list[int]:
    """Where in the library's file the instruction stands."""
    if not library().is_file():
        return []
    with library().open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return [found.start() for found in re.finditer(re.escape(code(256)), data)]


def lift_the_cap(threads: int = 1024) -> None:
    """Raises ValueError where the library is another one. To be called before the first use of a device."""
    import jaxlib._jax  # noqa: F401  maps the library

    (offset,) = offsets()
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(_address(offset))
        memory.write(code(threads))


def _address(offset: int) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, start, *rest = line.split(maxsplit=5)
        low, high = (int(x, 16) for x in span.split("-"))
        inside = offset - int(start, 16)
        if rest[-1] == str(library()) and "x" in mode and 0 <= inside < high - low:
            return low + inside
    raise ValueError(f"{library()} is not mapped")
