"""Trees of forks, and the credit on them: ARPO, ELPO, DATPO."""

import math
from dataclasses import dataclass

import pytest
import torch

from rlx_plugins import Allocator, Context, DataError, Group, RolloutBatch, Segment, create, pack, register
from rlx_plugins.advantages._tree import fork_tree
from rlx_plugins.core.registry import forget, implements
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.testing import evaluate


def finished(rollout, tokens, reward):
    """The rollout goes on with `tokens` of its own and ends."""
    if tokens:
        rollout.segments.append(Segment(list(tokens), "policy", [-1.0] * len(tokens), 0))
    rollout.finish("eos")
    rollout.reward = reward
    return rollout


def forked_group():
    """Slot 0: abcdef. Slot 1 forks it after 4 tokens, slot 2 forks slot 1 after 2 (which is within slot 0's), slot 3
    forks slot 1 after 6 tokens, its end; slot 4 stands alone."""
    group = Group("g", "p", [0], max_tokens=16)
    root, alone = group.start(2)
    finished(root, [10, 11, 12, 13, 14, 15], 1.0)
    finished(alone, [30, 31], 0.0)
    alone.slot = 4
    (first,) = group.fork(root, 4, 1)
    first.slot = 1
    finished(first, [20, 21], 0.0)
    (second,) = group.fork(first, 2, 1)
    second.slot = 2
    finished(second, [22], 1.0)
    (third,) = group.fork(first, 6, 1)
    third.slot = 3
    finished(third, [23], 0.0)
    return group


def test_forks_cut_rollouts_into_nodes_that_share_what_they_share():
    rows = sorted(forked_group().rollouts, key=lambda r: r.slot)
    tokens, paths = fork_tree(rows, [0] * 5)
    a, b, c = paths[0]
    d, e = paths[1][2:]
    assert tokens[0] == [a, a, b, b, c, c]
    assert paths[1] == [a, b, d, e] and tokens[1] == [a, a, b, b, d, d]  # e, its end after the fork, has no token
    assert paths[2][:1] == [a] and tokens[2] == [a, a, paths[2][1]]
    assert paths[3][:3] == [a, b, d] and tokens[3][:6] == tokens[1]
    assert len({n for p in paths for n in p}) == 8 and paths[4] == [paths[4][0]]


def test_a_fork_whose_origin_is_not_in_the_batch_still_shares_its_prefix():
    rows = [r for r in forked_group().rollouts if r.slot in (1, 2)]
    tokens, _ = fork_tree(rows, [0, 0])
    assert tokens[0][:2] == tokens[1][:2] and tokens[0][2] != tokens[1][2]


def test_a_fork_at_the_place_where_its_origin_was_forked_is_the_origins_sibling():
    group = Group("g", "p", [0], max_tokens=16)
    (root,) = group.start(1)
    finished(root, [1, 2, 3, 4], 1.0)
    (first,) = group.fork(root, 2, 1)
    finished(first, [5], 0.0)
    (second,) = group.fork(first, 2, 1)
    finished(second, [6], 0.0)
    _, paths = fork_tree(group.rollouts, [0] * 3)
    assert [len(p) for p in paths] == [2, 2, 2] and len({p[0] for p in paths}) == 1
    assert len({p[1] for p in paths}) == 3


def test_a_prompt_twice_in_the_batch_has_two_trees():
    rows = [*forked_group().rollouts, *forked_group().rollouts]
    _, paths = fork_tree(rows, [0] * 5 + [1] * 5)
    assert not {n for p in paths[:5] for n in p} & {n for p in paths[5:] for n in p}


def packed():
    return pack([forked_group()], dtype=torch.float64)


