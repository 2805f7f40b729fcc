"""Values of long prompts at full size on a GPU: float64 at sampled places, any cut the same bits.

python -m tests.bench.long_prompt [PACKAGE] [--out FILE] [--commit SHA]       needs torch with CUDA

Kernels of the 27B shapes over 128K tokens of random data: attention of the last chunk, and a layer
of Gated DeltaNet chunk by chunk with its state kept, against float64 token by token. With a package
also its prompts: K/V and states after chunks of 128, 1,024 and 8,192 columns, and tokens and
logprobs alone and in company. Ends with an error where a bound or a bit is missed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ginfer.config import EngineConfig
from ginfer.cuda.runtime.queue import Queue
from ginfer.engine.engine import Engine
from ginfer.models import qwen
from tests.bench import gdn
from tests.bench.ops import Bench
from tests.bench.prefill import Chunks
from tests.bench.prefill_attention import CHUNK, Attention, D, G, H
from tests.bench.summary import SUMMARY, record
from tests.engines import Run, ids_prompt, make_request
from tests.tolerances import ATTENTION_BF16, GDN_OUTPUT, GDN_STATE, Bound

if TYPE_CHECKING:
    Figures = dict[str, tuple[float, str]]

TOKENS = 131_072
HK, HV, WIDTH = gdn.HK, gdn.HV, gdn.WIDTH
SAMPLED = (0, 63, 64, 1000, 4095, 4096, 6007, CHUNK - 1)  # tokens of a chunk
CUT_TOKENS, CUTS = 8192, (8192, 1024, 128)
COMPANY = (9000, 700, 64, 129)  # tokens of prompts


def compare(name: str, bound: Bound, found: torch.Tensor, wanted: torch.Tensor) -> Figures:
    """The relative L2 distance. Raises AssertionError beyond the bound."""
    got, want = found.double().cpu().numpy(), wanted.cpu().numpy()
    bound.check(got, want, name)
    return {f"{name}.l2": (float(np.linalg.norm(got - want) / np.linalg.norm(want)), "relative")}


def measure_attention(bench: Bench) -> Figures:
    """The last chunk of a prompt over all tokens before it."""
    start = TOKENS - CHUNK
    attention = Attention(bench, TOKENS)
    attention.kv.mul_(0.25)
    launch, qkgv, out = attention.columns(start, CHUNK)
    qkgv[:, : H * D].mul_(8)  # scores that differ
    torch.cuda.synchronize()
    launch()
    bench.stream.synchronize()
    assert bool(out.isfinite().all())
    token, chunk = torch.arange(64, device="cuda")[:, None], torch.arange(8, device="cuda")
    planes = attention.kv.view(-1, 2, G, D // 64, 64, 8, 8)[attention.pages.long()]
    places = (chunk ^ (token & 7))[None, None, None, None, :, :, None].expand_as(planes)
    planes = planes.gather(5, places).permute(1, 2, 0, 4, 3, 5, 6).reshape(2, G, -1, D)
    found, wanted = [], []
    for t in SAMPLED:
        heads = qkgv[t].double().view(2 * (H + G), D)
        for g in range(G):
            keys, values = (planes[i, g, : start + t + 1].double() for i in range(2))
            mine = slice(g * H // G, (g + 1) * H // G)
            sums = (heads[mine] @ keys.T * D**-0.5).softmax(-1) @ values
            wanted.append(sums * heads[H + G : 2 * H + G][mine].sigmoid())
            found.append(out[t].view(H, D)[mine])
    return compare(
        "prefill.128k.attention", ATTENTION_BF16, torch.stack(found), torch.stack(wanted)
    )


class Recurrence:
    """The layer of `gdn.Prompt` in float64, a token at a time, as a graph of a chunk."""

    def __init__(self, prompt: gdn.Prompt) -> None:
        self._prompt, f64 = prompt, {"device": "cuda", "dtype": torch.float64}
        self._gates = prompt.kept[4].double()
        self.state = torch.zeros(HV, WIDTH, WIDTH, **f64)
        self._q, self._k, self._v = (torch.zeros(CHUNK, HV, WIDTH, **f64) for _ in range(3))
        self._decay, self._beta = (torch.zeros(CHUNK, HV, 1, 1, **f64) for _ in range(2))
        self._out = torch.zeros(len(SAMPLED), HV, 1, WIDTH, **f64)
        self._step(0)  # what the products need is there before a capture
        torch.cuda.synchronize()
        self.state.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for t in range(CHUNK):
                self._step(t)

    def _step(self, t: int) -> None:
        key, S = self._k[t][:, None], self.state
        S.mul_(self._decay[t])
        S.baddbmm_(key.mT, (self._v[t][:, None] - torch.bmm(key, S)) * self._beta[t])
        if t in SAMPLED:
            torch.bmm(self._q[t][:, None], S, out=self._out[SAMPLED.index(t)])

    def outputs(self) -> torch.Tensor:
        """Results of the sampled tokens of the next chunk, [S, HV x WIDTH]."""
        x, ab = self._prompt.convolved.double(), self._prompt.ab.double()
        x = x.view(CHUNK, -1, WIDTH)
        unit = x[:, : 2 * HK] / (x[:, : 2 * HK].square().sum(-1, keepdim=True) + gdn.EPS).sqrt()
        self._q.copy_((unit[:, :HK] * WIDTH**-0.5).repeat_interleave(HV // HK, 1))
        self._k.copy_(unit[:, HK:].repeat_interleave(HV // HK, 1))
        self._v.copy_(x[:, 2 * HK :])
        rate, bias = self._gates
        decay = (rate * torch.nn.functional.softplus(ab[:, :HV] + bias)).exp()
        self._decay.copy_(decay[..., None, None])
        self._beta.copy_(ab[:, HV:].sigmoid()[..., None, None])
        self._graph.replay()
        torch.cuda.synchronize()
        return self._out.reshape(len(SAMPLED), -1).clone()


def measure_recurrence(bench: Bench) -> Figures:
    """A layer of Gated DeltaNet over all tokens."""
    prompt = gdn.Prompt(Queue(bench.image, bench.stream), CHUNK)
    gates, state, history, taps = (prompt.kept[i] for i in (4, 6, 7, 8))
    gates[0] = -torch.logspace(-5, 1, HV, device="cuda")  # some forget at once, some hardly
    gates[1] = torch.randn(HV, device="cuda")
    state.zero_()
    history.zero_()
    taps.mul_(0.3)
    exact, found, wanted = Recurrence(prompt), [], []
    for _ in range(TOKENS // CHUNK):
        prompt.mix.copy_(torch.randn_like(prompt.mix))
        prompt.ab.copy_(torch.randn_like(prompt.ab))
        prompt.results.fill_(float("nan"))
        torch.cuda.synchronize()
        prompt.whole()
        bench.stream.synchronize()
        assert bool(prompt.results.isfinite().all())
        found.append(prompt.results[list(SAMPLED)].clone())
        wanted.append(exact.outputs())
    figures = compare("prefill.128k.gdn", GDN_OUTPUT, torch.cat(found), torch.cat(wanted))
    return figures | compare("prefill.128k.gdn_state", GDN_STATE, state, exact.state)


class _Bytes:
    """Device memory that torch may look at."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes // 8,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 3,
        }


