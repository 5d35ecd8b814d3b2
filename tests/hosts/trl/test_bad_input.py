"""What goes wrong while training: an error that says where, before any weight has changed."""

from __future__ import annotations

import math

import pytest
import torch
from trl_tiny import digits, trainer, weights

import rlx_plugins as rlx


def _failure(model, tmp_path, error, **changes):
    t = trainer(model, tmp_path, **{"plugins": {"advantage": "grpo"}, **changes})
    before = weights(t)
    with pytest.raises(error) as raised:
        t.train()
    assert all(torch.equal(w, before[name]) for name, w in weights(t).items())
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
    return str(raised.value)


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_names_the_prompt(model, tmp_path, reward):
    def function(completions, target, **columns):
        return [reward if t == target[-1] else 0.0 for t in target]

    message = _failure(model, tmp_path, rlx.DataError, reward_funcs=[digits, function])
    assert "infinite" in message and "prompt '" in message


def test_a_batch_without_any_scorable_row_is_refused(model, tmp_path):
    def function(completions, **columns):
        return [None] * len(completions)

    message = _failure(model, tmp_path, rlx.DataError, reward_funcs=function)
    assert "none of the 8 rollouts" in message


@pytest.mark.parametrize("plugins", [{"advantage": "grpo"}, {"sampler": "in_order"}], ids=["update", "program"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_reward_function_that_raises_is_named(model, tmp_path, plugins, asynchronous):
    def broken(completions, **columns):
        raise KeyError("answer")

    async def broken_async(completions, **columns):
        raise KeyError("answer")

    function = broken_async if asynchronous else broken
    message = _failure(model, tmp_path, rlx.DataError, plugins=plugins, reward_funcs=[digits, function])
    assert message == f"reward function '{function.__name__}' raised KeyError: 'answer'"


@pytest.mark.parametrize("returned", [None, 1.0, ["1"] * 8, [[0.5]] * 8], ids=["None", "number", "text", "lists"])
def test_a_reward_function_that_returns_no_numbers_is_named(model, tmp_path, returned):
    def rewards(completions, **columns):
        return returned

    message = _failure(model, tmp_path, rlx.DataError, reward_funcs=[digits, rewards])
    assert message.startswith("reward function 'rewards' returned ")
    assert "it returns a list with a number for every completion" in message


def test_a_reward_function_that_returns_another_number_of_rewards_is_named(model, tmp_path):
    def rewards(completions, **columns):
        return [0.5] * (len(completions) - 1)

    message = _failure(model, tmp_path, rlx.DataError, reward_funcs=[digits, rewards])
    assert message == "reward function 'rewards' returned 7 rewards for 8 completions"


def test_nan_log_probs_stop_the_run_before_the_update(model, tmp_path):
    t = trainer(model, tmp_path, plugins={"advantage": "grpo"}, beta=0.1)
    before = weights(t)

    def diverge(module, args, out):
        if torch.is_grad_enabled():
            out.last_hidden_state = out.last_hidden_state * math.nan

    t.model.model.register_forward_hook(diverge)
    with pytest.raises(rlx.DataError, match="logp_new is NaN on a model token in step 0, first for prompt '"):
        t.train()
    assert all(torch.equal(w, before[name]) for name, w in weights(t).items())


def test_an_empty_completion_is_trained_by_nobody(model, tmp_path, registered):
    seen = []

    @registered("advantage", "test_seeing")
    class Seeing(rlx.Advantage):
        def __call__(self, batch):
            seen.append(batch)
            return {"advantages": batch.spread(batch.rewards)}

    t = trainer(model, tmp_path, plugins={"advantage": "test_seeing"}, max_steps=1, reward_funcs=digits)
    generate = type(t).__mro__[1]._generate_single_turn

    def with_an_empty_row(self, *args, **kwargs):
        ids, logps = generate(self, *args, **kwargs)
        return [[], *ids[1:]], logps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(t).__mro__[1], "_generate_single_turn", with_an_empty_row)
        t.train()
    (batch,) = seen
    assert batch.response_mask.any(1).tolist() == [False] + [True] * 7
    assert batch.rewards[0] == 0.0


def test_a_failing_hook_is_reported_with_its_own_error(model, tmp_path, registered):
    @registered("allocator", "test_failing")
    class Failing(rlx.Allocator):
        def more(self, idle, ctx):
            raise ZeroDivisionError("no group")

    assert _failure(model, tmp_path, ZeroDivisionError, plugins={"allocator": "test_failing"}) == "no group"
