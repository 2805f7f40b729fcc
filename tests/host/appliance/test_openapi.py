"""The document says what the field tables say."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from appliance.openapi import TABLES, body_schema, document, field_schema
from appliance.protocols.fields import Field, Verdict, check_fields
from ginfer import __version__
from ginfer.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

VALUES = (None, "", "auto", "none", "default", 0, 1, 0.5, -1, 10**20, True, False, [], {}, [{}])
TABLE = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def _accepted(field: Field, value: Any) -> bool:
    try:
        field.check(value, "x")
    except RequestError:
        return False
    return True


@TABLE
def test_a_value_that_a_field_takes_is_legal_in_the_document(table: Mapping[str, Field]) -> None:
    for name, field in table.items():
        schema = field_schema(field)
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        for value in VALUES[1:]:
            if field.verdict is not Verdict.REFUSED and _accepted(field, value):
                assert validator.is_valid(value), (name, value)


@TABLE
def test_a_value_that_the_document_excludes_is_refused(table: Mapping[str, Field]) -> None:
    for name, field in table.items():
        validator = jsonschema.Draft202012Validator(field_schema(field))
        for value in VALUES[1:]:
            if field.verdict is not Verdict.REFUSED and not validator.is_valid(value):
                assert not _accepted(field, value), (name, value)


@TABLE
def test_the_body_is_closed_and_complete(table: Mapping[str, Field]) -> None:
    schema = body_schema(table)
    assert list(schema["properties"]) == list(table)
    assert "model" in schema["required"]
    assert schema["additionalProperties"] is False
    with pytest.raises(RequestError, match="surprise"):
        check_fields({"surprise": 1}, table)
    stated = [n for n, s in schema["properties"].items() if set(s) - {"description"}]
    assert len(stated) > len(table) / 2, "most fields say more than words"


def test_the_version_is_that_of_the_distribution_and_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert metadata.version("ginfer") == __version__

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert document([], "m")["info"]["version"] == __version__
