"""What grammars cost: masks in decode rounds of eight rows, compilation of a tool set.

python -m tests.bench.grammar [--write]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ginfer.frontend.grammar import ToolChoice, json_grammar, tool_grammar
from ginfer.prompt import PromptOptions
from tests.bench.cpu_engine import device
from tests.bench.summary import record
from tests.engines import make_request, open_demo, submit
from tests.frontends import function_tool, message

if TYPE_CHECKING:
    from ginfer.engine.engine import Engine
    from ginfer.prompt import Tool

ROWS, TOKENS, REPEATS = 8, 200, 3
LIST = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "size": {"type": "integer", "minimum": 0},
            "kind": {"enum": ["file", "folder", "link"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        },
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}


def agent_tools(count: int = 30) -> list[Tool]:
    """Strict tools of the kind that coding agents send."""
    edit = {"old": {"type": "string"}, "new": {"type": "string"}}
    edits = {"type": "object", "properties": edit, "required": ["old", "new"]}
    parameters = {
        "path": {"type": "string", "description": "Where to work"},
        "offset": {"type": "integer", "minimum": 0},
        "mode": {"enum": ["all", "first"]},
        "edits": {"type": "array", "items": edits | {"additionalProperties": False}},
    }
    return [
        replace(
            function_tool(f"tool_{i}", parameters, required=["path"], additionalProperties=False),
            strict=True,
        )
        for i in range(count)
    ]


def measure() -> dict[str, tuple[float, str]]:
    """All figures by name: (value, unit); the best of a few repeats, as the machine is shared."""
    figures: dict[str, tuple[float, str]] = {}
    with open_demo(max_context=4096) as engine:
        grammars = {
            "json": json_grammar(LIST),
            "text": tool_grammar(agent_tools(), ToolChoice()),
        }
        shares = {k: min(_share(engine, g) for _ in range(REPEATS)) for k, g in grammars.items()}
        figures["grammar.mask_share"] = (100 * max(shares.values()), "% of a decode round, C8")
        began = engine.stats()["grammar"]
        text = tool_grammar(agent_tools(31), ToolChoice(mode="required"))
        _once(engine, text)
        cold = engine.stats()["grammar"]["compile_s"] - began["compile_s"]
        figures["grammar.compile_cold_ms"] = (1000 * cold, "ms, 31 strict tools")
        figures["grammar.open_cached_ms"] = (1000 * _cached_s(engine, text), "ms, 31 strict tools")
    return figures


def _cached_s(engine: Engine, text: str | None) -> float:
    """Seconds of a submission whose grammar is compiled: the least of a few."""
    times = []
    for _ in range(20):
        request = _request(engine, 0, text)
        began = time.perf_counter()
        one = submit(engine, request)
        times.append(time.perf_counter() - began)
        engine.cancel(request.request_id)
        one.wait()
    return min(times)


def _once(engine: Engine, text: str | None) -> None:
    one = submit(engine, _request(engine, 0, text))
    engine.cancel(one.request.request_id)
    one.wait()


def _request(engine: Engine, i: int, grammar: str | None) -> Any:
    prompt = engine.frontend.prepare(
        [message("user", f"Tell me {i} things.")], (), PromptOptions(thinking=False)
    )
    sampling = {"temperature": 1.0, "seed": i}
    return make_request(prompt, TOKENS, grammar=grammar, sampling=sampling)


def _share(engine: Engine, grammar: str | None) -> float:
    """Time the loop spends on masks or waits for them, of the time of its rounds."""
    before = engine.stats()
    runs = [submit(engine, _request(engine, i, grammar)) for i in range(ROWS)]
    for run in runs:
        run.wait(600)
    after = engine.stats()
    waited = after["grammar"]["wait_s"] - before["grammar"]["wait_s"]
    return waited / (after["busy_s"] - before["busy_s"])


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = measure()
    for name, (value, unit) in figures.items():
        print(f"{name:28} {value:10.3f} {unit}")
    if options.write:
        record(figures, device())


if __name__ == "__main__":
    main()
