"""Pages of a list of items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.protocols import checks

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LIMIT, LIMIT = 100, 20
ORDERS = ("asc", "desc")
CODE = "invalid_pagination"


def page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The page of `items` (oldest first) that limit, order and after of a query ask for.

    Raises RequestError invalid_pagination."""
    limit = query.get("limit", str(LIMIT))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LIMIT):
        raise checks.wrong("limit", limit, f"an integer from 1 to {MAX_LIMIT}", code=CODE)
    order = checks.one_of(query.get("order", "desc"), "order", ORDERS, code=CODE)
    ordered = items if order == "asc" else items[::-1]
    if "after" in query:
        ids = [item["id"] for item in ordered]
        if query["after"] not in ids:
            raise checks.wrong("after", query["after"], "the id of an item of the list", code=CODE)
        ordered = ordered[ids.index(query["after"]) + 1 :]
    shown = ordered[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }
