"""Records of runs on GPUs: each committed one is complete, and nothing in it failed."""

import json
import re
from pathlib import Path

import pytest

from scripts.gpu_tests import FOLDER, OUTCOMES, SUITES, Recorder, record_path, write_record

ROOT = Path(__file__).resolve().parents[3]
RECORDS = sorted(FOLDER.glob("[0-9]*-[0-9]*-[0-9]*-*.json"))
TEXTS = {
    "date": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00",
    "commit": r"[0-9a-f]{40}",
    "device": r"NVIDIA .+",
    "capability": r"\d+a?",
    "driver_cuda": r"\d+\.\d+",
}


def suites_of(path):
    """(name, result) of each suite in a record; a file of benchmarks alone has none."""
    return json.loads(path.read_text()).get("tests", {}).items()


def problems(path):
    """What is wrong with a record, a line each."""
    for name, result in suites_of(path):
        if name not in SUITES:
            yield f"unknown suite {name}"
        for field, pattern in TEXTS.items():
            if not re.fullmatch(pattern, str(result.get(field))):
                yield f"{name}.{field} is {result.get(field)!r}"
        if not (result.get("compilers") and result.get("num_devices", 0) >= 1):
            yield f"{name} does not say which compilers made its kernels, or on how many devices"
        if result.get("seconds", 0) <= 0:
            yield f"{name}.seconds is {result.get('seconds')}"
        yield from count_problems(name, result)
        if path != record_path(result["device"], result["date"][:10]):
            yield f"the file should be {record_path(result['device'], result['date'][:10]).name}"


def count_problems(name, result):
    """Every collected test has an outcome, and none failed."""
    files = result.get("files", {})
    for file, row in files.items():
        if not file.startswith(f"{SUITES[name]}/test_"):
            yield f"{file} is no file of {name}"
        if row["collected"] != sum(row[o] for o in OUTCOMES):
            yield f"{file}: {row['collected']} collected, {row} ended"
    for key in ("collected", *OUTCOMES):
        if result.get(key) != sum(row[key] for row in files.values()):
            yield f"{name}.{key} is {result.get(key)}, the files say otherwise"
    if not result.get("passed") or result.get("failed") != 0:
        yield f"{name}: {result.get('passed')} passed, {result.get('failed')} failed"


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_record_is_complete(path):
    assert list(problems(path)) == []


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """A record as the runner writes it, from a real run of two small files."""
    (tmp_path / "test_a.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    text = "import pytest\n@pytest.mark.skip\ndef test_no(): pass\ndef test_yes(): pass\n"
    (tmp_path / "test_b.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    recorder = Recorder()
    monkeypatch.chdir(tmp_path)
    pytest.main(
        ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "."], plugins=[recorder]
    )
    rows = {f"tests/cuda/{name}": row for name, row in recorder.files().items()}
    return {
        "date": "2026-11-29T20:00:00+00:00",
        "commit": "0" * 40,
        "device": "NVIDIA H200",
        "num_devices": 1,
        "capability": "90a",
        "driver_cuda": "13.0",
        "compilers": ["numba 0.68.1"],
        "seconds": 12.5,
        **{key: sum(row[key] for row in rows.values()) for key in ("collected", *OUTCOMES)},
        "files": rows,
    }


def written(folder, result, monkeypatch):
    monkeypatch.setattr("scripts.gpu_tests.FOLDER", folder)
    path = record_path("NVIDIA H200", "2026-11-29")
    assert path.name == "2026-11-29-nvidia-h200.json"
    write_record(path, "gpu", result)
    return path


def test_the_recorder_counts_every_outcome(sample, tmp_path, monkeypatch):
    assert (sample["collected"], sample["passed"], sample["skipped"]) == (4, 3, 1)
    assert list(problems(written(tmp_path, sample, monkeypatch))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"commit": ""},
        {"commit": "0" * 40 + "+"},
        {"device": ""},
        {"compilers": []},
        {"seconds": 0},
        {"collected": 5},
        {"passed": 4},
        {"files": {}},
    ],
)
def test_an_incomplete_record_is_found(sample, tmp_path, monkeypatch, change):
    path = written(tmp_path, {**sample, **change}, monkeypatch)
    assert list(problems(path))


def test_a_failed_or_unfinished_test_is_found(sample, tmp_path, monkeypatch):
    row = sample["files"]["tests/cuda/test_a.py"]
    row["passed"] -= 1
    sample["passed"] -= 1
    assert any("ended" in line for line in problems(written(tmp_path, sample, monkeypatch)))
    row["failed"] += 1
    sample["failed"] += 1
    assert any("1 failed" in line for line in problems(written(tmp_path, sample, monkeypatch)))


def test_other_results_of_the_day_are_kept(sample, tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.gpu_tests.FOLDER", tmp_path)
    path = record_path("NVIDIA H200", "2026-11-29")
    path.write_text('{"bench": {"x": 1}}')
    write_record(path, "gpu", sample)
    assert json.loads(path.read_text())["bench"] == {"x": 1}
