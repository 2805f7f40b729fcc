"""ResponseStore: responses kept for later, in memory, least recently used first out.

A stored response is its body and a context node: the items that it adds to the conversation of the
response before it. Nodes form chains; a node lives as long as a response or a later node needs it
and its bytes count once, however many responses share it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import orjson

from ginfer.errors import GInferError
from ginfer.sizes import MIB

if TYPE_CHECKING:
    Item = dict[str, Any]

RECORD_NBYTES = 1024  # objects and links of one response, rounded up
ITEM_NBYTES = 256  # an entry in the index of items


class ResponseStoreCapacityError(GInferError):
    """A response does not fit, even alone."""

    code = "response_store_capacity_exceeded"


class ContextNode:
    """Items that one response added: `num_input` of its request, then those it generated."""

    def __init__(self, parent: ContextNode | None, items: list[Item], num_input: int) -> None:
        self.parent = parent
        self.num_input = num_input
        self.ids = tuple(item["id"] for item in items)
        self._data = orjson.dumps(items)
        self.nbytes = len(self._data) + ITEM_NBYTES * len(items)
        self.num_users = 0  # responses and later nodes

    @property
    def items(self) -> list[Item]:
        """The items, a fresh copy."""
        found: list[Item] = orjson.loads(self._data)
        return found

    def chain(self) -> list[ContextNode]:
        """The nodes of the conversation, oldest first."""
        nodes: list[ContextNode] = []
        node: ContextNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def conversation(self) -> list[Item]:
        """All items up to the end of this response."""
        return [item for node in self.chain() for item in node.items]

    def input_items(self) -> list[Item]:
        """The items that the response was generated from."""
        before = self.parent.conversation() if self.parent else []
        return before + self.items[: self.num_input]


@dataclass(frozen=True)
class StoredResponse:
    """A response: its body as JSON, its context, and what a follow-up inherits."""

    response_id: str
    body: bytes
    node: ContextNode
    preserve_thinking: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its own; the context counts apart."""
        return len(self.body) + RECORD_NBYTES

    def conversation(self) -> list[Item]:
        """All items up to its end."""
        return self.node.conversation()


class ResponseStore:
    """At most `max_records` (1 or more) responses and `max_nbytes` in all. Safe to share between
    threads."""

    def __init__(self, max_records: int, max_nbytes: int) -> None:
        self._max_records = max_records
        self._max_nbytes = max_nbytes
        self._records: OrderedDict[str, StoredResponse] = OrderedDict()
        self._nodes_of_item: defaultdict[str, list[ContextNode]] = defaultdict(list)
        self._nbytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes held, at most the limit."""
        return self._nbytes

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, which becomes the most recent; None if it is not held."""
        with self._lock:
            record = self._records.get(response_id)
            if record is not None:
                self._records.move_to_end(response_id)
            return record

    def item(self, item_id: str) -> Item | None:
        """The latest item of that id in any context that is held."""
        with self._lock:
            nodes = self._nodes_of_item.get(item_id)
            if not nodes:
                return None
            node = nodes[-1]
            return node.items[node.ids.index(item_id)]

    def put(self, record: StoredResponse) -> None:
        """Keep a response under a new id; the least recently used ones make room.

        Raises ResponseStoreCapacityError when it cannot fit, and keeps what was there."""
        with self._lock:
            needed = record.nbytes + sum(node.nbytes for node in record.node.chain())
            if needed > self._max_nbytes:
                raise ResponseStoreCapacityError(
                    f"the response and its context take {needed} bytes; the store holds "
                    f"{self._max_nbytes / MIB:g} MiB (--response-store-max-mib); send store: false"
                )
            self._acquire(record.node)
            self._records[record.response_id] = record
            self._nbytes += record.nbytes
            while self._nbytes > self._max_nbytes or len(self._records) > self._max_records:
                self._forget(next(iter(self._records)))

    def delete(self, response_id: str) -> bool:
        """Forget a response; those that follow from it keep their context. False if unknown."""
        with self._lock:
            if response_id not in self._records:
                return False
            self._forget(response_id)
            return True

    def check_integrity(self) -> None:
        """Assert that bytes, users and the index are those of the records."""
        records = self._records.values()
        live = {node for record in records for node in record.node.chain()}
        users = Counter(record.node for record in records)
        users.update(node.parent for node in live if node.parent is not None)
        assert self._nbytes == sum(n.nbytes for n in live) + sum(r.nbytes for r in records)
        assert {node: node.num_users for node in live} == users
        assert {n for nodes in self._nodes_of_item.values() for n in nodes} == live
        assert len(self._records) <= self._max_records
        assert self._nbytes <= self._max_nbytes

    def _forget(self, response_id: str) -> None:
        record = self._records.pop(response_id)
        self._nbytes -= record.nbytes
        self._release(record.node)

    def _acquire(self, node: ContextNode) -> None:
        """One more user; a node that comes to life takes its parent along."""
        current: ContextNode | None = node
        while current is not None:
            current.num_users += 1
            if current.num_users > 1:
                return
            self._nbytes += current.nbytes
            for item_id in current.ids:
                self._nodes_of_item[item_id].append(current)
            current = current.parent

    def _release(self, node: ContextNode) -> None:
        current: ContextNode | None = node
        while current is not None:
            current.num_users -= 1
            if current.num_users:
                return
            self._nbytes -= current.nbytes
            for item_id in current.ids:
                nodes = self._nodes_of_item[item_id]
                nodes.remove(current)
                if not nodes:
                    del self._nodes_of_item[item_id]
            current = current.parent
