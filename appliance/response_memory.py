"""ResponseMemory: stored responses and sealed reasoning, as the Responses protocol uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from appliance.protocols.sealing import Seal
from appliance.response_store import ContextNode, ResponseStore, StoredResponse

if TYPE_CHECKING:
    from appliance.protocols.responses.request import ResponsesRequest

    Item = dict[str, Any]


class ResponseMemory:
    """Implements `Memory` and `Keeper` over a store; `key` is the server's."""

    def __init__(self, store: ResponseStore, key: bytes) -> None:
        self.store = store
        self._seal = Seal(key, "reasoning")

    def previous(self, response_id: str) -> StoredResponse | None:
        """A stored response; None if it is not held."""
        return self.store.get(response_id)

    def item(self, item_id: str) -> Item | None:
        """An item of a stored response; None if it is not held."""
        return self.store.item(item_id)

    def seal(self, text: str) -> str:
        """Reasoning as encrypted_content."""
        return self._seal.seal(text)

    def unseal(self, sealed: str, path: str) -> str:
        """The reasoning again. Raises RequestError invalid_encrypted_content."""
        return self._seal.open(sealed, path)

    def keep(self, request: ResponsesRequest, body: dict[str, Any]) -> None:
        """Store a response that has ended, if the request wants it; a call that was not completed
        is no part of the conversation. Raises ResponseStoreCapacityError."""
        if not request.store:
            return
        said = [_without_logprobs(item) for item in body["output"] if not _is_cut_call(item)]
        parent = request.previous.node if request.previous else None
        node = ContextNode(parent, [*request.items, *said], len(request.items))
        data, preserve = orjson.dumps(body), request.options.preserve_thinking
        self.store.put(StoredResponse(body["id"], data, node, preserve))


def _without_logprobs(item: Item) -> Item:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _is_cut_call(item: Item) -> bool:
    return bool(item["type"].endswith("call") and item["status"] == "incomplete")
