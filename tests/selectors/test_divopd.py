"""DivOPD: the sweeps over rollouts, the queue over updates, and the selector on a batch."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.selectors.divopd import Turn, TurnQueue, select_turns
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

NAN = math.nan


def turn(rid, t, score=0.0, version=0, alive=True):
    return {
        "rid": rid,
        "t": t,
        "version": version,
        "complete": alive,
        "valid": [True, False],
        "logp_gen": [score - 1.0, NAN],
        "logp_teacher": [-1.0, NAN],
    }


def run(arrivals, **parameters):
    return evaluate("selector", "divopd", {"arrivals": arrivals}, parameters)["updates"]


def stepwise(turns, size, cap):
    """The sweeps as the paper's loop: (rid, t, score), one rollout after the other."""
    groups = {}
    for rid, t, s in turns:
        groups.setdefault(rid, []).append((-s, t))
    left = {rid: sorted(g) for rid, g in sorted(groups.items())}
    given_, out = dict.fromkeys(left, 0), []
    while len(out) < size and any(left.values()):
        for rid, g in left.items():
            while g and given_[rid] < cap and len(out) < size:
                out.append([rid, g.pop(0)[1]])
                given_[rid] += 1
        cap += 1
    return out


TURNS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(-3, 3)), max_size=20, unique_by=lambda u: u[:2]
)


@settings(max_examples=60, deadline=None)
@given(TURNS, st.integers(1, 12), st.integers(1, 4))
def test_the_choice_is_the_papers_sweeps(turns, size, cap):
    (got,) = run([[turn(*u) for u in turns]], batch_size=size, cap=cap, pool_mult=99)
    assert got["selected"] == stepwise(turns, size, cap)
    assert got["distinct_rollouts"] == len({rid for rid, _ in got["selected"]})
    assert len(got["selected"]) == min(size, len(turns))


def test_a_rollout_gives_more_than_its_cap_only_while_turns_are_missing():
    turns = [turn(0, t, t) for t in range(5)] + [turn(1, 0)]
    assert run([turns], batch_size=3, cap=2)[0]["selected"] == [[0, 4], [0, 3], [1, 0]]
    assert run([turns], batch_size=5, cap=2)[0]["selected"] == [[0, 4], [0, 3], [1, 0], [0, 2], [0, 1]]


def test_waiting_rollouts_come_before_new_ones_and_no_turn_is_taken_twice():
    first = [turn(5, 0, 1.0), turn(5, 1, 2.0), turn(6, 0, 3.0)]
    updates = run([first, [turn(1, 0, 9.0)], []], batch_size=1, cap=1)
    assert [u["selected"] for u in updates] == [[[5, 1]], [[5, 0]], [[6, 0]]]
    assert updates[2]["pending"] == [[1, 0]]


def test_turns_that_grew_too_old_are_dropped_fresh_or_waiting():
    arrivals = [[turn(0, 0), turn(0, 1)], [], [], [turn(1, 0, version=0), turn(2, 0, version=3)]]
    updates = run(arrivals, batch_size=1, cap=1, max_staleness=1)
    assert [u["selected"] for u in updates] == [[[0, 0]], [[0, 1]], [], [[2, 0]]]
    assert updates[3]["stale_fresh"] == 1


def test_a_turn_waits_only_so_many_updates_after_it_was_first_read():
    many = [turn(0, t, -t) for t in range(6)]
    updates = run([many, [], [], []], batch_size=1, cap=1, max_staleness=99, max_pending_age=1, pool_mult=9)
    assert [len(u["pending"]) for u in updates] == [5, 4, 0, 0]
    assert updates[3]["selected"] == []


def test_truncated_and_unscored_turns_are_dead_and_lost():
    unscored = turn(1, 0) | {"valid": [False, False]}
    (got,) = run([[turn(0, 0, alive=False), unscored, turn(2, 0)]], batch_size=4)
    assert got["dead"] == 2 and got["selected"] == [[2, 0]] and got["pending"] == []


def test_no_more_than_the_pool_is_read_and_the_rest_stays_in_the_queue():
    turns = [turn(rid, 0, rid) for rid in range(6)]
    updates = run([turns, []], batch_size=1, cap=1, pool_mult=2)
    assert updates[0]["selected"] == [[0, 0]] and updates[0]["pending"] == [[1, 0]]
    assert updates[1]["selected"] == [[1, 0]] and updates[1]["pending"] == [[2, 0]]


def test_without_focus_and_cap_the_order_is_oldest_first():
    turns = [turn(0, 1, 5.0), turn(0, 0, 9.0), turn(1, 0, 3.0), turn(0, 2, 7.0)]
    (got,) = run([turns], batch_size=4, cap=math.inf, focus=False)
    assert got["selected"] == [[0, 1], [0, 0], [0, 2], [1, 0]]


def test_scores_of_nan_rank_last():
    order = select_turns(torch.zeros(3, dtype=torch.int64), torch.tensor([NAN, -5.0, math.inf]).double(), 3, 9, True)
    assert order.tolist() == [2, 1, 0]


def test_the_queue_survives_a_restart():
    turns = [Turn(rid, t, 0, float(t), True) for rid in range(3) for t in range(3)]
    one, other = TurnQueue(2, cap=1), TurnQueue(2, cap=1)
    one.add(turns)
    one.update()
    other.load_state_dict(one.state_dict())
    assert [one.update() for _ in range(3)] == [other.update() for _ in range(3)]


def batch():
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0]]).bool()
    turns = torch.tensor([[0, 0, -1, 1, 1, 2], [0, 0, 1, -1, -1, -1], [0, -1, 1, -1, -1, -1]])
    gap = torch.tensor(
        [[1.0, 1.0, NAN, 5.0, -1.0, 3.0], [0.5, 0.5, NAN, 9.0, 9.0, 9.0], [7.0, NAN, 8.0, NAN, NAN, NAN]]
    )
    return reward_batch(response_mask=mask.double()).with_columns(
        logp_rollout=gap.double() - 2,
        logp_teacher=torch.full((3, 6), -2.0).double(),
        turn_ids=turns,
        staleness=torch.tensor([[0] * 6, [0] * 6, [0, 0, 3, 0, 0, 0]]),
    )


def test_on_a_batch_the_chosen_turns_keep_their_tokens():
    out = rlx.create("selector", "divopd", turns=3, cap=1)(batch())
    assert out["weight"].tolist() == [[0, 0, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert (out["chosen_turns"], out["dead_turns"], out["distinct_rollouts"]) == (3, 1, 3)
    wide = rlx.create("selector", "divopd", turns=99, cap=1)(batch())
    assert wide["chosen_turns"] == 5, "one turn has no valid token, one is too old"


def test_a_run_trains_the_bounded_number_of_turns():
    trainer = TableTrainer(
        {"selector": {"name": "divopd", "turns": 5}}, host=TableHost(8, turns=2), groups=3, group_size=4, max_tokens=8
    )
    assert all(entry["selector/divopd/chosen_turns"] == 5 for entry in trainer.run(3))
