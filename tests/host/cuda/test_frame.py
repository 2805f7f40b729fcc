"""Tables of a forward: chunks of GDN lie on absolute multiples of 64, wherever a row begins."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ginfer.backend import MemoryPlan
from ginfer.cuda.frame import chunks_of, most_chunks

ROWS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=8)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(ROWS)
def test_chunks_cover_rows_between_multiples_of_64(rows):
    lengths, starts = np.array(rows, np.int32).T
    indptr = np.cumsum([0, *lengths]).astype(np.int32)
    chunks, ends = chunks_of(indptr, starts)
    assert len(ends) == len(rows) + 1
    assert ends[-1] == len(chunks)
    plan = MemoryPlan(
        num_rows=len(rows),
        num_units=1,
        unit_nbytes=1,
        num_slots=1,
        max_columns=int(indptr[-1]),
        max_pages_per_row=1,
    )
    assert len(chunks) <= most_chunks(plan)
    for b, start in enumerate(starts.tolist()):
        found = chunks[ends[b] : ends[b + 1]]
        columns = np.concatenate([np.arange(t, t + count) for t, count in found])
        assert (columns == np.arange(indptr[b], indptr[b + 1])).all()
        pages = [(np.arange(t, t + k) - indptr[b] + start) // 64 for t, k in found.tolist()]
        assert all(len(set(page.tolist())) == 1 for page in pages)
        assert len({int(page[0]) for page in pages}) == len(pages)
