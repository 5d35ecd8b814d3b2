"""Real methods on signals of the user's side: an agent's information gain from a rollout_func, values from a model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForTokenClassification
from trl_tiny import logs, run

import rlx_plugins as rlx
from rlx_plugins.hosts.trl.generation import sampling

TOOL = [30, 31, 32]

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


def agent(prompts, trainer):
    """Two turns of the policy with a tool's answer between them, and what the first turn told about the answer."""
    ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    with sampling(trainer, trainer.temperature, 4):
        first, _ = trainer._generate_single_turn(ids, None, {}, 1)
        seen = [p + t + TOOL for p, t in zip(ids, first)]
        second, _ = trainer._generate_single_turn(seen, None, {}, 1)
    responses = [a + TOOL + b for a, b in zip(first, second)]
    masks = [[1] * len(a) + [0] * len(TOOL) + [1] * len(b) for a, b in zip(first, second)]
    return {
        "prompt_ids": ids,
        "completion_ids": responses,
        "env_mask": masks,
        "logprobs": [[-4.0] * len(r) for r in responses],
        "info_gain": [[gain(a)] for a in first],
    }


def gain(turn):
    """A gain that every turn has another of."""
    return 0.1 * (sum(turn) % 7)


@pytest.fixture
def looking():
    """A selector that keeps all tokens; the batches it is shown."""
    from dataclasses import dataclass

    from rlx_plugins.core.registry import forget

    seen = []

    @rlx.register("selector", "test_looking")
    @dataclass
    class Looking(rlx.Selector):
        def __call__(self, batch):
            seen.append(batch)
            return {"weight": torch.ones_like(batch.advantages)}

    yield seen
    forget("selector", "test_looking")


def test_a2tgpo_credits_the_turns_of_an_agent_by_the_gain_its_rollout_func_returns(model, tmp_path, looking):
    settings = {"rollout_func": agent, "rollout_signals": ["info_gain"], "max_steps": 3, "num_iterations": 2}
    method = {"method": {"name": "a2tgpo", "gain_coef": 0.5}, "selector": "test_looking"}
    t = run(model, tmp_path, plugins=method, **settings)
    assert min(row["grad_norm"] for row in logs(t)[:2]) > 0 and t.parts.one("clip").name == "a2tgpo"
    for batch in looking:
        first = torch.where(batch.turn_ids == 0, batch.response_ids, 0).sum(1)
        gains = torch.tensor([row[0] for row in batch.info_gain])
        torch.testing.assert_close(gains, 0.1 * (first % 7))
        groups = batch.groups
        normalised = (gains - groups.spread(groups.mean(gains))) / (groups.spread(groups.std(gains, ddof=0)) + 1e-6)
        here = batch.turn_ids == 0
        expected = normalised[:, None].expand_as(here)[here]
        torch.testing.assert_close(batch.norm_ig[here], expected, atol=1e-4, rtol=1e-4)
        assert (batch.norm_ig[batch.turn_ids == 1] == 0).all() and batch.advantages[here].abs().sum() > 0


def test_sao_takes_the_values_of_a_frozen_model_as_its_baseline(model, tmp_path, looking):
    torch.manual_seed(0)
    values = AutoModelForTokenClassification.from_pretrained(model, num_labels=1).eval()
    values.save_pretrained(tmp_path / "values")
    t = run(
        model,
        tmp_path / "run",
        plugins={"method": "sao", "advantage": {"name": "sao", "actor_lambda": 1.0}, "selector": "test_looking"},
        rollout_func=agent,
        value_model=str(tmp_path / "values"),
        max_steps=2,
        num_iterations=2,
    )
    (batch,) = looking
    assert min(row["grad_norm"] for row in logs(t)) > 0 and t.value_model.model.device.type == "cpu"
    for i, key in enumerate(batch.prompt_key):
        prompt = t.processing_class(t.train_dataset[int(key)]["prompt"])["input_ids"]
        tokens = batch.response_ids[i, : int(batch.response_mask[i].nonzero().max()) + 1].tolist()
        with torch.no_grad():
            told = values(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1, 0]
        here = batch.response_mask[i, : len(tokens)]
        expected = (batch.rewards[i] - told)[here]  # lambda and discount 1: the reward minus the value
        torch.testing.assert_close(batch.advantages[i, : len(tokens)][here].float(), expected, atol=1e-5, rtol=1e-4)