def z_scores(batch):
    return create("advantage", "grpo")(batch.with_columns(response_mask=torch.ones(5, 1).bool()))["advantages"][:, 0]


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_arpo_gives_a_prefix_that_is_trained_once_the_sum_of_its_rollouts(mode):
    batch = packed()
    out = create("advantage", "arpo", mode=mode)(batch)
    z = z_scores(batch)
    torch.testing.assert_close(out["trajectory_advantage"], z)
    want = torch.stack([z[:4].sum(), z[:4].sum(), z[[0, 1, 3]].sum(), z[[0, 1, 3]].sum(), z[0], z[0]])
    torch.testing.assert_close(out["advantages"][0, :6], want)
    torch.testing.assert_close(out["advantages"][1, 4:6], z[[1, 3]].sum().expand(2))
    assert not out["advantages"][1:4, :2].any(), "the copies of the prefix are not trained"
    assert out["share_count"][0, :6].tolist() == [4, 4, 3, 3, 1, 1]


def test_arpo_sums_to_the_same_over_the_copies_of_a_node_in_both_modes():
    nodes = [[1, 1, 2, -1], [1, 1, 3, 4], [1, 1, 3, 5], [7, 8, 8, -1], [1, 2, -1, -1]]
    inputs = {"rewards": [1.0, 0.3, 0.2, 0.9, 0.4], "group": [0, 0, 0, 0, 5], "node_ids": nodes}
    hard, soft = (evaluate("advantage", "arpo", inputs, {"mode": mode})["advantages"] for mode in ("hard", "soft"))
    ids = torch.tensor(nodes)
    for node in (1, 2, 3, 4, 5, 7, 8):
        copies = (ids == node) & (torch.arange(5) < 4)[:, None]
        torch.testing.assert_close(hard[copies].sum(), soft[copies].sum())
    assert hard.abs().max() <= soft.abs().max() and not torch.equal(hard, soft)


def test_arpo_without_sharing_is_grpo_and_renaming_nodes_changes_nothing():
    inputs = {"rewards": [1.0, 0.3, 0.2], "group": [0, 0, 0]}
    grpo = evaluate("advantage", "grpo", inputs)["advantages"]
    apart = evaluate("advantage", "arpo", {**inputs, "node_ids": [[1], [2], [3]]})
    torch.testing.assert_close(apart["advantages"][:, 0], grpo)
    shared, renamed = (
        evaluate("advantage", "arpo", {**inputs, "node_ids": [[a, b], [a, c], [d, d]]})["advantages"]
        for a, b, c, d in ((0, 1, 2, 3), (10**12, 4, 77, 5))
    )
    assert torch.equal(shared, renamed)


def test_arpo_a_node_of_the_whole_group_gets_nothing_and_an_unscorable_row_is_in_no_node():
    inputs = {"rewards": [1.0, None, 0.0, 0.4], "group": [0] * 4, "node_ids": [[0, 1], [0, 2], [0, 3], [0, 1]]}
    out = evaluate("advantage", "arpo", inputs)
    assert out["advantages"][:, 0].tolist() == pytest.approx([0] * 4, abs=1e-12)
    assert out["advantages"][1].tolist() == [0, 0] and out["share_count"][:, 0].tolist() == [3, 3, 3, 3]


def test_arpo_a_group_of_one_is_zero_in_the_library_and_raw_in_verl():
    batch = RolloutBatch(
        {
            "rewards": torch.tensor([0.5]),
            "group": torch.tensor([3]),
            "response_mask": torch.ones(1, 2).bool(),
            "node_ids": [[0, 1]],
        }
    )
    assert create("advantage", "arpo", tree="column")(batch)["advantages"].tolist() == [[0, 0]]
    raw = create("advantage", "arpo", tree="column", singleton="raw", normalize=False)(batch)["advantages"]
    assert raw.tolist() == [[0.5, 0.5]]


# ---- ELPO ----------------------------------------------------------------------------------------------------------

