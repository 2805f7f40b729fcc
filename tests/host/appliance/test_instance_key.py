"""The key of a server outlives it and is private; a folder that cannot be written is no end."""

import logging
import stat

import pytest

from appliance.instance_key import FILE, instance_key
from ginfer.errors import ConfigError


def test_it_is_kept_and_private(tmp_path):
    folder = tmp_path / "state"
    key = instance_key(folder)
    assert len(key) == 32
    assert instance_key(folder) == key
    assert [p.name for p in folder.iterdir()] == [FILE]
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert instance_key(tmp_path / "other") != key


def test_without_a_folder_it_lasts_as_long_as_the_process(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert len(instance_key(blocked / "state")) == 32
    assert "no lasting key" in caplog.text


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / FILE).write_bytes(b"short")
    with pytest.raises(ConfigError, match=FILE):
        instance_key(tmp_path)
