"""MEDS: the penalty of habitual mistakes, the memory behind it, and the clusters."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.rewards._hdbscan import hdbscan
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

NAN = math.nan

CASE = {
    "rewards": [0.0, 1.0, 0.0, 0.0],
    "correct": [0, 1, 0, 0],
    "features": [[1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [-1.0, 0.0]],
    "memory": [[1.0, 0.0], [0.9, 0.1], [1.0, 0.2], [0.0, 1.0], [0.1, 0.9], [-1.0, 0.2], [-0.2, -1.0]],
    "labels": [0, 0, 0, 1, 1, -1, -1],
}


def run(changes=None, **parameters):
    return evaluate("reward", "meds", CASE | (changes or {}), parameters)


def test_without_a_coefficient_rewards_stay():
    assert run(alpha=0.0)["rewards"].tolist() == CASE["rewards"]


def test_the_penalty_grows_with_the_cluster_up_to_its_bound():
    sizes = [1, 2, 5, 6, 7, 40]
    found = []
    for n in sizes:
        out = run({"memory": [[1.0, 0.1 * i / n] for i in range(n)], "labels": [0] * n})
        found.append(float(out["penalty"][0]))
    assert found == pytest.approx([min(0.1 * math.log(n + 1), 0.2) for n in sizes]) and found[-1] == 0.2


def test_the_codes_form_bounds_the_logarithm_and_equals_the_texts_where_the_bounds_agree():
    many = {"memory": [[1.0, 0.01 * i] for i in range(20)], "labels": [0] * 20}
    assert run(many, cap_log=2.0)["penalty"][0] == pytest.approx(0.2)
    assert run(many, cap_log=1.5)["penalty"][0] == pytest.approx(0.15)
    torch.testing.assert_close(run(cap_log=2.0)["rewards"], run()["rewards"])


def test_the_number_of_neighbours_has_the_papers_name_and_the_librarys():
    assert run(neighbours=1)["label"].tolist() == run(k=1)["label"].tolist() == [0, -2, 1, -1]
    assert run(neighbours=7)["label"].tolist() == run(k=7)["label"].tolist() == [0, -2, 0, 0]


def test_noise_costs_nothing_unless_it_is_counted():
    assert run()["penalty"][3] == 0
    assert run(count_noise=True)["penalty"][3] == pytest.approx(0.1 * math.log(3))


def test_a_first_visit_costs_nothing():
    out = run({"memory": [], "labels": []})
    assert out["rewards"].tolist() == CASE["rewards"] and out["label"].tolist() == [-1, -2, -1, -1]


def test_ties_in_the_vote_go_to_the_smallest_label_and_in_similarity_to_the_older_entry():
    memory = [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]]
    assert run({"memory": memory, "labels": [7, 5, -1, 5]})["label"][0] == -1
    assert run({"memory": memory, "labels": [7, 7, 5, 5]})["label"][0] == 7
    assert run({"memory": memory[:2], "labels": [4, 3]})["label"][0] == 3, "a small memory is used whole"


def test_a_common_scale_of_the_features_changes_nothing():
    scaled = {k: (torch.tensor(CASE[k]) * 37).tolist() for k in ("features", "memory")}
    for name in ("rewards", "label", "penalty"):
        torch.testing.assert_close(run(scaled)[name], run()[name])


def test_correct_rows_may_be_the_target_and_then_share_their_reward():
    out = run({"features": [[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [-1.0, 0.0]]}, target="right")
    assert out["label"].tolist() == [-2, 0, -2, -2]
    assert out["rewards"].tolist() == pytest.approx([0, 1 / (1 + 0.1 * math.log(4)), 0, 0])


@pytest.mark.parametrize("unknown", [None, [NAN, 0.0]])
def test_a_row_without_a_feature_pays_nothing_and_is_not_remembered(unknown):
    out = run({"features": [unknown, [0.0, 1.0], [0.1, 1.0], [-1.0, 0.0]]})
    assert out["label"][0] == -2 and out["penalty"][0] == 0 and len(out["labels"]) == 7 + 2


def test_a_zero_feature_is_similar_to_nothing():
    assert run({"features": [[0.0, 0.0]] * 4})["label"].tolist() == [0, -2, 0, 0], "ties: the oldest entries"


def batch(rewards, features, keys):
    return reward_batch(rewards).with_columns(meds_features=[torch.tensor(f) for f in features], prompt_key=keys)


def test_the_memory_is_per_prompt_frozen_within_a_step_and_survives_a_restart():
    part = rlx.create("reward", "meds", features="column")
    near = [[1.0, 0.0], [1.0, 0.01], [0.0, 1.0], [0.01, 1.0]]
    first = part(batch([0.0] * 4, near, ["p"] * 4))
    assert not first["meds_penalty"].any() and part.stored["p"]["labels"] == [0, 0, 1, 1]
    resumed = rlx.create("reward", "meds", features="column")
    resumed.load_state_dict(part.state_dict())
    for p in (part, resumed):
        again = p(batch([0.0, NAN, 0.0], [[1.0, 0.005]] * 3, ["p", "p", "q"]))
        assert again["meds_penalty"].tolist() == pytest.approx([0.1 * math.log(3), 0, 0])
        assert torch.isnan(again["rewards"][1]) and again["meds_label"].tolist() == [0, -2, -1]
        assert len(p.stored["p"]["labels"]) == 5 and len(p.stored["q"]["labels"]) == 1


def test_the_order_of_rows_in_a_step_does_not_matter_and_the_memory_is_bounded():
    part = rlx.create("reward", "meds", features="column", memory=3)
    part(batch([0.0] * 4, [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]], ["p"] * 4))
    assert len(part.stored["p"]["labels"]) == 3
    torch.testing.assert_close(part.stored["p"]["features"][0], torch.tensor([1.0, 0.1]).double() / 1.01**0.5)


def test_features_come_from_the_hosts_hidden_states_and_wrong_answers_get_dearer():
    trainer = TableTrainer({"reward": "meds"}, host=TableHost(3), groups=3, group_size=8, max_tokens=8, total_steps=6)
    batches = []
    for _ in range(4):
        raw = trainer.rollouts(trainer.context())
        ready = rlx.prepare(trainer.parts, raw)
        batches.append((raw, ready.batch))
        trainer.update(ready)
        trainer.step += 1
    raw, ready = batches[-1]
    assert ready.meds_penalty[raw.rewards < 0.5].max() > 0 and not ready.meds_penalty[raw.rewards > 0.5].any()
    torch.testing.assert_close(ready.rewards, raw.rewards - ready.meds_penalty)


def test_a_users_own_features_need_no_hidden_states():
    host = rlx.HostProfile("any", frozenset({"logp_old", "meds_features"}))
    rlx.build({"reward": {"name": "meds", "features": "column"}}, host)
    with pytest.raises(rlx.ConfigError, match="forward:hidden"):
        rlx.build({"reward": "meds"}, host)


# ---- the clusters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_points_are_noise(n):
    assert hdbscan(torch.zeros(n, 3)) == [-1] * n


def test_far_groups_are_clusters_and_a_lone_point_is_noise():
    g = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]]).repeat_interleave(5, 0)
    points = torch.cat([centres + 0.1 * torch.randn(15, 2, generator=g), torch.tensor([[100.0, 100.0]])])
    labels = hdbscan(points, min_size=4)
    assert labels == [0] * 5 + [1] * 5 + [2] * 5 + [-1]
    order = torch.randperm(16, generator=g)
    moved = hdbscan(points[order], min_size=4)
    assert [[moved[i] == moved[j] for j in range(16)] for i in range(16)] == [
        [labels[order[i]] == labels[order[j]] for j in range(16)] for i in range(16)
    ]


def test_one_blob_is_no_cluster_and_equal_points_are_one():
    assert hdbscan(torch.arange(4.0)[:, None] ** 2, min_size=3) == [-1] * 4
    assert hdbscan(torch.tensor([[0.0], [0.0], [0.0], [5.0], [5.0]])) == [0, 0, 0, 1, 1]
