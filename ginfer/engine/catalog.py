"""What can be served: the registered models and weight profiles, for people and tools."""

from __future__ import annotations

from ginfer.models.registry import CONTRACTS


def served_identities() -> dict[str, tuple[str, ...]]:
    """Weight profiles by model id."""
    return {model_id: tuple(contract.profiles) for model_id, contract in CONTRACTS.items()}
