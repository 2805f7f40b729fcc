"""Keys are known by their hashes, each by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.auth import HashedKey, KeyRing, new_key, read_keys
from appliance.config import ApplianceConfig
from ginfer.config import EngineConfig
from ginfer.errors import ConfigError

ENGINE = EngineConfig(package=Path("p.ginfer"))


def test_keys_are_compared_whole_and_never_shown(tmp_path: Path) -> None:
    key = new_key()
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{HashedKey.of('laptop', key).line}\n")
    config = ApplianceConfig(engine=ENGINE, api_keys=("alpha", "beta"), api_keys_file=file)
    keys = KeyRing.load(config)
    assert [keys.name_of(k) for k in ("alpha", "beta", key)] == ["key-1", "key-2", "laptop"]
    wrong = ("alph", "alphabeta", "", "\udcff", key[:-1], key + " ", file.read_text())
    assert [keys.name_of(k) for k in wrong] == [None] * len(wrong)
    assert key not in file.read_text()
    shown = repr(config) + repr(read_keys(file))
    assert "alpha" not in shown
    assert HashedKey.of("a", "k").line != HashedKey.of("a", "k").line, "a salt of its own"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "0 keys"),
        ("# none\n", "0 keys"),
        ("laptop sk-plain\n", "line 1"),
        ("{a}\n{a}\n", "line 2 repeats"),
        ("{a} \nbad name " + "sha256$00$11\n", "line 2"),
        ("\xff", "cannot read"),
    ],
    ids=("empty", "comments", "plain", "twice", "bad line", "not ASCII"),
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text.format(a=HashedKey.of("a", "k").line))
    with pytest.raises(ConfigError, match=match) as caught:
        read_keys(file)
    assert caught.value.param == "api_keys_file"
    assert "sk-plain" not in caught.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none")
