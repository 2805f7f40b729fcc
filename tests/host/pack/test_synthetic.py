"""Synthetic packages: the inventory of the model, valid to the last digest, values of one scale."""

import numpy as np

from ginfer.artifact import Package
from ginfer.engine.loader import inventory_findings
from ginfer.formats import FORMATS, Layout
from scripts import make_synthetic
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