TREE = {"node_parent": [-1, 0, 0, 2, 2, -1], "leaf": [1, 3, 4, 5], "node_ids": [[0, 1], [2, 3], [2, 4], [5, 5]]}


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_elpo_on_a_flat_tree_is_grpo(lam):
    rewards = [1.0, 0.0, 0.5, 0.0]
    inputs = {"node_parent": [-1] * 4, "leaf": [0, 1, 2, 3], "rewards": rewards, "node_ids": [[0], [1], [2], [3]]}
    got = evaluate("advantage", "elpo", inputs, {"lam": lam})
    grpo = evaluate("advantage", "grpo", {"rewards": rewards, "group": [0] * 4})["advantages"]
    torch.testing.assert_close(got["advantages"][:, 0], grpo)


def test_elpo_siblings_sum_to_zero_and_a_node_is_the_leaf_weighted_mean_of_its_children():
    got = evaluate("advantage", "elpo", {**TREE, "rewards": [0.2, 1.0, 0.4, 0.7]})
    branch, trajectory = got["branch"], got["trajectory"]
    for siblings in ([0, 5], [1, 2], [3, 4]):
        assert float(branch[siblings].sum()) == pytest.approx(0, abs=1e-9)
    assert float(trajectory[2]) == pytest.approx(float(trajectory[3] + trajectory[4]) / 2)
    assert float(trajectory[0]) == pytest.approx(float(trajectory[1] + 2 * trajectory[2]) / 3)
    assert float(3 * trajectory[0] + trajectory[5]) == pytest.approx(0, abs=1e-9)


def test_elpo_nodes_are_means_of_children_not_of_leaves_and_skip_unscorable_ones():
    got = evaluate("advantage", "elpo", {**TREE, "rewards": [0.0, 1.0, None, 0.5]})
    assert got["node_reward"].tolist()[:4] == [0.5, 0.0, 1.0, 1.0] and math.isnan(got["node_reward"][4])
    assert got["node_advantages"][4] == 0 and got["advantages"][2].tolist() == [0, 0]
    assert got["branch"][3] == 0, "its only sibling has no reward"


def test_elpo_equal_rewards_and_a_single_rollout_give_nothing():
    assert not evaluate("advantage", "elpo", {**TREE, "rewards": [0.1] * 4})["advantages"].any()
    single = {"node_parent": [-1, 0], "leaf": [1], "rewards": [1.0], "node_ids": [[0, 1]]}
    assert not evaluate("advantage", "elpo", single)["advantages"].any()


def test_elpo_renumbering_nodes_changes_nothing():
    renamed = {"node_parent": [3, 3, -1, -1, 1, 1], "leaf": [0, 4, 5, 2], "node_ids": [[3, 0], [1, 4], [1, 5], [2, 2]]}
    got, want = (
        evaluate("advantage", "elpo", {**tree, "rewards": [0.2, 1.0, 0.4, 0.7]})["advantages"]
        for tree in (renamed, TREE)
    )
    torch.testing.assert_close(got, want)


def test_elpo_on_forks_is_elpo_on_the_tree_they_make():
    batch = packed()
    got = create("advantage", "elpo")(batch)["advantages"]
    tree = {
        "node_parent": [-1, 0, 1, 1, 3, 0, 3, -1],
        "leaf": [2, 4, 5, 6, 7],
        "rewards": [1.0, 0.0, 1.0, 0.0, 0.0],
        "node_ids": [[0, 0, 1, 1, 2, 2, -1], [0, 0, 1, 1, 3, 3, -1], [0, 0, 5, -1, -1, -1, -1]]
        + [[0, 0, 1, 1, 3, 3, 6], [7, 7, -1, -1, -1, -1, -1]],
    }
    want = evaluate("advantage", "elpo", tree)["advantages"]
    torch.testing.assert_close(got, torch.where(batch.response_mask, want, 0.0))
    assert got[0, :6].all()


def test_a_tree_whose_rows_disagree_about_a_parent_is_refused():
    batch = packed().with_columns(node_ids=[[0]] * 5, node_path=[[0, 1], [2, 1], [0], [0], [0]])
    with pytest.raises(DataError, match="different predecessors"):
        create("advantage", "elpo", tree="column")(batch)


