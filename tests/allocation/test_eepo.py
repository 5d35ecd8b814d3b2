"""EEPO: the gate, the step that unlearns, and the two halves of a group."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hosts.table import PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate


def gate(history, group_size=8, **params):
    return evaluate("allocator", "eepo", {"op": "gate", "entropy_history": history, "group_size": group_size}, params)


def test_it_acts_strictly_below_the_threshold_on_the_last_finite_entropies():
    assert gate([])["active"] is False and math.isnan(gate([])["avg"])
    assert gate([0.3, 0.3, 0.3])["active"] is False
    assert gate([9.0, 0.2, None, 0.2, math.inf, 0.2])["active"] is True
    assert (gate([0.1], 7)["n_first"], gate([0.1], 7)["n_second"]) == (3, 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["complementary", "nll"]))
def test_every_sampled_token_becomes_less_likely_and_the_gradient_is_the_formulas(seed, loss):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 5, (3, 4), generator=generator)
    mask = torch.rand(3, 4, generator=generator) < 0.7
    out = evaluate(
        "allocator",
        "eepo",
        {"op": "unlearn", "logits": logits, "tokens": tokens, "response_mask": mask},
        {"lr": 1e-3, "loss": loss},
    )
    p = logits.softmax(-1)
    chosen = p.gather(-1, tokens[..., None])
    onehot = torch.nn.functional.one_hot(tokens, 5).double()
    rows = max(1, int(mask.any(1).sum()))
    w = (mask / mask.sum(1, keepdim=True).clamp(min=1) / rows)[..., None]
    scale = chosen / (1 - chosen) if loss == "complementary" else torch.ones_like(chosen)
    torch.testing.assert_close(out["grad"], w * scale * (onehot - p))
    assert bool((out["logp_after"][mask] < out["logp_before"][mask]).all())
    assert bool((out["logp_after"][~mask] == 0).all())


def test_a_certain_token_has_no_gradient_and_an_empty_batch_no_loss():
    certain = {"op": "unlearn", "logits": [[[99.0, 0.0]]], "tokens": [[0]], "response_mask": [[1]]}
    out = evaluate("allocator", "eepo", certain)
    assert bool((out["grad"] == 0).all()) and out["loss"] == pytest.approx(-math.log(1e-6))
    empty = evaluate("allocator", "eepo", {**certain, "response_mask": [[0]]})
    assert empty["loss"] == 0 and bool((empty["grad"] == 0).all())
    inactive = evaluate("allocator", "eepo", {**certain, "logits": [[[1.0, 0.0]]], "active": False})
    assert inactive["logits_after"].tolist() == [[[1.0, 0.0]]]


def run(**own):
    config = {"method": {"name": "eepo", "threshold": 9.0, "learning_rate": 40.0, **own}}
    return TableTrainer(config, host=TableHost(12), groups=6, group_size=7, max_tokens=6)


def test_in_a_run_the_second_half_comes_from_weights_that_avoid_the_first():
    trainer = run()
    trainer.run(1)
    assert trainer.log[0]["allocator/eepo_active"] == 0  # no entropy is known yet
    learner, engine = trainer.host.policy.theta.detach().clone(), trainer.host.engine.exact.clone()
    ctx = trainer.context()
    batch = trainer.rollouts(ctx)
    assert torch.equal(trainer.host.policy.theta, learner) and torch.equal(trainer.host.engine.exact, engine)
    halves = [[r for g in ctx.started for r in g.rollouts if (r.tag == "elsewhere") == late] for late in (False, True)]
    assert [len(rows) for rows in halves] == [18, 24] and len(batch.groups.ids) == 6
    second = torch.tensor([source == "elsewhere" for source in batch.source])
    mask = batch.response_mask
    assert bool(batch.logp_behavior[~second].isnan().all())
    gap = (batch.logp_behavior - batch.logp_old)[mask & second[:, None]]
    assert float(gap.abs().mean()) > 0.05
    trainer.run(2)
    assert all(math.isfinite(entry["loss"]) for entry in trainer.log)


def test_the_altered_weights_make_the_first_half_less_likely():
    trainer = run()
    trainer.run(1)
    engine, seen = trainer.host.engine, []
    unlearn = engine.unlearn

    def watched(operation):
        rows = [r for r in operation.rollouts if len(r)]
        before = float(engine._own_logp(rows, engine.exact)[0].nansum())
        unlearn(operation)
        seen.append((before, float(engine._own_logp(rows, engine.exact)[0].nansum())))

    engine.unlearn = watched
    trainer.rollouts(trainer.context())
    ((before, after),) = seen
    assert after < before - 1


def test_without_low_entropy_it_is_a_plain_group():
    plain = TableTrainer({"advantage": "grpo"}, host=TableHost(12), groups=6, group_size=7, max_tokens=6)
    other = run(threshold=1e-6)
    assert [e["loss"] for e in plain.run(3)] == [e["loss"] for e in other.run(3)]
    assert torch.equal(plain.host.policy.theta, other.host.policy.theta)


def test_a_host_that_can_not_unlearn_is_refused():
    host = rlx.HostProfile("any", PROFILE.signals, PROFILE.capabilities - {"unlearn"}, {"unlearn": "it can not"})
    with pytest.raises(rlx.ConfigError, match="allocator eepo.*'unlearn'.*it can not"):
        rlx.build({"method": "eepo"}, host)
