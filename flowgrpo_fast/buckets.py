"""Many named tensors, cut into pieces that fit somewhere: gathers, weight syncs, files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def buckets(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in their order, cut so that no bucket holds more than `limit` (a larger tensor has one of its own)."""
    bucket: list[str] = []
    total = 0
    for name, size in sizes.items():
        if bucket and total + size > limit:
            yield bucket
            bucket, total = [], 0
        bucket.append(name)
        total += size
    if bucket:
        yield bucket
