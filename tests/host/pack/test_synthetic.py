"""Synthetic packages: the inventory of the model, valid to the last digest, values of one scale."""

import numpy as np
import pytest

from ginfer.artifact import Package
from ginfer.engine.loader import inventory_findings
from ginfer.errors import ConfigError
from ginfer.formats import FORMATS, Layout
from ginfer.frontend import open_frontend
from ginfer.models.qwen import QWEN_27B, QWEN_DEMO
from ginfer.prompt import ContentPart, Message, PromptOptions
from scripts import make_synthetic
from scripts.synthetic_tokenizer import stretch
from tests.oracles.formats import decode


def test_a_synthetic_package_is_what_its_model_wants(tmp_path, monkeypatch, capsys):
    source = "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"
    out = tmp_path / "synthetic.ginfer"
    arguments = ["make_synthetic", "qwen3.8-demo", str(out), "--resources", source]
    monkeypatch.setattr("sys.argv", arguments)
    assert make_synthetic.main() == 0
    assert "0 findings" in capsys.readouterr().out
    package = Package.open(out)
    assert inventory_findings(package) == ()
    for name, deviation in (
        ("text/token_embedding", 1.0),
        ("text/layers/0/mlp/gate_up", 384**-0.5),
        ("text/layers/0/gdn/a_b_projection", 384**-0.5),
        ("text/output_head", 384**-0.5),
    ):
        t = package.tensor(name)
        values = decode(FORMATS[t.format.name], Layout(t.layout), t.shape, t.data)
        assert 0.9 < float(np.std(values)) / deviation < 1.1, name
    package.close()


def test_an_unknown_model_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    arguments = ["make_synthetic", "qwen9", str(tmp_path / "x.ginfer"), "--resources"]
    source = "appliance/demo/qwen3.8-demo-groupwise-int.ginfer"
    monkeypatch.setattr("sys.argv", [*arguments, source])
    assert make_synthetic.main() == 1
    assert "qwen9" in capsys.readouterr().err
    assert not (tmp_path / "x.ginfer").exists()


@pytest.fixture(scope="module")
def resources():
    with Package.open("appliance/demo/qwen3.8-demo-groupwise-int.ginfer") as package:
        return {name: bytes(package.resource(name)) for name in package.resources}


def test_a_stretched_tokenizer_spells_every_id_and_cuts_text_as_before(resources):
    small = open_frontend("qwen3.8-demo", resources)
    large = open_frontend("qwen3.8-27b", stretch(resources, QWEN_27B))
    spelled = [large.token_bytes(i) for i in range(QWEN_27B.spec.num_token_ids)]
    assert len(set(spelled)) == len(spelled)
    assert large.stop_token_ids == QWEN_27B.token_ids.stop
    text = "Hello, world! def main(): return 42 w4096"
    assert large.encode(text) == small.encode(text)
    ids = QWEN_27B.token_ids
    pads = "<|vision_start|><|image_pad|><|vision_end|><|video_pad|>"
    assert large.encode(pads) == [ids.vision_start, ids.image_pad, ids.vision_end, ids.video_pad]
    said = [Message(role="user", content=(ContentPart(kind="text", text="Hello!"),))]
    prompts = [f.prepare(said, (), PromptOptions()) for f in (small, large)]
    words = [[f.token_text(i) for i in p.token_ids] for f, p in zip((small, large), prompts)]
    assert words[0] == words[1]


def test_a_tokenizer_that_fits_stays_and_one_that_is_too_large_is_refused(resources):
    assert stretch(resources, QWEN_DEMO) == resources
    with pytest.raises(ConfigError, match=r"248077 ids.*4111"):
        stretch(stretch(resources, QWEN_27B), QWEN_DEMO)