# ---- DATPO ---------------------------------------------------------------------------------------------------------

FORKED = {
    "block_start": [-1, 0, 0, 1, 1, -1],
    "block_end": [0, 1, -1, -1, -1, -1],
    "block_reward": [None, None, 1.0, 0.0, 1.0, 0.5],
    "block_embedding": [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]],
}


def test_datpo_values_telescope_along_a_path_and_balance_at_a_fork():
    base = evaluate("advantage", "datpo", FORKED)["base"]
    root = (1 + 0 + 1 + 0.5) / 4
    for leaf, path in ((2, [0, 2]), (3, [0, 1, 3]), (4, [0, 1, 4]), (5, [5])):
        assert float(base[path].sum()) == pytest.approx(FORKED["block_reward"][leaf] - root)
    assert float(2 * base[1] + base[2]) == pytest.approx(0)
    assert float(base[3] + base[4]) == pytest.approx(0)


def test_datpo_rewards_unlike_blocks_only_where_the_value_rises():
    out = evaluate("advantage", "datpo", FORKED, {"alpha0": 0.4, "alpha_end": 0.4})
    assert out["diversity"].tolist() == pytest.approx([0, 1, 1, 1, 1, 0])  # orthogonal, or a zero vector: cosine 0
    bonus = torch.where(out["base"] > 0, 0.4 * out["diversity"], 0.0)
    torch.testing.assert_close(out["block_advantages"], out["base"] + bonus)
    assert out["block_advantages"][4] > out["base"][4] and out["block_advantages"][3] == out["base"][3]
    plain = evaluate("advantage", "datpo", FORKED, {"alpha0": 0.0})
    assert torch.equal(plain["block_advantages"], plain["base"])


@pytest.mark.parametrize("reward", [0.1, 1 / 3])
def test_datpo_equal_rewards_give_no_bonus_by_rounding(reward):
    equal = {**FORKED, "block_reward": [None, None, *[reward] * 4]}
    assert not evaluate("advantage", "datpo", equal)["block_advantages"].any()
    below = {**FORKED, "block_reward": [None, None, *[reward] * 3, 0.9]}
    assert not evaluate("advantage", "datpo", below)["block_advantages"][1:5].any()


def test_datpo_an_unscorable_leaf_enters_no_value():
    out = evaluate("advantage", "datpo", {**FORKED, "block_reward": [None, None, 1.0, None, 1.0, 0.5]})
    assert out["base"].tolist() == pytest.approx([1 - 2.5 / 3, 0, 0, 0, 0, 0.5 - 2.5 / 3])


@pytest.mark.parametrize(
    ("step", "total", "alpha"), [(0, 100, 0.2), (50, 100, 0.1), (100, 100, 0.0), (300, 100, 0.0), (3, 0, 0.0)]
)
def test_datpo_the_bonus_is_annealed_over_the_run(step, total, alpha):
    assert evaluate("advantage", "datpo", FORKED, {"step": step, "total_steps": total})["alpha"] == pytest.approx(alpha)


