"""RLER's votes: label, disagreement, hard and soft rewards, and which rows are kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.hosts.table.facts import FACTS
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

ANSWER = st.sampled_from(["1", "10", "2", None])
MEMBER = st.lists(ANSWER, max_size=6)


def run(answers, by_model=None, **parameters):
    return evaluate("reward", "rler", {"answers": answers, "answers_by_model": by_model or [answers]}, parameters)


def test_a_parameter_has_the_papers_name_and_the_librarys():
    votes = ["1", "1", "2", "10"], [["1", "1", "2", "10"], ["1", "10"]]
    for share, selected in ((0.0, [2, 3]), (1.0, [0, 1])):
        assert run(*votes, n_select=2, conf_share=share)["selected"] == selected
        assert run(*votes, n_select=2, confident_share=share)["selected"] == selected


@settings(max_examples=60, deadline=None)
@given(MEMBER, st.lists(MEMBER, max_size=3))
def test_rewards_are_bounded_largest_for_the_label_and_the_same_for_any_order_of_members(answers, peers):
    members = [answers, *peers]
    out = run(answers, members)
    assert all(0 <= r <= 1 + 1e-12 for r in out["rewards"]) and 0 <= out["disagreement"] <= 1
    assert all(r == 0 for r, a in zip(out["rewards"], answers, strict=True) if a is None)
    at_label = [r for r, a in zip(out["rewards"], answers, strict=True) if a == out["pseudo_label"] is not None]
    assert all(r <= max(at_label) + 1e-12 for r in out["rewards"]) if at_label else True
    turned = evaluate(
        "reward",
        "rler",
        {"answers": answers, "answers_by_model": members[::-1], "self_model": len(members) - 1},
    )
    assert turned["rewards"] == pytest.approx(out["rewards"]) and turned["selected"] == out["selected"]


def test_one_member_and_the_hard_mode_is_majority_voting_with_ties_to_the_smallest_string():
    assert run(["7", "12", "7", None], mode="hard")["rewards"] == [1, 0, 1, 0]
    assert run(["7", "12"], mode="hard")["pseudo_label"] == "12"


def test_agreeing_members_make_it_hard_and_disjoint_ones_purely_soft():
    agreeing = run(["1", "1", "2", "1"], [["1", "1", "2", "1"]] * 2)
    assert agreeing["disagreement"] == 0 and agreeing["lam"] == 0.75
    disjoint = run(["1", "1"], [["1", "1"], ["2", "2"]])
    assert disjoint["disagreement"] == 1 and disjoint["lam"] == 0 and disjoint["rewards"] == [0.5, 0.5]
    assert run(["1"] * 3)["rewards"] == [1, 1, 1]


@pytest.mark.parametrize(("mode", "lam", "want"), [("soft", None, 0.25), (0.5, None, 0.125), ("adaptive", 0.2, 0.2)])
def test_the_hardness_may_be_fixed(mode, lam, want):
    assert run(["1", "1", "1", "2"], mode=mode, lam=lam)["rewards"][3] == pytest.approx(want)


def test_a_silent_member_is_left_out_and_a_silent_prompt_has_no_label():
    assert run(["1", "2"], [["1", "2"], [None, None]])["rewards"] == run(["1", "2"])["rewards"]
    out = run([None, None], [[None], []], n_select=1)
    assert out["pseudo_label"] is None and out["rewards"] == [0, 0] and out["selected"] == [0, 1]


def test_the_selection_mixes_confident_rows_and_rows_the_policy_is_alone_with():
    answers = ["1", "1", "1", "2", "3", None]
    members = [answers, ["1", "1", "3", "3", "3"]]  # shares: 1 0.5, 2 0.1, 3 0.4; gaps: 0.1, 0.1, 0.2
    out = run(answers, members, n_select=3, conf_share=0.5)
    assert out["selected"] == [0, 1, 4]
    assert run(answers, members, n_select=2, conf_share=0.0)["selected"][-1] == 4
    assert run(answers, members, n_select=9)["selected"] == list(range(6))


def batch(**columns):
    answers = ["1", "5", "1", "2", "5", None]
    peers = [[["1", "1"]], [["2"]], [["1", "1"]], [["1", "1"]], [["2"]], [["2"]]]
    return reward_batch([float("nan")] * 6, [3, 8, 3, 3, 8, 8]).with_columns(
        answer=answers, peer_answers=peers, **columns
    )


def test_groups_vote_apart_and_raw_rewards_are_not_read():
    part = rlx.create("reward", "rler")
    found = part(batch())
    first, second = (
        run(["1", "1", "2"], [["1", "1", "2"], ["1", "1"]]),
        run(["5", "5", None], [["5", "5", None], ["2"]]),
    )
    want = [first["rewards"][0], second["rewards"][0], *first["rewards"][1:], *second["rewards"][1:]]
    assert found["rewards"].tolist() == pytest.approx(want)
    assert found["pseudo_label"] == ["1", "2", "1", "1", "2", "2"] and "keep" not in found


def test_rows_not_selected_leave_before_the_advantage():
    part = rlx.create("reward", "rler", n_select=1, confident_share=1.0)
    keep = torch.tensor([True, True, True, True, True, False])
    assert part(batch(keep=keep))["keep"].tolist() == [True, True, False, False, False, False]
    config = {"reward": {"name": "rler", "n_select": 2}}
    trainer = TableTrainer(config, host=TableHost(8, fields=FACTS), groups=3, group_size=4, max_tokens=8)
    ready = rlx.prepare(trainer.parts, trainer.rollouts(trainer.context())).batch
    assert ready.groups.sizes.tolist() == [2, 2, 2]
