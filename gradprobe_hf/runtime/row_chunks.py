"""Row chunks: how many rows of a matrix are worked on at once."""

from __future__ import annotations

from collections.abc import Iterator

# Elements of a matrix at once. Few, which stay in a core's cache, where scores are made and sums are added to; more for
# gradients and linear systems, because a product of few rows reads its other side again and again.
CHUNK_ELEMENTS = 2**18
CACHED_ELEMENTS = 2**19
FOLDED_ELEMENTS = 2**21
ROWS_IN_A_BLOCK = 64  # that int8 accumulators scale together: a chunk never splits them


def row_chunks(shape: tuple[int, ...], elements: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    """Rows of a matrix `[out, in]`, about `elements` at a time: whole blocks of `ROWS_IN_A_BLOCK`, at least one.

    >>> list(row_chunks((150, 4), elements=256))
    [slice(0, 64, None), slice(64, 128, None), slice(128, 150, None)]
    """
    step = max(1, elements // max(1, shape[1]) // ROWS_IN_A_BLOCK) * ROWS_IN_A_BLOCK
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
