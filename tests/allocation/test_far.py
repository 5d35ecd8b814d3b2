"""Factorized adaptive rollout: waves without stragglers, rescue, expansion, and the rows that are trained."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hosts.table import PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

PROMPT = st.tuples(
    st.lists(st.sampled_from([0, 0, 1]), min_size=8, max_size=8), st.lists(st.integers(1, 9), min_size=8, max_size=8)
)


def far(prompts, target, **params):
    inputs = {"reward_table": [r for r, _ in prompts], "finish_time": [t for _, t in prompts], "target_groups": target}
    return evaluate("allocator", "far", inputs, params)


@settings(max_examples=80, deadline=None)
@given(st.lists(PROMPT, min_size=1, max_size=6), st.integers(1, 3), st.sampled_from([0.5, 0.8, 1.0]), st.integers(2, 6))
def test_rescue_expansion_and_the_trained_rows_keep_their_bounds(prompts, target, share, size):
    out = far(prompts, target, complete_frac=share, train_size=size)
    assert out["prompts_used"] == len(out["groups"]) <= len(prompts)
    for key, (issued, finished) in out["groups"].items():
        rewards = prompts[int(key)][0]
        won = [i for i in finished if rewards[i]]
        assert 4 <= issued <= 8
        if any(i < 4 for i in won):
            assert issued == 4
        assert (int(key) in out["informative"]) == (0 < len(won) < len(finished))
    assert len(out["train"]) == min(target, len(out["informative"]))
    for key, chosen in out["train"].items():
        rewards = [prompts[int(key)][0][i] for i in chosen]
        assert 2 <= len(chosen) <= size and 0 < sum(rewards) < len(rewards) and chosen == sorted(chosen)
    if share == 1:
        assert out["late"] == []
    if len(out["informative"]) < target:
        assert out["prompts_used"] == len(prompts)


def test_a_wave_of_few_waits_for_all_and_a_share_counts_the_whole_wave():
    times = [1, 2, 3, 4, 5, 6, 7, 8]
    prompts = [([0, 1] * 4, times), ([1, 0] * 4, times)]
    assert far(prompts, 2)["late"] == []
    out = far(prompts, 2, complete_frac=0.5)
    assert out["late"] == [[0, 2], [0, 3], [1, 2], [1, 3]]
    assert out["waves"] == [{"issued": 8, "finished": 4, "time": 2}] and out["clock"] == 2


def test_a_prompt_whose_rollouts_are_all_late_is_closed():
    both = far([([0, 1] * 4, [1] * 8), ([0] * 8, [9] * 8)], 2, complete_frac=0.5)
    assert both["groups"]["1"] == [4, []] and both["informative"] == [0]


def test_prompts_are_added_per_missing_group_up_to_the_bound():
    prompts = [([0] * 8, [1] * 8)] * 9 + [([0, 1] * 4, [1] * 8)]
    assert far(prompts, 1, expand=2)["prompts_used"] == 10  # 1, then 2 at a time; the last draw finds one left
    out = far(prompts, 1, max_prompts=4)
    assert (out["prompts_used"], out["informative"], out["train"]) == (4, [], {})


def test_the_rows_trained_are_the_earliest_of_each_class():
    rewards, times = [0, 1, 0, 1, 0, 0, 0, 0], [5, 4, 1, 3, 1, 1, 1, 1]
    assert far([(rewards, times)], 1, train_size=2)["train"] == {"0": [2, 3]}
    assert far([(rewards, times)], 1, train_size=3)["train"] == {"0": [0, 2, 3]}
    assert far([([1, 1, 1, 0] * 2, [1] * 8)], 1, train_size=4)["train"] == {"0": [0, 1, 2, 3]}


def test_in_a_run_the_batch_has_mixed_groups_only_and_late_rows_are_lost():
    config = {"allocator": {"name": "far", "finish_share": 0.75}}
    trainer = TableTrainer(config, host=TableHost(24), groups=4, max_tokens=16)
    ctx = trainer.context()
    batch = trainer.rollouts(ctx)
    assert len(batch.groups.ids) == 4 <= len(ctx.started)
    assert bool((batch.groups.max(batch.rewards) > batch.groups.min(batch.rewards)).all())
    lost = [r for g in ctx.started for r in g.rollouts if r.state == "pruned"]
    assert len(lost) == ctx.metrics["allocator/far_late"] > 0 and all(r.reward is None for r in lost)
    trainer.run(2)


def test_stragglers_need_a_host_that_can_stop_them():
    host = rlx.HostProfile("any", PROFILE.signals, PROFILE.capabilities - {"abort"})
    with pytest.raises(rlx.ConfigError, match="allocator far.*'abort'"):
        rlx.build({"allocator": "far"}, host)
    rlx.build({"allocator": {"name": "far", "finish_share": 1.0}}, host)
    for params, name in (({"first_wave": 9}, "first_wave"), ({"expand": 0}, "expand")):
        with pytest.raises(rlx.ConfigError, match=f"far.{name}"):
            rlx.create("allocator", "far", **params)
