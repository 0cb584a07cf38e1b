"""Learning rates follow the count of applied steps; Muon is Muon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace_torch.trainer.muon import Muon, orthogonalised
from headrace_torch.trainer.optimizers import Optimizer
from headrace_torch.trainer.schedule import Schedule


def schedule(**fields: Any) -> Schedule:
    return Schedule(**{"name": "constant", "warmup_steps": 0, "total_steps": 10, "final_share": 0.0, **fields})


def test_a_constant_rate_is_constant_after_warm_up() -> None:
    shares = [schedule(warmup_steps=4).share(step) for step in range(6)]
    assert shares == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decay_starts_full_after_warm_up_ends_at_its_share_and_stays(name: str) -> None:
    decay = schedule(name=name, warmup_steps=2, final_share=0.1)
    shares = [decay.share(step) for step in range(2, 14)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert decay.share(6) == pytest.approx(0.55)
    assert shares[-4:] == pytest.approx([0.1] * 4)


def test_a_warm_up_as_long_as_the_phase_is_followed_by_the_end() -> None:
    assert schedule(name="cosine", warmup_steps=10).share(10) == 1.0
    assert schedule(name="cosine", warmup_steps=10).share(11) == 0.0


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_orthogonalising_brings_singular_values_near_1_and_keeps_the_vectors(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    spread = torch.logspace(0, -1, u.shape[1])
    found = orthogonalised((u * spread @ v)[None])[0]
    middle = u.T @ found @ v.T
    values = middle.diagonal()
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    torch.testing.assert_close(middle, torch.diag(values), atol=1e-4, rtol=0)


def test_muon_steps_as_torch_does_up_to_its_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in ((12, 12), (20, 12), (12, 12), (12, 20))]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    mine = Muon(ours, lr=0.02, weight_decay=0.1)
    peer = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        mine.step()
        peer.step()
    for a, b, p in zip(ours, theirs, start, strict=True):
        difference = torch.linalg.norm(a.detach() - b.detach())
        assert difference < 0.03 * torch.linalg.norm(b.detach() - p)


def test_muon_gets_the_layers_matrices_and_adamw_the_rest(engine: Any, batch: Any, spec: Any, train: Any) -> None:
    one = engine(optimizer="muon")
    train(one, spec(), batch([5, 6]))
    by_muon = {n for n in one._started._updater.optimizer.state() if n.endswith("/momentum_buffer")}
    names = [n for n, p in one._started._updater.parameters.masters.items() if p.ndim == 2 and ".layers." in n]
    assert by_muon == {f"{name}/momentum_buffer" for name in names}
    assert len(names) == 14


def test_each_optimizer_has_its_own_rate(engine: Any, batch: Any, spec: Any, train: Any, weights: Any) -> None:
    settings = {"optimizer": "muon", "learning_rate": 1e-3, "adamw_learning_rate": 1e-4, "warmup_steps": 2}
    one = engine(**settings)
    before = weights(one)
    assert train(one, spec(), batch([9, 9])).learning_rate == pytest.approx(5e-4)
    moved = {name: np.abs(array - before[name]).max() for name, array in weights(one).items()}
    # Adam's first step is the rate; the root mean square of Muon's is near 0.2 of it.
    assert moved["model.norm.weight"] == pytest.approx(5e-5, rel=0.01)
    matrix = "model.layers.0.self_attn.q_proj.weight"
    mean_square = np.sqrt(np.mean((weights(one)[matrix] - before[matrix]) ** 2))
    assert 0.1 * 5e-4 < mean_square < 0.25 * 5e-4


def test_state_that_lacks_or_adds_a_quantity_is_refused() -> None:
    def fresh() -> Optimizer:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        return Optimizer(
            {"p": parameter},
            name="adamw",
            learning_rate=0.1,
            adamw_learning_rate=0.1,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.0,
        )

    used = fresh()
    used.step(share=1.0)
    state = used.state()
    assert state.keys() == {"p/step", "p/exp_avg", "p/exp_avg_sq"}
    with pytest.raises(ValueError, match="p/exp_avg_sq is missing"):
        fresh().load_state({n: t for n, t in state.items() if n != "p/exp_avg_sq"})
    with pytest.raises(ValueError, match="q/step is unknown"):
        fresh().load_state({**state, "q/step": state["p/step"]})
    with pytest.raises(ValueError, match=r"p/exp_avg has shape \(1,\), expected \(3,\)"):
        fresh().load_state({**state, "p/exp_avg": state["p/exp_avg"][:1]})
