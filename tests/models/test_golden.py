"""The demo model on the CPU image against recorded float32 runs of Transformers.

`chat_groupwise_int.json`: the dequantised weights of the committed package. `chat_bf16.json`: the
checkpoint; its package is packed here when GINFER_DEMO_CHECKPOINT names the folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from ginfer.artifact.reader import Package
from ginfer.env import DEMO_CHECKPOINT
from ginfer.models.contract import PROFILES
from ginfer.models.qwen import QWEN_DEMO
from scripts.pack import packer
from scripts.pack.sources import Checkpoint
from tests.models.program import Program

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "appliance" / "demo" / "qwen3.8-demo-groupwise-int.ginfer"
STOP = QWEN_DEMO.token_ids.stop
NORM_TOLERANCE = 2e-3  # relative
SIGMAS = 4  # a gap above this many RMS differences decides a token


def golden(weights):
    text = (ROOT / "tests" / "golden" / f"chat_{weights.replace('-', '_')}.json").read_text()
    return {case["name"]: case for case in json.loads(text)["cases"]}


PROMPTS = golden("bf16")
RECORDED = [name for name, case in PROMPTS.items() if "last_position" in case]


class Demo:
    """A package on the CPU image beside its recorded data."""

    def __init__(self, path, weights):
        self.cases = golden(weights)
        self.package = Package.open(path)
        names = [n for n in self.package.rank_tensors() if n.startswith("text/")]
        tensors = [self.package.tensor(name) for name in names]
        self.program = Program(QWEN_DEMO.spec, tensors, max_tokens=2432, chunk=1152)
        self.rms = {name: self._rms(name) for name in RECORDED}
        self.tokenizer = Tokenizer.from_buffer(self.package.resource("frontend/tokenizer.json"))

    def _rms(self, name):
        last = self.cases[name]["last_position"]
        logits = self.program.prefill(self.cases[name]["prompt_ids"])
        return float(np.sqrt(np.mean((logits[last["top20_ids"]] - last["top20_logits"]) ** 2)))

    def bound(self, name):
        """Gap above which our noise cannot turn a token: of the prompt, else of the noisiest."""
        return SIGMAS * self.rms.get(name, max(self.rms.values()))

    def greedy(self, name):
        """Our greedy ids of a prompt and our own gap of the two best logits at each."""
        case = self.cases[name]
        ids, gaps = [], []
        logits = self.program.prefill(case["prompt_ids"])
        while True:
            second, best = np.partition(logits, -2)[-2:]
            gaps.append(float(best - second))
            ids.append(int(np.argmax(logits)))
            if ids[-1] in STOP or len(ids) == len(case["greedy_ids"]):
                return ids, gaps
            logits = self.program.decode(ids[-1])

    def text(self, name):
        return self.tokenizer.decode(self.greedy(name)[0], skip_special_tokens=False)


@pytest.fixture(scope="module")
def groupwise():
    return Demo(PACKAGE, "groupwise-int")


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    if not DEMO_CHECKPOINT.read():
        pytest.skip(f"{DEMO_CHECKPOINT.name} is not set")
    path = tmp_path_factory.mktemp("demo") / "bf16.ginfer"
    with Checkpoint(Path(DEMO_CHECKPOINT.read())) as checkpoint:
        profile = PROFILES["bf16"]
        packer.pack(checkpoint, path, QWEN_DEMO, profile=profile, progress=lambda *_: None)
    return Demo(path, "bf16")


@pytest.fixture(params=["groupwise", "bf16"])
def demo(request):
    return request.getfixturevalue(request.param)


def test_recorded_data_belongs_to_the_committed_package(groupwise):
    text = (ROOT / "tests" / "golden" / "chat_groupwise_int.json").read_text()
    assert json.loads(text)["package_directory_sha256"] == groupwise.package.digest


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_ids_are_the_recorded_ones_wherever_the_gap_exceeds_the_noise(demo, name):
    case, bound = demo.cases[name], demo.bound(name)
    wanted = case["greedy_ids"]
    ids, gaps = demo.greedy(name)
    if ids == wanted:
        return
    at = next(i for i, (a, b) in enumerate(zip(ids, wanted)) if a != b)
    print(f"{name}: first difference at token {at}, our gap {gaps[at]:.5f}, bound {bound:.5f}")
    assert case["min_top2_margin"] <= bound
    assert gaps[at] < bound


@pytest.mark.parametrize("name", RECORDED)
def test_logits_and_hidden_norms_are_the_recorded_ones(demo, name):
    last = demo.cases[name]["last_position"]
    assert demo.rms[name] < 1e-2 * np.std(last["top20_logits"])
    norms = demo.program.hidden_norms(demo.cases[name]["prompt_ids"])
    np.testing.assert_allclose(norms, last["hidden_norms"], rtol=NORM_TOLERANCE)


@pytest.mark.parametrize("name", [n for n in PROMPTS if n.startswith("needle")])
def test_groupwise_int_finds_the_code_word(groupwise, name):
    assert groupwise.text(name) == PROMPTS[name]["expect"] + "<|im_end|>"


def call(function, **parameters):
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={function}>\n{body}</function>\n</tool_call>"


TOOL_ANSWERS = {
    "tool_weather": call("get_weather", city="Oslo"),
    "tool_parallel": "\n".join(call("get_weather", city=c) for c in ("Bergen", "Tokyo", "Lima")),
    "tool_think_ticket": call(
        "create_ticket", title="login page broken", priority="high", tags='["web", "urgent"]'
    ),
    "tool_response": "The weather in Oslo: -3 °C, snow.",
    "tool_none": PROMPTS["tool_none"]["greedy_text"].removesuffix("<|im_end|>"),
}


@pytest.mark.parametrize("name", TOOL_ANSWERS)
def test_groupwise_int_answers_tool_prompts_rightly(groupwise, name):
    answer = groupwise.text(name).rpartition("</think>\n\n")[2]
    assert answer == TOOL_ANSWERS[name] + "<|im_end|>"