def test_datpo_trains_every_block_once():
    ids = [[0, 0, 1, 3], [0, 0, 1, 4], [0, 0, 2, 2], [5, 5, -1, -1]]
    out = evaluate("advantage", "datpo", {**FORKED, "block_ids": ids})
    assert out["keep_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 0, 0]]
    columns = {"keep_mask": out["keep_mask"], "rewards": torch.zeros(4).double(), "group": torch.zeros(4).long()}
    mask = torch.tensor(ids) >= 0
    reduced = create("aggregate", "datpo")(RolloutBatch({**columns, "response_mask": mask}), mask)
    assert torch.equal(reduced["weight"], out["keep_mask"]) and reduced["count"].tolist() == [4, 1, 2, 2]


def test_datpo_without_a_fork_is_the_distance_from_the_mean():
    flat = {
        "block_start": [-1] * 3,
        "block_end": [-1] * 3,
        "block_reward": [1.0, 0.0, 0.5],
        "block_embedding": [[1.0], [-1.0], [0.3]],
    }
    assert evaluate("advantage", "datpo", flat)["block_advantages"].tolist() == pytest.approx([0.5, -0.5, 0])


def test_datpo_needs_a_vector_for_every_block():
    batch = packed().with_columns(node_ids=[[0]] * 5, node_path=[[0]] * 5, block_embedding=[[[1.0]]] * 4 + [[]])
    with pytest.raises(DataError, match="4 vectors for the 5 blocks"):
        create("advantage", "datpo", tree="column")(batch)


# ---- on the table host ---------------------------------------------------------------------------------------------


@dataclass
class Forking(Allocator):
    """Two rollouts per prompt, then two forks of each where they have run for half their length."""

    capabilities = frozenset({"rounds", "continue"})

    def more(self, idle, ctx):
        new = [r for g in idle if not g.rollouts for r in g.start(2)]
        for g in idle:
            if len(g.rollouts) == 2 and not new:
                new += [f for r in list(g.rollouts) for f in g.fork(r, len(r) // 2, 2)]
        return new


@pytest.fixture
def forking():
    register("allocator", "forking_in_tests")(Forking)
    yield "forking_in_tests"
    forget("allocator", "forking_in_tests")


@pytest.mark.parametrize("config", [{"advantage": "arpo"}, {"method": "elpo"}, {"method": "datpo"}], ids=str)
def test_credit_on_a_tree_reaches_the_update_of_a_run_that_forks(config, forking):
    host = TableHost(12, fields={"critical_turn": lambda r: 0.0})
    trainer = TableTrainer({**config, "allocator": forking}, host=host, groups=4, max_tokens=10)
    batch = trainer.rollouts(trainer.context())
    assert any(r.tag.startswith("fork:") and len(r) for r in batch.rollout)
    out = trainer.parts.one("advantage")(batch)
    first = batch.rows(batch.group == 0)
    prefix = [r for r in first.rollout if r.tag == ""]
    assert out["advantages"].any() and not out["advantages"][~batch.response_mask].any()
    if "keep_mask" in out:
        assert torch.equal(out["keep_mask"] > 0, batch.response_mask), "a prefix is trained in one row only"
    else:
        rows = [out["advantages"][i, : len(r)] for i, r in enumerate(first.rollout) if r in prefix]
        assert any(len(set(row[row != 0].tolist())) > 1 for row in rows), "a node's credit differs from the next one's"
    assert all(math.isfinite(entry["loss"]) for entry in trainer.run(2))


def test_datpo_embeds_each_block_once_from_the_prompt_and_its_own_tokens():
    group = forked_group()
    part = create("advantage", "datpo")
    steps = part.annotate([group], Context(0, 1, 1, 1, 16, {}))
    operation = next(steps)
    asked = [r.tokens for r in operation.rollouts]
    with pytest.raises(StopIteration):
        steps.send([[float(len(tokens)), 1.0] for tokens in asked])
    assert sorted(asked) == sorted([[10, 11], [12, 13], [14, 15], [20, 21], [22], [23], [30, 31], []])
    rows = {r.slot: r.extras for r in group.rollouts}
    assert rows[0]["block_embedding"] == [[2.0, 1.0]] * 3 and rows[2]["block_embedding"] == [[2.0, 1.0], [1.0, 1.0]]
    assert not create("advantage", "datpo", tree="column").capabilities and part.capabilities == {"forward:hidden"}


def test_trees_given_as_columns_need_no_hook_of_the_rollout():
    for name in ("arpo", "elpo", "datpo"):
        given = create("advantage", name, tree="column")
        assert not implements(given, "annotate") and "rollout" not in given.requires
