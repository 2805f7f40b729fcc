"""Stages of a start, in words for the operator."""

STAGES = {
    "verify": "Checking the package",
    "load": "Loading the weights",
    "prepare": "Preparing kernels (a machine's first start compiles them)",
}


def describe(stage: str, done: int, total: int, seconds: float) -> str:
    """One line about a start that has lasted `seconds`."""
    share = f" {100 * done // total} %" if 0 < done <= total else ""
    return f"{STAGES.get(stage, stage)}{share}, {seconds:.0f} s"
