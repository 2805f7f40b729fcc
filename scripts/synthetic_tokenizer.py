"""Stretch the tokenizer files of a small package to every id of a larger model.

Ordinary ids beyond the small vocabulary are words that no text is cut into, so that whatever a
model of random weights draws can be spelled. Added tokens get the ids that the model gives them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ginfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ginfer.models.contract import ModelContract

FOLDER = "frontend/"
CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
MARKUP = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
SOUND = (
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
ADDED = (*CONTROL, *MARKUP, *SOUND)  # the last ids of the vocabulary, in this order


def stretch(resources: Mapping[str, bytes], contract: ModelContract) -> dict[str, bytes]:
    """The tokenizer files with a token for every legal id of the model; as they are when they have
    that. Raises ConfigError for files with more."""
    document = _parse(resources, "tokenizer.json")
    vocabulary, num_ids = document["model"]["vocab"], contract.spec.num_token_ids
    known = len(vocabulary) + len(document["added_tokens"])
    if known == num_ids:
        return dict(resources)
    first = num_ids - len(ADDED)
    if len(vocabulary) > first:
        raise ConfigError(
            f"the tokenizer has {known} ids, {contract.model_id} has {num_ids}; "
            "take the files of a smaller model",
            param="resources",
        )
    ids = {token: first + i for i, token in enumerate(ADDED)}
    assert tuple(ids[t] for t in ("<|im_end|>", "<|endoftext|>")) == contract.token_ids.stop
    vocabulary |= {f"\u0120w{i}": i for i in range(len(vocabulary), first)}  # " w4096", ..
    assert len(vocabulary) == first, "a made up word is a token already"
    rules = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **rules, "special": token not in MARKUP}
        for token, i in ids.items()
    ]
    config = _parse(resources, "tokenizer_config.json")
    table = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in added}
    config |= {"added_tokens_decoder": table, "model_max_length": contract.spec.max_context}
    generation = _parse(resources, "generation_config.json")
    stop = contract.token_ids.stop
    generation |= {"eos_token_id": list(stop), "pad_token_id": ids["<|endoftext|>"]}
    files = {
        "tokenizer.json": {**document, "added_tokens": added},
        "tokenizer_config.json": config,
        "generation_config.json": generation,
    }
    return {**resources, **{FOLDER + name: _dump(tree) for name, tree in files.items()}}


def _parse(resources: Mapping[str, bytes], name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(resources[FOLDER + name])
    return tree


def _dump(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode()
