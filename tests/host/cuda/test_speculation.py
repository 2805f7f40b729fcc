"""Which verifications are graphs."""

import pytest

from ginfer.cuda.speculation import recorded_shapes


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_every_batch_has_graphs_of_learned_widths_and_of_expanded_verification(lanes):
    shapes = recorded_shapes(lanes, 128)
    assert len(shapes) == len(set(shapes))
    for B in range(1, lanes + 1):
        columns = {T for rows, T in shapes if rows == B}
        assert set(range(B + 1, 8 * B + 1)) <= columns, "up to seven drafts of each row"
        assert max(columns) == 16 * B <= 128
    assert {T for rows, T in shapes if rows == 1} == set(range(2, 17))


def test_nothing_is_captured_that_there_is_no_memory_to_record():
    assert recorded_shapes(4, 0) == []
    assert max(T for _, T in recorded_shapes(4, 20)) == 20
