"""CpuBackend as a whole: float64 model oracle, bit-for-bit equalities, isolation, memory."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest

from ginfer.batch import Phase
from ginfer.cpu import attention, gdn, linear, norm, rope, sampling
from ginfer.cpu.arena import slot_nbytes
from ginfer.cpu.backend import CpuBackend
from ginfer.engine.memory import page_nbytes
from ginfer.engine.work_items import work_items
from ginfer.errors import ArtifactError, ConfigError
from ginfer.spec import LayerKind
from scripts.random_models import MODELS
from tests.models.cpu.rows import Part, Rig, batch_of, greedy, logprobs, quantised
from tests.oracles.model import Oracle
from tests.oracles.sampling import log_softmax
from tests.tolerances import MODEL_LOGPROBS

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
MODEL = MODELS[1]
SPEC = MODEL.spec
PAGES = [7, 2, 9, 4, 11, 5]


@pytest.fixture(scope="module")
def tensors():
    return MODEL.packed()


@pytest.fixture(scope="module")
def shared(tensors):
    return Rig(SPEC, tensors)


@pytest.fixture
def rig(shared):
    for slot in range(8):
        shared.backend.clear_slot(slot)
    shared.backend.reset_rows(range(8))
    shared.backend._kv.bits[:] = 0x7FC0  # a page holds NaN until a token is written
    return shared


def _expected(oracle: Oracle, ids: np.ndarray) -> np.ndarray:
    logits = oracle.logits(ids)[:, : SPEC.num_token_ids]
    return np.array([list(log_softmax(row).values()) for row in logits])


@pytest.mark.parametrize("profile", ["bf16", "groupwise-int"])
@pytest.mark.parametrize(("prompt", "generated"), [(1, 3), (63, 4), (64, 2), (200, 5)])
def test_prefill_and_decode_follow_the_float64_model(
    tensors, profile: str, prompt: int, generated: int
) -> None:
    packed = tensors if profile == "bf16" else quantised(tensors)
    rig = Rig(SPEC, packed)
    ids = MODEL.prompt(prompt + generated)
    want = _expected(Oracle(SPEC, packed), ids)
    first = rig.run(PREFILL, [Part(ids[:prompt], 0, PAGES)], range(max(0, prompt - 8), prompt))
    got = [logprobs(first)]
    got += [
        logprobs(rig.run(DECODE, [Part(ids[t : t + 1], t, PAGES)], [0]))
        for t in range(prompt, prompt + generated)
    ]
    MODEL_LOGPROBS.check(np.concatenate(got), want[max(0, prompt - 8) :])
    rig.backend.close()


def test_axes_of_positions_follow_the_float64_model(rig, tensors) -> None:
    ids = MODEL.prompt(20)
    positions = np.random.default_rng(0).integers(0, 5000, (3, 20))
    batch = batch_of(PREFILL, [Part(ids, 0, PAGES)], greedy([19], num_top=SPEC.num_token_ids))
    batch = replace(batch, positions=positions.astype(np.int32))
    got = logprobs(rig.forward(batch))[0]
    logits = Oracle(SPEC, tensors).logits(ids, positions)[19, : SPEC.num_token_ids]
    MODEL_LOGPROBS.check(got, np.array(list(log_softmax(logits).values())))


@pytest.mark.parametrize("cuts", [[128], [64, 128, 192, 256], [256], [192]])
def test_prefill_has_the_same_bits_for_any_chunks(rig, cuts: list[int]) -> None:
    ids = MODEL.prompt(300)
    want = logprobs(rig.run(PREFILL, [Part(ids, 0, PAGES)], [299]))
    whole = rig.bits()
    rig.backend.clear_slot(0)
    rig.backend._kv.bits[:] = 0x7FC0
    for t0, t1 in zip([0, *cuts], [*cuts, 300]):
        columns = [t1 - t0 - 1] if t1 == 300 else []
        got = rig.run(PREFILL, [Part(ids[t0:t1], t0, PAGES)], columns)
    np.testing.assert_array_equal(logprobs(got), want)
    for name, array in rig.bits().items():
        np.testing.assert_array_equal(array, whole[name], name)


def _rows() -> list[tuple[np.ndarray, list[int], int]]:
    """(ids, pages, slot) of four rows."""
    lengths, pages = (130, 64, 7, 90), ([0, 1, 2], [3, 4], [5], [6, 7])
    return [(MODEL.prompt(n + 8), list(p), s) for s, (n, p) in enumerate(zip(lengths, pages))]


def _prefill_all(rig: Rig, together: bool) -> None:
    parts = [Part(ids[:-8], 0, pages, slot) for ids, pages, slot in _rows()]
    for group in [parts] if together else [[p] for p in parts]:
        rig.run(PREFILL, group)


def test_rows_have_the_same_bits_alone_and_in_company(rig) -> None:
    _prefill_all(rig, together=True)
    after = [Part(i[-8:-7], len(i) - 8, p, s) for i, p, s in _rows()]
    want = logprobs(rig.run(DECODE, after, range(4), rows=np.arange(4, dtype=np.int32)))
    bits = rig.bits()
    for slot in range(8):
        rig.backend.clear_slot(slot)
    rig.backend._kv.bits[:] = 0x7FC0
    _prefill_all(rig, together=False)
    for row, part in enumerate(after):
        np.testing.assert_array_equal(logprobs(rig.run(DECODE, [part], [0]))[0], want[row])
    for name, array in rig.bits().items():
        np.testing.assert_array_equal(array, bits[name], name)


def test_decode_columns_have_the_same_bits_one_by_one(rig) -> None:
    ids = MODEL.prompt(140)
    rig.run(PREFILL, [Part(ids[:130], 0, PAGES)])
    rig.backend.copy_slots([(1, 0)])
    want = logprobs(rig.run(DECODE, [Part(ids[130:], 130, PAGES, 1)], range(10)))
    for i in range(10):
        part = Part(ids[130 + i : 131 + i], 130 + i, PAGES, 0)
        np.testing.assert_array_equal(logprobs(rig.run(DECODE, [part], [0]))[0], want[i])
    bits = rig.bits()
    np.testing.assert_array_equal(bits["state"][:, 0], bits["state"][:, 1])


def test_prefill_may_follow_decoded_tokens(rig, tensors) -> None:
    ids = MODEL.prompt(160)
    want = _expected(Oracle(SPEC, tensors), ids)
    rig.run(PREFILL, [Part(ids[:50], 0, PAGES)])
    for t in range(50, 57):
        rig.run(DECODE, [Part(ids[t : t + 1], t, PAGES)])
    got = logprobs(rig.run(PREFILL, [Part(ids[57:], 57, PAGES)], range(103)))
    MODEL_LOGPROBS.check(got, want[57:])


def test_nan_in_one_row_reaches_no_other_row(rig) -> None:
    _prefill_all(rig, together=True)
    after = [Part(i[-8:-7], len(i) - 8, p, s) for i, p, s in _rows()]
    lanes = np.arange(4, dtype=np.int32)
    rig.backend.copy_slots([(4 + i, i) for i in range(4)])
    want = logprobs(rig.run(DECODE, after, range(4), rows=lanes))
    rig.backend.copy_slots([(i, 4 + i) for i in range(4)])
    rig.backend._buffers["state"][:, 2] = np.nan
    counts = rig.backend._head.counts.sum(axis=1)
    got = rig.run(DECODE, after, range(4), rows=lanes)
    assert got.finite.tolist() == [True, True, False, True]
    sound = [0, 1, 3]
    np.testing.assert_array_equal(logprobs(got)[sound], want[sound])
    added = rig.backend._head.counts.sum(axis=1) - counts
    assert added[:4].tolist() == [1, 1, 0, 1]


def test_counts_follow_lanes_and_shape_penalties(rig) -> None:
    ids = MODEL.prompt(5)
    part, high = [Part(ids, 0, PAGES)], np.full(1, 2.0, np.float32)
    first = rig.run(PREFILL, part, [4]).token_ids[0]
    rig.backend.clear_slot(0)
    other = rig.run(PREFILL, part, [4], presence=high, frequency=high)
    gap = other.top_logprobs[0, 0] - other.top_logprobs[0, 1]
    assert (other.token_ids[0] != first) == (gap < 4.0)
    rig.backend.reset_rows([0])
    rig.backend.clear_slot(0)
    assert rig.run(PREFILL, part, [4], presence=high).token_ids[0] == first


def test_more_columns_than_logit_rows_are_chosen_in_turns(rig) -> None:
    ids = MODEL.prompt(40)
    many = rig.run(PREFILL, [Part(ids, 0, PAGES)], range(40))
    rig.backend.clear_slot(0)
    few = rig.run(PREFILL, [Part(ids, 0, PAGES)], [3, 39])
    np.testing.assert_array_equal(many.token_ids[[3, 39]], few.token_ids)
    np.testing.assert_array_equal(many.top_logprobs[[3, 39]], few.top_logprobs)


def test_nothing_is_compiled_while_serving(rig) -> None:
    kernels = [
        f
        for module in (attention, gdn, linear, norm, rope, sampling)
        for f in vars(module).values()
        if hasattr(f, "signatures")
    ]
    before = [len(k.signatures) for k in kernels]
    frozen = MODEL.prompt(90)
    frozen.flags.writeable = False
    rig.run(PREFILL, [Part(frozen, 0, PAGES)])
    mask = np.full((2, (SPEC.vocab_size + 31) // 32), 0xFFFFFFFF, np.uint32)
    mask.flags.writeable = False
    parts = [Part(frozen[:1], 90, PAGES), Part(frozen[1:2], 0, [1], 1)]
    rig.run(DECODE, parts, [0, 1], mask=mask, top_k=np.full(2, 20, np.int32))
    rig.run(DECODE, [Part(frozen[:20], 91, PAGES)], range(20), num_top=-1)
    assert [len(k.signatures) for k in kernels] == before
    assert sum(before) > 10


def test_long_histories_decode_in_waves_with_the_same_bits(tensors) -> None:
    ids, pages = MODEL.prompt(600), list(range(10))
    wide = Rig(SPEC, tensors, num_rows=8)
    tight = Rig(SPEC, tensors, num_rows=1, max_pages_per_row=10)  # partials for one column
    results = []
    for rig in (wide, tight):
        for t in range(0, 576, 192):
            rig.run(PREFILL, [Part(ids[t : t + 192], t, pages)])
        results.append(logprobs(rig.run(DECODE, [Part(ids[576:], 576, pages)], range(24))))
    np.testing.assert_array_equal(*results)


def test_rows_over_one_prefix_decode_with_the_bits_of_each_alone(rig) -> None:
    ids, prefix = MODEL.prompt(600), list(range(9))
    parts = [Part(ids[576 + i : 578 + i], 576, [*prefix, 9 + i], i) for i in range(4)]
    results = []
    for together in (True, False):
        rig.backend.clear_slot(0)
        for t in range(0, 576, 192):
            rig.run(PREFILL, [Part(ids[t : t + 192], t, prefix)])
        rig.backend.copy_slots([(i, 0) for i in range(1, 4)])
        got = []
        for group in [parts] if together else [[p] for p in parts]:
            batch = batch_of(DECODE, group, greedy(range(2 * len(group)), num_top=50))
            items = work_items(batch.page_table, batch.starts, batch.row_indptr)
            assert items.num_items == (5 if together else 1)
            got.append(rig.forward(replace(batch, items=items)))
        results.append(
            [np.concatenate([getattr(s, f) for s in got]) for f in ("top_ids", "top_logprobs")]
        )
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_missing_and_misshapen_tensors_are_named_together(tensors) -> None:
    broken = [t for t in tensors if "down" not in t.name]
    with pytest.raises(ArtifactError, match="mlp/down is missing") as caught:
        CpuBackend(SPEC).load(broken, lambda _: None)
    assert len(caught.value.findings) == len(SPEC.layers)
    with pytest.raises(ArtifactError, match="has shape"):
        CpuBackend(MODELS[2].spec).load(tensors, lambda _: None)


@pytest.mark.parametrize("threads", [0, -1, 10_000])
def test_impossible_thread_counts_are_refused(threads: int) -> None:
    with pytest.raises(ConfigError, match="threads"):
        CpuBackend(SPEC, threads=threads)


def test_one_thread_and_two_give_the_same_bits(rig, tensors) -> None:
    ids = MODEL.prompt(150)
    single = CpuBackend(SPEC, threads=1)
    two = rig.run(PREFILL, [Part(ids, 0, PAGES)], [149])
    rig.backend.clear_slot(0)
    threads, rig.backend._threads = rig.backend._threads, single._threads
    one = rig.run(PREFILL, [Part(ids, 0, PAGES)], [149])
    rig.backend._threads = threads
    np.testing.assert_array_equal(one.top_logprobs, two.top_logprobs)


def test_ledger_and_close(tensors) -> None:
    rig = Rig(SPEC, tensors)
    ledger = rig.backend.ledger()
    page = 2 * SPEC.attention.num_kv_heads * 64 * SPEC.attention.head_dim * 2
    assert ledger["arena"] == 24 * page * len(SPEC.layers_of(LayerKind.FULL_ATTENTION))
    assert ledger["parking"] == 0
    assert ledger["weights"] == sum(t.data.nbytes for t in tensors)
    assert ledger["counts"] == 8 * SPEC.num_token_ids * 4
    rig.backend.close()
    rig.backend.close()


def test_ids_outside_the_vocabulary_never_reach_a_kernel(rig) -> None:
    for bad in (-9, SPEC.vocab_size):  # no lane, no token
        with pytest.raises(AssertionError):
            rig.run(PREFILL, [Part([bad], 0, PAGES)])
    with pytest.raises(AssertionError):
        rig.run(PREFILL, [Part([0], 0, PAGES)], [0], forced=np.array([SPEC.num_token_ids]))


def test_the_token_that_a_lane_drew_last_need_not_be_named(rig) -> None:
    parts = [Part([5, 9, 31], 0, PAGES), Part([7], 0, PAGES[::-1], slot=1)]
    first = rig.run(PREFILL, parts, [2, 3], rows=np.array([4, 2], np.int32))
    drawn = first.token_ids.tolist()
    got = []
    for ids in ([~4, ~2], drawn):
        rig.backend.copy_slots([(2, 0), (3, 1)])
        more = [Part(ids[:1], 3, PAGES, slot=2), Part(ids[1:], 1, PAGES[::-1], slot=3)]
        got.append(rig.run(DECODE, more, [0, 1], rows=np.array([6, 7], np.int32)))
    assert drawn[0] != drawn[1]
    assert (got[0].token_ids == got[1].token_ids).all()
    assert (got[0].logprobs == got[1].logprobs).all()


UNITS = [17, 3, 20, 9, 22]


def test_a_snapshot_gives_the_state_back_bit_for_bit(tensors) -> None:
    """In the arena and in the parking space, from any units; the pages beside it are untouched."""
    rig = Rig(SPEC, tensors, num_units=24, num_park_units=24)
    backend, ids = rig.backend, MODEL.prompt(200)
    needed = -(-slot_nbytes(SPEC) // page_nbytes(SPEC))
    units = [*UNITS, *(u for u in range(10, 24) if u not in UNITS)][:needed]
    rig.run(PREFILL, [Part(ids[:128], 0, [0, 1, 2, 4])])
    before = rig.bits()
    backend.save_state(0, units)
    want = logprobs(rig.run(PREFILL, [Part(ids[128:], 128, [0, 1, 2, 4])], [71]))
    backend.load_state(units, 5)
    np.testing.assert_array_equal(backend._buffers["state"][:, 5], before["state"][:, 0])
    np.testing.assert_array_equal(backend._buffers["history"][:, 5], before["history"][:, 0])
    host = list(reversed(range(needed)))
    backend.park_units(units, host)
    backend.park_pages([0, 1], [23, 22])
    for unit in (*units, 0, 1):
        backend._kv.bits[unit] = 0x7FC0
    backend.clear_slot(5)
    backend.load_parked_state(host, 5)
    backend.unpark_pages([22, 23], [7, 6])
    got = logprobs(rig.run(PREFILL, [Part(ids[128:], 128, [6, 7, 2, 4], 5)], [71]))
    np.testing.assert_array_equal(got, want)
    backend.unpark_units(host, units)
    backend.load_state(units, 1)
    np.testing.assert_array_equal(backend._buffers["state"][:, 1], before["state"][:, 0])
    backend.close()


def test_a_copied_page_continues_the_history(rig) -> None:
    ids = MODEL.prompt(140)
    rig.run(PREFILL, [Part(ids[:130], 0, PAGES)])
    rig.backend.copy_slots([(1, 0)])
    rig.backend.copy_page(PAGES[2], 21)
    want = logprobs(rig.run(DECODE, [Part(ids[130:], 130, PAGES)], range(10)))
    other = [*PAGES[:2], 21]
    got = logprobs(rig.run(DECODE, [Part(ids[130:], 130, other, 1)], range(10)))
    np.testing.assert_array_equal(got, want)


def test_memory_given_back_is_not_resident_until_it_is_taken_back(tensors) -> None:
    rig = Rig(SPEC, tensors, num_units=8, unit_nbytes=2 << 20)
    backend = rig.backend
    whole, resident = backend.ledger()["arena"], resident_nbytes()
    assert whole == 16 << 20
    rig.run(PREFILL, [Part(MODEL.prompt(64), 0, [0])])
    page = backend._kv.bits[0].copy()
    backend.give_back(range(1, 8))
    assert backend.ledger()["arena"] == 2 << 20
    assert resident_nbytes() < resident - (12 << 20)
    np.testing.assert_array_equal(backend._kv.bits[0], page)
    backend.take_back()
    assert backend.ledger()["arena"] == whole
    assert resident_nbytes() > resident - (1 << 20)
    backend.close()


def resident_nbytes() -> int:
    """Memory of this process that is backed by pages now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE
