"""With vLLM's place taken by an engine that needs no GPU: what it reports, and who corrects for it."""

from __future__ import annotations

import pytest
import torch
from trl import GRPOTrainer
from trl_tiny import TRL_EQUIVALENT, logs, run, weights

import rlx_plugins as rlx


class Engine:
    """Samples digits and letters at random, and reports log-probs with a gap on every fourth token."""

    def __init__(self, model, temperature, max_completion_length, **settings):
        self.temperature, self.max_completion_length = temperature, max_completion_length
        self.generator = torch.Generator().manual_seed(3)
        self.calls = []

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler=None):
        self.calls.append((self.temperature, self.max_completion_length))
        self.prompts = prompts
        ids = torch.randint(20, 100, (len(prompts), self.max_completion_length), generator=self.generator).tolist()
        logp = (-4.6 + torch.randn(len(prompts), self.max_completion_length, generator=self.generator) / 4).tolist()
        reported = [[[None if i % 4 == 3 else x] for i, x in enumerate(row)] for row in logp]
        return prompts, ids, reported, None


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    return {"use_vllm": True, "vllm_mode": "colocate", "optim": "sgd", "learning_rate": 0.5, "max_steps": 2}


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_without_a_correction_plugin_trls_own_is_kept(model, tmp_path, vllm, mode):
    settings = {**vllm, "vllm_importance_sampling_mode": mode, "beta": 0.1, "num_iterations": 2}
    ours = run(model, tmp_path / "a", plugins=TRL_EQUIVALENT, **settings)
    theirs = run(model, tmp_path / "b", cls=GRPOTrainer, **settings)
    names = ("loss", "grad_norm", "sampling/importance_sampling_ratio/mean")
    for mine, his in zip(logs(ours, *names), logs(theirs, *names)):
        assert mine == pytest.approx(his, abs=1e-6, rel=1e-5) and abs(mine["loss"]) > 1e-3
    for name, weight in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "plugins",
    [
        {"correction": "tis"},
        {"ratio": {"name": "token", "denominator": "logp_rollout"}},
        {"clip": {"name": "dppo", "denominator": "logp_rollout"}},
    ],
    ids=["correction", "ratio", "clip"],
)
def test_a_part_that_corrects_turns_trls_own_off(model, tmp_path, vllm, plugins):
    t = run(model, tmp_path, plugins=plugins, **vllm)
    assert t.args.vllm_importance_sampling_correction is False
    assert "sampling/importance_sampling_ratio/mean" not in logs(t)[0]
    if "correction" in plugins:
        assert 0.5 < logs(t)[0]["rlx/correction/tis/weight_mean"] != 1.0


def test_the_engines_log_probs_reach_the_batch_with_gaps_as_nan(model, tmp_path, vllm, registered):
    seen = []

    @registered("advantage", "test_rollout_logp")
    class RolloutLogp(rlx.Advantage):
        requires = frozenset({"logp_rollout"})

        def __call__(self, batch):
            seen.append(batch)
            return {"advantages": batch.spread(batch.rewards)}

    for program in ({}, {"sampler": "in_order"}):
        run(model, tmp_path / str(len(program)), plugins={"advantage": "test_rollout_logp", **program}, **vllm)
    for batch in seen:
        gaps = torch.isnan(batch.logp_rollout)
        assert torch.equal(gaps, (torch.arange(10) % 4 == 3).expand_as(gaps))
        assert batch.logp_rollout[~gaps].mean() == pytest.approx(-4.6, abs=0.1)
    assert len(seen) == 4


def test_the_engine_is_asked_for_what_a_row_may_still_get(model, tmp_path, vllm, registered):
    @registered("temperature", "test_warm")
    class Warm(rlx.Temperature):
        def prepare(self, new, groups, ctx):
            for r in new:
                r.temperature, r.max_tokens = 1.5, 6

    t = run(model, tmp_path, plugins={"temperature": "test_warm"}, generation_chunk=4, **{**vllm, "max_steps": 1})
    assert t.vllm_generation.calls == [(1.5, 4), (1.5, 2)]
    assert (t.vllm_generation.temperature, t.vllm_generation.max_completion_length) == (1.0, 10)


def test_the_engine_samples_with_the_context_and_no_row_gets_more_than_it_may(model, tmp_path, vllm, registered):
    lengths = {}

    @registered("hint", "test_uneven")
    class Uneven(rlx.Hint):
        def prepare(self, new, groups, ctx):
            for r in new:
                r.context, r.max_tokens = [90, 91, r.slot + 20], 3 + r.slot

        def observe(self, groups, ctx):
            lengths.update({r.slot: len(r) for g in groups for r in g.rollouts})

    t = run(model, tmp_path, plugins={"hint": "test_uneven"}, **{**vllm, "max_steps": 1})
    assert [prompt[-3:] for prompt in t.vllm_generation.prompts] == [[90, 91, slot + 20] for slot in range(4)] * 2
    assert t.vllm_generation.calls == [(1.0, 6)] and lengths == {0: 3, 1: 4, 2: 5, 3: 6}