def _left_by(backend: Any, columns: int) -> list[torch.Tensor]:
    """K/V pages and the state of a prompt in chunks of so many columns."""
    chunks, slots, stream = Chunks(backend, CUT_TOKENS), backend._slots, backend._queue.stream
    nbytes = CUT_TOKENS // 64 * slots.pages.page_nbytes
    parts = [(slots.units.address, nbytes), *slots.parts(0)]
    places = [torch.as_tensor(_Bytes(*part), device="cuda") for part in parts]
    places[0].zero_()
    torch.cuda.synchronize()
    for start in range(0, CUT_TOKENS, columns):
        qwen.forward(backend._spec, backend, chunks.batch(start, columns))
    stream.synchronize()
    return [place.clone() for place in places]


def check_cuts(engine: Engine) -> None:
    """Raises AssertionError where a cut changes a bit of K/V or of a state."""

    def work(_: Any, backend: Any) -> None:
        whole = _left_by(backend, CUTS[0])
        assert bool(whole[0].any())
        for columns in CUTS[1:]:
            for part, other in zip(whole, _left_by(backend, columns), strict=True):
                assert torch.equal(part, other), f"chunks of {columns} columns"

    engine.between_rounds(work)


def check_company(engine: Engine) -> None:
    """Raises AssertionError where a cut or company changes a token or a logprob."""
    queue = engine._loop._prefill  # type: ignore[attr-defined]
    rng = np.random.default_rng(7)
    prompts = [ids_prompt(rng.integers(0, 4000, n)) for n in COMPANY]
    sampling = {"temperature": 1.0, "seed": 3, "logprobs": 4}

    def answers(*mine: Any) -> list[Any]:
        runs = [Run(make_request(p, 8, sampling=sampling, raw=True, ignore_eos=True)) for p in mine]
        engine.between_rounds(lambda *_: [engine.submit(run.request, run) for run in runs])
        for run in runs:
            run.wait(60)
        return [(run.ids, run.logprobs) for run in runs]

    alone = [answers(prompt)[0] for prompt in prompts]
    for columns in CUTS:
        queue._most = columns
        queue._limits.clear()
        assert answers(prompts[0])[0] == alone[0], f"chunks of {columns} columns"
        assert answers(*prompts[1:], prompts[0]) == [*alone[1:], alone[0]], f"packed in {columns}"


def main() -> None:
    """Measure, print, and record on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("package", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, nargs="?", const=SUMMARY, help="merge figures into it")
    parser.add_argument("--commit", default="", help="the commit to record; default: git's")
    options = parser.parse_args()
    bench = Bench()
    figures = measure_attention(bench) | measure_recurrence(bench)
    for name, (value, unit) in figures.items():
        print(f"{name} {value:.3g} {unit}", flush=True)
    torch.cuda.empty_cache()
    if options.package:
        config = EngineConfig(
            package=options.package,
            backend="cuda",
            max_context=2 * CUT_TOKENS,
            kv_capacity=8 * CUT_TOKENS,
            max_concurrency=len(COMPANY),
            prefill_chunk=CUTS[0],
            prefix_reuse=False,
        )
        with Engine.open(config) as engine:
            check_cuts(engine)
            check_company(engine)
        print(f"chunks of {CUTS} columns, alone and packed: the same bits")
    if options.out:
        record(figures, bench.device.info.name, path=options.out, commit=options.commit)


if __name__ == "__main__":
    main()
