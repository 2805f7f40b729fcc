"""Stored responses: bounds, shared contexts counted once, deletion that spares descendants."""

import random

import pytest

from appliance.response_store import (
    ContextNode,
    ResponseStore,
    ResponseStoreCapacityError,
    StoredResponse,
)
from ginfer.sizes import KIB


def item(name, text="x"):
    return {"id": name, "type": "message", "text": text}


def stored(name, parent=None, text="x"):
    node = ContextNode(parent, [item(f"in_{name}", text), item(f"out_{name}", text)], 1)
    return StoredResponse(name, b"{}", node, preserve_thinking=True)


def ids(items):
    return [i["id"] for i in items]


@pytest.fixture
def store():
    opened = ResponseStore(8, 100 * KIB)
    yield opened
    opened.check_integrity()


def test_a_chain_is_one_conversation(store):
    first = stored("a")
    second = stored("b", first.node)
    store.put(first)
    store.put(second)
    assert ids(store.get("b").node.conversation()) == ["in_a", "out_a", "in_b", "out_b"]
    assert ids(store.get("b").node.input_items()) == ["in_a", "out_a", "in_b"]
    assert ids(store.get("a").node.input_items()) == ["in_a"]


def test_a_shared_context_counts_once(store):
    first = stored("a", text="x" * 10_000)
    store.put(first)
    before = store.nbytes
    for name in "bcd":
        store.put(stored(name, first.node))
    assert store.nbytes - before < 10_000


def test_deletion_keeps_descendants_usable(store):
    first = stored("a")
    second = stored("b", first.node)
    store.put(first)
    store.put(second)
    assert store.delete("a")
    assert not store.delete("a")
    assert store.get("a") is None
    assert ids(store.get("b").node.conversation()) == ["in_a", "out_a", "in_b", "out_b"]
    assert store.item("out_a") == item("out_a")
    assert store.delete("b")
    assert store.nbytes == 0
    assert store.item("out_a") is None


def test_the_least_recently_used_goes_first():
    store = ResponseStore(2, 100 * KIB)
    store.put(stored("a"))
    store.put(stored("b"))
    store.get("a")
    store.put(stored("c"))
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]


def test_bytes_are_bounded():
    store = ResponseStore(100, 64 * KIB)
    for i in range(50):
        store.put(stored(str(i), text="x" * 5000))
        store.check_integrity()
    assert 2 <= len(store) < 10
    assert store.get("49") is not None


def test_a_follow_up_outlives_what_it_follows():
    """Making room drops the parent's record, and not the context that the child needs."""
    store = ResponseStore(1, 100 * KIB)
    first = stored("a")
    store.put(first)
    store.put(stored("b", first.node))
    assert store.get("a") is None
    assert ids(store.get("b").node.conversation())[0] == "in_a"
    store.check_integrity()


def test_what_cannot_fit_is_refused_and_harms_nothing(store):
    store.put(stored("a"))
    with pytest.raises(ResponseStoreCapacityError, match="response-store-max-mib") as caught:
        store.put(stored("b", text="x" * 60 * KIB))
    assert (caught.value.status, caught.value.code) == (500, "response_store_capacity_exceeded")
    assert store.get("a") is not None
    assert store.get("b") is None


def test_a_context_that_was_forgotten_comes_back_with_its_follow_up(store):
    """The parent was deleted while the follow-up was being generated."""
    first = stored("a")
    store.put(first)
    store.delete("a")
    store.put(stored("b", first.node))
    assert ids(store.get("b").node.conversation())[0] == "in_a"


def test_the_latest_of_equal_item_ids_is_found(store):
    first, second = stored("a"), stored("b")
    again = ContextNode(None, [item("in_a", "later")], 1)
    store.put(first)
    store.put(second)
    store.put(StoredResponse("c", b"{}", again, preserve_thinking=True))
    assert store.item("in_a")["text"] == "later"
    store.delete("c")
    assert store.item("in_a")["text"] == "x"


def test_random_use_keeps_the_books():
    rng = random.Random(5)
    store = ResponseStore(12, 40 * KIB)
    nodes = [None]
    for i in range(400):
        if rng.random() < 0.3 and i:
            store.delete(str(rng.randrange(i)))
        record = stored(str(i), rng.choice(nodes[-6:]), "x" * rng.randrange(3000))
        try:
            store.put(record)
            nodes.append(record.node)
        except ResponseStoreCapacityError:
            nodes = [None]
        store.check_integrity()
    assert len(store) > 1
