"""Sampling table: every row of a selection carries its own request's parameters."""

from __future__ import annotations

import numpy as np

from ginfer.engine.request import SamplingParams
from ginfer.engine.sampler import SamplingTable


def select(table, *lanes):
    rows = np.arange(len(lanes), dtype=np.int32)
    return table.select(lanes, rows, rows + 9, purpose=1)


def test_rows_follow_their_lanes():
    table = SamplingTable(4)
    table.assign(
        0, SamplingParams(temperature=0.5, top_k=7, seed=2**64 - 1, logit_bias=((5, 1.5), (3, -2)))
    )
    table.assign(2, SamplingParams(top_p=0.25, presence_penalty=-1, seed=3, logprobs=4))
    table.assign(3, SamplingParams(min_p=0.125, frequency_penalty=2, seed=0, logit_bias=((9, 1),)))
    batch = select(table, 0, 2, 3)
    assert batch.rows.tolist() == [0, 2, 3]
    assert batch.temperature.tolist() == [0.5, 1, 1]
    assert batch.top_k.tolist() == [7, 0, 0]
    assert batch.top_p.tolist() == [1, 0.25, 1]
    assert batch.min_p.tolist() == [0, 0, 0.125]
    assert batch.presence.tolist() == [0, -1, 0]
    assert batch.frequency.tolist() == [0, 0, 2]
    assert batch.seeds.tolist() == [2**64 - 1, 3, 0]
    assert batch.bias_indptr.tolist() == [0, 2, 2, 3]
    assert batch.bias_ids.tolist() == [5, 3, 9]
    assert batch.bias_values.tolist() == [1.5, -2, 1]
    assert batch.positions.tolist() == [9, 10, 11]
    assert batch.purposes.tolist() == [1, 1, 1]
    assert batch.forced.tolist() == [-1, -1, -1]
    assert batch.num_top == 4
    assert select(table, 0, 3).num_top == -1


def test_a_new_request_in_a_lane_replaces_all_of_the_old_one():
    table = SamplingTable(2)
    table.assign(1, SamplingParams(seed=5, logprobs=3, logit_bias=((1, 1),)))
    assert select(table, 1).num_top == 3
    table.assign(1, SamplingParams(seed=6))
    batch = select(table, 1)
    assert (batch.seeds.tolist(), batch.num_top, len(batch.bias_ids)) == ([6], -1, 0)


def test_without_a_seed_every_request_gets_a_fresh_one():
    table, seeds = SamplingTable(1), set()
    for _ in range(20):
        table.assign(0, SamplingParams())
        seeds.add(int(select(table, 0).seeds[0]))
    assert len(seeds) == 20
    assert max(seeds) > 2**32
