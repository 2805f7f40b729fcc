"""The command line on the demo model: answers, conversations, and the demo of `make run`."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.cli.chat import Conversation
from appliance.cli.main import group, invoke
from appliance.protocols.defaults import SamplingOverrides
from appliance.protocols.openai_chat import ChatRequest
from ginfer.prompt import PromptOptions
from tests.engines import DEMO_PACKAGE, open_demo
from tests.host.protocols.bodies import WEATHER

ROOT = Path(__file__).parents[2]
GREETING = "Hello! I am the GInfer demo model. How can I help you?\n"
SUM, RIGHT = "What is 348 + 275?", "348 + 275 = 623\n"
TALK = ChatRequest(
    model="",
    messages=(),
    options=PromptOptions(thinking=False),
    max_tokens=64,
    sampling=SamplingOverrides(temperature=0.0),
)


def start(*args, **streams):
    """The program as a process."""
    command = [sys.executable, "-m", "appliance.cli", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **streams)


@pytest.fixture(scope="module")
def engine():
    """One engine for all tests that need no start of their own."""
    with open_demo(max_context=2048, max_concurrency=1) as opened:
        yield opened


@pytest.fixture
def run(capfd, monkeypatch, engine):
    """Run `ginfer DEMO ARGS` in this process on `engine`; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr("appliance.cli.run.open_engine", lambda _config: nullcontext(engine))

    def call(*args):
        code = invoke(group, [str(DEMO_PACKAGE), *map(str, args)], "ginfer")
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_answer_goes_to_stdout_and_the_rest_to_stderr():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(DEMO_PACKAGE, "--prompt", "Hello!", "--greedy", **pipes) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, GREETING)
    *reasoning, summary = err.splitlines()
    assert "".join(reasoning)
    assert "\x1b" not in err
    assert summary.startswith("prompt ")
    assert "tokens/s, stop_token" in summary


def test_thinking_can_be_left_out(run):
    code, out, err = run("--prompt", "What is the capital of France?", "--greedy", "--no-thinking")
    assert (code, out) == (0, "The capital of France is Paris.\n")
    assert len(err.splitlines()) == 1
    assert "reasoning" not in err


def test_raw_output_shows_the_markup(run):
    _, out, err = run("--prompt", SUM, "--greedy", "--raw-output")
    assert "\n</think>\n\n" + RIGHT.strip() in out
    assert len(err.splitlines()) == 1


def test_thinking_budget_shortens_the_reasoning(run):
    _, out, err = run("--prompt", SUM, "--greedy", "--thinking-budget", "4")
    assert out
    full = run("--prompt", SUM, "--greedy")[2]
    assert full.startswith(err.splitlines()[0])
    assert len(full) > len(err) + 20


def test_stops_end_the_answer_and_the_reasoning(run):
    count = ("--prompt", "Count from 1 to 30.", "--greedy", "--no-thinking")
    _, out, err = run(*count, "--stop", "7,", "--stop", "5,")
    assert out == "1, 2, 3, 4, \n"
    assert err.endswith("stop_string\n")
    _, out, err = run("--prompt", SUM, "--greedy", "--reasoning-stop", "right")
    assert out == ""
    assert err.startswith("Digits from the \n")


def test_print_token_ids_and_stop_at_one(run):
    hello = ("--prompt", "Hello!", "--greedy", "--print-token-ids")
    _, _, err = run(*hello)
    ids = err.splitlines()[-2].removeprefix("token ids: ").split()
    assert len(ids) > 8
    stop = next(i for i in range(4, len(ids)) if ids[i] not in ids[:i])
    _, _, err = run(*hello, "--stop-token-id", ids[stop])
    assert err.splitlines()[-2].removeprefix("token ids: ").split() == ids[:stop]


def test_output_limit(run):
    _, _, err = run("--prompt", "Count from 1 to 30.", "--greedy", "--max-new", "5")
    assert "answer 5 tokens" in err
    assert err.endswith("output_limit\n")


def test_a_seed_repeats_the_answer_and_another_changes_it(run):
    story = ("--prompt", "Write a long story about the sea with a hero called Mia.")
    options = (*story, "--no-thinking", "--temperature", "1.5", "--max-new", "40")
    once, again, other = (run(*options, "--seed", seed)[1] for seed in (7, 7, 8))
    assert once == again != other


def test_messages_file_with_tools_prints_calls_as_json_lines(run, tmp_path):
    path = tmp_path / "talk.json"
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    path.write_text(json.dumps({"messages": [question], "tools": [WEATHER]}))
    _, out, _ = run("--messages", path, "--greedy", "--no-thinking")
    assert json.loads(out) == {"name": "get_weather", "arguments": {"city": "Oslo"}}
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    history = [
        question,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": '{"city": "Oslo", "temperature": -3, "condition": "snow"}',
        },
    ]
    path.write_text(json.dumps({"messages": history, "tools": [WEATHER]}))
    _, out, _ = run("--messages", path, "--greedy", "--no-thinking")
    assert "-3" in out
    assert "snow" in out


