"""Faults of an engine on the GPU: a value that is no number, and a context that is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ginfer.errors import InternalError
from tests.engines import complete, ids_prompt, make_request, open_demo, submit

ROOT = Path(__file__).parents[2]
OPTIONS = {"backend": "cuda", "max_context": 1024, "kv_capacity": 8192, "max_concurrency": 3}


def test_a_value_that_is_no_number_fails_its_row_alone(tmp_path, monkeypatch):
    fault = tmp_path / "fault"
    monkeypatch.setenv("GINFER_FAULT_FILE", str(fault))
    with open_demo(**OPTIONS) as engine:
        prompts = [ids_prompt(range(i, 2 * i)) for i in (50, 60, 70)]
        alone = [complete(engine, p, 60, ignore_eos=True).ids for p in prompts]

        def spoil(run, event):
            if len(run.ids) == 9:
                fault.write_text("nan 1")

        runs = [
            submit(engine, make_request(p, 60, ignore_eos=True), spoil if i == 2 else None)
            for i, p in enumerate(prompts)
        ]
        with pytest.raises(InternalError) as caught:
            runs[1].wait()
        assert caught.value.code == "nonfinite_logits"
        assert runs[1].ids == alone[1][: len(runs[1].ids)]
        for i in (0, 2):
            assert runs[i].wait().ids == alone[i]
        engine.check_integrity()
        assert engine.stats()["failed"] == {"nonfinite_logits": 1}


LOST = """
import sys
from pathlib import Path
from ginfer.errors import UnavailableError
from tests.engines import complete, ids_prompt, open_demo
from tests.cuda.test_engine_faults import OPTIONS
engine = open_demo(**OPTIONS)
complete(engine, ids_prompt(range(50)), 5)
Path(sys.argv[1]).write_text("trap")
for _ in range(2):
    try:
        complete(engine, ids_prompt(range(50)), 20)
    except UnavailableError as error:
        print(error)
engine.close()
print("closed")
"""


def test_a_lost_context_fails_what_runs_and_refuses_what_comes(tmp_path):
    fault = tmp_path / "fault"
    environment = {**os.environ, "GINFER_FAULT_FILE": str(fault)}
    command = [sys.executable, "-W", "default", "-c", LOST, str(fault)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first == second
    assert "CUDA_ERROR" in first
    assert last == "closed"
