"""The closed set of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ginfer.errors import ConfigError
from ginfer.models import qwen

if TYPE_CHECKING:
    from ginfer.models.contract import ModelContract

CONTRACTS: dict[str, ModelContract] = {c.model_id: c for c in (qwen.QWEN_27B, qwen.QWEN_DEMO)}


def contract_for(model_id: str, weights_id: str) -> ModelContract:
    """Return the contract of a package's identity. Raises ConfigError when it is not registered."""
    contract = CONTRACTS.get(model_id)
    if contract is None:
        raise ConfigError(
            f"no model {model_id!r} is registered; known: {', '.join(CONTRACTS)}", param="model_id"
        )
    if weights_id not in contract.profiles:
        known = ", ".join(contract.profiles)
        raise ConfigError(
            f"model {model_id} has no weight profile {weights_id!r}; known: {known}",
            param="weights_id",
        )
    return contract
