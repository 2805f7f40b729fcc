"""`ginfer bench` on the demo model."""

import re

from click.testing import CliRunner

from appliance.cli.bench import command
from tests.engines import DEMO_PACKAGE

FAST = ("--backend", "cpu", "--threads", "2", "--max-context", "512", "--tokens", "4")


def test_a_table_of_contexts_and_rows_comes_out():
    wanted = ("--context", "70", "--context", "300", "--rows", "1", "--rows", "2")
    done = CliRunner().invoke(command, [str(DEMO_PACKAGE), *FAST, *wanted, "--prefill", "100"])
    assert done.exit_code == 0, done.output
    head, columns, *rows, last = done.stdout.splitlines()
    assert head == "qwen3.8-demo, groupwise-int, backend cpu"
    assert columns.split()[:3] == ["context", "rows", "tokens/s"]
    places = [tuple(map(int, row.split()[:2])) for row in rows]
    assert places == [(70, 1), (70, 2), (300, 1), (300, 2)]
    assert all(float(value) > 0 for row in rows for value in row.split()[2:])
    assert all(float(row.split()[3]) >= 1 for row in rows), "tokens of a round and row"
    assert re.fullmatch(r"prefill of 100 tokens: [0-9.]+ tokens/s", last)