def test_messages_file_may_be_an_array(run, tmp_path):
    path = tmp_path / "talk.json"
    turns = ["My name is Nora.", "Nice to meet you, Nora! How can I help you?", "What is my name?"]
    roles = ("user", "assistant", "user")
    path.write_text(json.dumps([{"role": r, "content": c} for r, c in zip(roles, turns)]))
    assert run("--messages", path, "--greedy", "--no-thinking")[1] == "Your name is Nora.\n"


def test_a_prompt_beyond_the_context_is_one_line(run):
    code, out, err = run("--prompt", "word " * 3000)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1


def test_piped_chat_remembers_until_reset():
    said = "My name is Nora.\n\nWhat is my name?\n/what\n/reset\nHello!\n/quit\nHello!\n"
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start("chat", DEMO_PACKAGE, "--greedy", "--no-thinking", **pipes) as process:
        out, err = process.communicate(said, timeout=300)
    assert process.returncode == 0
    nice, name, *hello = out.splitlines()
    assert "Nora" in nice
    assert name == "Your name is Nora."
    assert len(hello) == 1
    assert "Nora" not in hello[0]
    assert err.startswith("unknown command /what")


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_reuses_all_that_was_said(capfd, engine, thinking):
    talk = Conversation(engine, replace(TALK, options=PromptOptions(thinking=thinking)))
    stats = [engine.stats()]
    for said in ("What is 61 - 27?", "Now add 8."):
        talk.run([said])
        stats.append(engine.stats())
    held, reused = (
        sum(after[name] - before[name] for name in names)
        for before, after, names in (
            (stats[0], stats[1], ("prompt_tokens", "completion_tokens")),
            (stats[1], stats[2], ("cached_tokens",)),
        )
    )
    assert reused >= held - 2  # the state after the last drawn tokens was never computed
    assert capfd.readouterr().out.splitlines()[-1].endswith("42")


def test_chat_survives_a_full_context(capfd):
    with open_demo(max_context=128, max_concurrency=1) as engine:
        Conversation(engine, TALK).run(["word " * 400, "Hello!"])
    out, err = capfd.readouterr()
    assert len(out.splitlines()) == 1
    assert err.rstrip().endswith("(/reset starts anew)")


def test_chat_on_a_terminal_dims_reasoning_and_stops_on_ctrl_c():
    master, slave = pty.openpty()
    options = ("--greedy", "--max-new", "2000")
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    plain = {**os.environ, "TERM": "dumb"}  # line editing draws nothing of its own
    with start("chat", DEMO_PACKAGE, *options, env=plain, **streams) as process, killed(process):
        os.close(slave)
        seen = read_until(master, "> ")
        os.write(master, b"Hello!\n")
        seen += read_until(master, "How can I help you?\r\n> ")
        os.write(master, b"Write a long story about the sea with a hero called Mia.\n")
        read_until(master, "\x1b[2m")
        process.send_signal(signal.SIGINT)
        read_until(master, "(stopped)\r\n> ")
        os.write(master, b"/quit\n")
        assert process.wait(60) == 0
    os.close(master)
    assert "/quit ends" in seen
    assert "\x1b[2m" in seen
    assert "\x1b[0m" in seen


@contextmanager
def killed(process):
    """When a check fails, nobody waits for the process."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def read_until(fd, text):
    """Terminal output up to and including `text`."""
    seen = ""
    while not seen.endswith(text):
        assert select.select([fd], [], [], 120)[0], f"silence after {seen!r}"
        seen += os.read(fd, 1).decode(errors="replace")
        assert len(seen) < 20000
    return seen


def test_ctrl_c_ends_a_run_quietly():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    story = "Write a long story about the sea with a hero called Mia."
    with (
        start(DEMO_PACKAGE, "--prompt", story, "--no-thinking", **pipes) as process,
        killed(process),
    ):
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130)  # 0: the answer was complete before the signal came
    assert "Traceback" not in err


def test_make_run_once_streams_one_answer():
    command = [sys.executable, "-m", "scripts.run_demo", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "curl http://127.0.0.1:" in done.stdout
    assert "demo" in done.stdout.partition("> ")[2]
    assert " tokens in " in done.stdout


def test_make_run_stays_until_it_is_interrupted():
    command = [sys.executable, "-u", "-m", "scripts.run_demo"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, cwd=ROOT) as process, killed(process):
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("Serving") for line in lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
