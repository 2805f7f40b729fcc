"""Integer arithmetic of sizes: division upwards, alignment, byte units."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def div_ceil(n: int, d: int) -> int:
    """Return n / d rounded up; n >= 0, d > 0."""
    return -(-n // d)


def align_up(n: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` that is >= n."""
    return div_ceil(n, alignment) * alignment


def human_bytes(n: int) -> str:
    """Return n bytes for people: '14.9 MiB', '512 B'."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n} B"
