"""The averaged policy behind logp_prox: its weights, when it starts anew, and what a checkpoint keeps of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from trl_tiny import logs, run, trainer, weights

import rlx_plugins as rlx
from rlx_plugins.hosts.trl.averaged import FILE

WEIGHT = "model.layers.0.mlp.up_proj.weight"
SAVING = {"save_strategy": "steps", "save_steps": 1}


def answers(prompts, trainer):
    """A rollout_func whose engine is sure of other tokens than the policy: few are inside PPO-EWMA's band."""
    ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    tokens = [[20 + (i * j) % 60 for j in range(1, 4 + i % 4)] for i in range(len(prompts))]
    return {
        "prompt_ids": ids,
        "completion_ids": tokens,
        "logprobs": [[-4.5 + i % 3] * len(t) for i, t in enumerate(tokens)],
    }


@pytest.fixture
def reads_prox(registered):
    """An advantage that reads logp_prox; mean |logp_prox - logp_old| of every step."""
    gaps = []

    @registered("advantage", "test_prox")
    class Prox(rlx.Advantage):
        requires = frozenset({"logp_prox", "logp_old"})

        def __call__(self, batch):
            gaps.append(float((batch.logp_prox - batch.logp_old)[batch.response_mask].abs().mean()))
            return {"advantages": batch.spread(batch.rewards)}

    return gaps


def test_it_is_the_bias_corrected_average_of_all_weights_so_far_and_is_resumed(model, tmp_path, reads_prox):
    settings = {"plugins": {"advantage": "test_prox"}, "prox_decay": 0.75, "optim": "sgd", "learning_rate": 0.5}
    settings |= {**SAVING, "max_steps": 3}
    t = trainer(model, tmp_path, **settings)
    seen = [weights(t)[WEIGHT]]
    t.train()
    assert reads_prox[0] == pytest.approx(0.0, abs=1e-6) and reads_prox[1] > 1e-4
    seen += [load_file(tmp_path / f"checkpoint-{n}" / "model.safetensors")[WEIGHT] for n in (1, 2, 3)]
    saved = torch.load(tmp_path / "checkpoint-3" / FILE, weights_only=True)
    expected = sum(0.75 ** (3 - k) * w for k, w in enumerate(seen)) / sum(0.75**k for k in range(4))
    torch.testing.assert_close(saved["mean"][WEIGHT], expected)
    assert saved["z"] == pytest.approx(sum(0.75**k for k in range(4)))
    again = trainer(model, tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    torch.testing.assert_close(again.averaged.mean[WEIGHT], t.averaged.mean[WEIGHT], atol=0, rtol=0)
    assert again.averaged.average.z == t.averaged.average.z


@pytest.mark.parametrize(("min_active", "resets"), [(0.0, False), (1.0, True)])
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_ppo_ewma_starts_it_anew_where_too_few_tokens_are_active(model, tmp_path, min_active, resets):
    t = run(
        model,
        tmp_path,
        plugins={"method": {"name": "ppo_ewma", "min_active": min_active}},
        rollout_func=answers,
        prox_decay=0.75,
        num_iterations=2,
        max_steps=4,
        **(SAVING | {"save_steps": 2}),
    )
    shares = [
        r["rlx/correction/ppo_ewma/active_fraction"] for r in logs(t) if "rlx/correction/ppo_ewma/active_fraction" in r
    ]
    assert 0 < min(shares) < 1
    assert t.averaged.average.z == pytest.approx(1.0 if resets else sum(0.75**k for k in range(5)))
    same = torch.equal(t.averaged.mean[WEIGHT], weights(t)[WEIGHT])
    assert same == resets
    halfway = torch.load(tmp_path / "checkpoint-2" / FILE, weights_only=True)
    assert (halfway["z"] == 1.0) == resets  # anew after the second of a batch's two updates, before it is saved


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_a_run_with_resets_resumed_is_the_run(model, tmp_path):
    settings = {"plugins": {"method": "ppo_ewma"}, "rollout_func": answers, "prox_decay": 0.9, "max_steps": 4, **SAVING}
    whole = run(model, tmp_path, **settings)
    again = trainer(model, tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logs(again) == logs(whole)
    for name, weight in weights(whole).items():
        assert torch.equal(weights(again)[name], weight)
        assert torch.equal(again.averaged.mean[name], whole.averaged.mean[name])


def test_without_an_average_ppo_ewma_is_refused_with_the_option(model, tmp_path):
    with pytest.raises(rlx.ConfigError, match="correction ppo_ewma needs the signal 'logp_prox': set prox_decay"):
        trainer(model, tmp_path, plugins={"method": "ppo_ewma"}, rollout_func=answers)
