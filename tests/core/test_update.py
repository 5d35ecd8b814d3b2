"""The batch phase and the objective: order of the parts, weights and counts, and what is refused."""

import math
from dataclasses import dataclass

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core import registry
from rlx_plugins.core.objective import reduce
from rlx_plugins.testing.evaluation.building import reward_batch

HOST = rlx.HostProfile("test", frozenset({"logp_old"}))
NAN = math.nan


@pytest.fixture
def add():
    made = []

    def adder(kind, name, cls):
        made.append((kind, name))
        return rlx.register(kind, name)(dataclass(cls))

    yield adder
    for kind, name in made:
        registry.forget(kind, name)


def scored(**columns):
    given = {
        "rewards": [1.0, 0.0, 2.0, 5.0],
        "group": [0, 0, 1, 1],
        "response_mask": [[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]],
        "logp_old": [[-1.0, -2.0, NAN], [-1.0, NAN, NAN], [-0.5, -1.0, -1.5], [NAN, -1.0, -1.0]],
    }
    return reward_batch(**{**given, **columns})


def loss_of(parts, prepared, logp_new, rows=None):
    totals = {name: count.sum() for name, count in prepared.counts().items()}
    batch = prepared.batch if rows is None else prepared.batch.rows(rows)
    return rlx.policy_loss(parts, batch, logp_new if rows is None else logp_new[rows], totals=totals)[0]


def random_policy(batch, seed=0):
    g = torch.Generator().manual_seed(seed)
    noise = 0.3 * torch.randn(batch.response_mask.shape, generator=g, dtype=torch.float64)
    logp = torch.where(batch.response_mask, batch.logp_old + noise, torch.full_like(noise, NAN))
    return logp.requires_grad_()


def test_loss_is_the_weighted_sum_over_the_steps_count():
    loss = torch.tensor([[1.0, NAN], [2.0, 3.0]])
    weight = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
    assert reduce(loss, weight, torch.tensor(4.0)) == pytest.approx((1 + 1 + 3) / 4)
    assert reduce(loss, torch.zeros(2, 2), torch.tensor(0.0)) == 0


def test_masked_garbage_reaches_neither_loss_nor_gradient():
    parts = rlx.build({"clip": "ppo"}, HOST)
    prepared = rlx.prepare(parts, scored())
    logp = random_policy(prepared.batch)
    loss = loss_of(parts, prepared, logp)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logp.grad).all()
    assert (logp.grad[~prepared.batch.response_mask] == 0).all()


@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 1], [2, 0]]])
def test_one_micro_batch_equals_several(split):
    parts = rlx.build({"clip": "ppo"}, HOST)
    prepared = rlx.prepare(parts, scored())
    logp = random_policy(prepared.batch)
    whole = torch.autograd.grad(loss_of(parts, prepared, logp), logp)[0]
    split_loss = sum(loss_of(parts, prepared, logp, torch.tensor(rows)) for rows in split)
    parted = torch.autograd.grad(split_loss, logp)[0]
    torch.testing.assert_close(parted, whole, rtol=0, atol=1e-12)


def test_rows_dropped_by_keep_leave_the_statistics_unless_the_baseline_is_all():
    keep = torch.tensor([True, True, True, False])
    batch = scored(rewards=[1.0, 0.0, 2.0, 5.0]).with_columns(keep=keep)
    kept = rlx.prepare(rlx.build({"clip": "ppo"}, HOST), batch).batch
    whole = rlx.prepare(rlx.build({"clip": "ppo", "baseline": "all"}, HOST), batch).batch
    assert kept.row.tolist() == whole.row.tolist() == [0, 1, 2]
    assert (kept.advantages[2] == 0).all()  # alone in its group
    assert whole.advantages[2].tolist() == pytest.approx([-0.7071] * 3, abs=1e-3)


def test_the_phases_run_in_order_and_hand_their_columns_on(add):
    class Doubles(rlx.Reward):
        def __call__(self, batch):
            return {"rewards": batch.rewards * 2}

    class Raw(rlx.Advantage):
        def __call__(self, batch):
            return {"advantages": batch.spread(batch.rewards), "seen": batch.rewards}

    class Half(rlx.Correction):
        def __call__(self, batch):
            return {"weight": torch.full_like(batch.advantages, 0.5), "was": batch.seen, "strength": 0.5}

    class First(rlx.Selector):
        cuts_rows = True

        def __call__(self, batch):
            first = batch.response_mask.long().cumsum(1) == 1
            return {"weight": (first & batch.response_mask).double(), "kept_length": first.long().argmax(1) + 1}

    for kind, cls in {"reward": Doubles, "advantage": Raw, "correction": Half, "selector": First}.items():
        add(kind, "order", cls)
    parts = rlx.build(dict.fromkeys(("reward", "advantage", "correction", "selector"), "order"), HOST)
    out = rlx.prepare(parts, scored())
    assert out.batch.was.tolist() == [2.0, 0.0, 4.0, 10.0]
    assert out.batch.loss_weight.tolist() == [[0.5, 0, 0], [0.5, 0, 0], [0.5, 0, 0], [0, 0.5, 0]]
    assert out.batch.loss_count.tolist() == [2, 1, 3, 2]  # a selector never changes the count
    assert out.batch.kept_length.tolist() == [1, 1, 1, 2]
    assert out.metrics["selector/kept_tokens"] == pytest.approx(4 / 8)
    assert out.metrics["correction/order/strength"] == 0.5


def test_an_unscorable_row_gets_no_advantage_whatever_the_estimator_says(add):
    class One(rlx.Advantage):
        def __call__(self, batch):
            return {"advantages": torch.ones_like(batch.response_mask, dtype=torch.float64)}

    add("advantage", "one", One)
    out = rlx.prepare(rlx.build({"advantage": "one"}, HOST), scored(rewards=[1.0, NAN, 2.0, 5.0]))
    assert out.batch.advantages[1].tolist() == [0, 0, 0]
    assert out.batch.advantages[0].tolist() == [1, 1, 0]
    assert out.metrics["unscorable"] == 1


def test_an_infinite_reward_names_the_sample():
    batch = scored(rewards=[1.0, math.inf, 0.0, 0.0]).with_columns(prompt_key=["p", "q", "r", "s"])
    with pytest.raises(rlx.DataError, match="reward of row 1, prompt 'q' is infinite"):
        rlx.prepare(rlx.build({"clip": "ppo"}, HOST), batch)


def test_a_batch_without_a_scorable_row_is_an_error():
    with pytest.raises(rlx.DataError, match="none of the 4 rollouts"):
        rlx.prepare(rlx.build({"clip": "ppo"}, HOST), scored(rewards=[NAN] * 4))


def test_a_nan_step_start_log_prob_under_the_mask_is_an_error():
    bad = scored().with_columns(logp_old=torch.full((4, 3), NAN, dtype=torch.float64))
    with pytest.raises(rlx.DataError, match="logp_old is NaN on a model token of row 0"):
        rlx.prepare(rlx.build({"clip": "ppo"}, HOST), bad)


def test_unknown_engine_log_probs_weigh_one_at_the_first_update():
    host = rlx.HostProfile("test", frozenset({"logp_old", "logp_rollout"}))
    parts = rlx.build({"ratio": {"name": "token", "denominator": "logp_rollout"}}, host)
    rollout = scored().logp_old.clone()
    rollout[0, 0] = NAN
    prepared = rlx.prepare(parts, scored().with_columns(logp_rollout=rollout))
    logp = torch.nan_to_num(scored().logp_old).requires_grad_()
    seen = parts.one("ratio")(rlx.PolicyTerms(logp, prepared.batch))
    assert (seen == 1).all()


def test_distillation_and_auxiliary_terms_have_counts_and_coefficients_of_their_own(add):
    class Gap(rlx.Distill):
        def __call__(self, terms, loss):
            return terms.logp_new.detach() * 0 + 2.0 if loss is None else loss * 3

    class Nll(rlx.Auxiliary):
        coef = 0.1

        def mask(self, batch):
            return batch.hint_mask

        def __call__(self, terms, loss):
            return -terms.logp_new

    add("distill", "gap", Gap)
    add("auxiliary", "nll", Nll)
    hint = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 0, 0], [0, 0, 0]]).bool()
    config = {"distill": ["gap", "gap"], "auxiliary": "nll", "distill_coef": 0.5}
    parts = rlx.build(config, HOST)
    prepared = rlx.prepare(parts, scored(rewards=[1.0, 1.0, 1.0, 1.0]).with_columns(hint_mask=hint))
    logp = torch.full((4, 3), -4.0, dtype=torch.float64)
    logp = torch.where(prepared.batch.response_mask, torch.nan_to_num(prepared.batch.logp_old), logp)
    totals = {name: count.sum() for name, count in prepared.counts().items()}
    assert {name: float(total) for name, total in totals.items()} == {"policy": 8, "distill": 8, "nll": 3}
    loss, metrics = rlx.policy_loss(parts, prepared.batch, logp, totals=totals)
    assert float(loss) == pytest.approx(0.5 * 6.0 + 0.1 * 4.0)
    assert float(metrics["auxiliary/nll"]) == pytest.approx(4.0)


def test_columns_from_logits_reach_the_loss(add):
    class Top(rlx.Clip):
        def from_logits(self, logits, columns):
            return {"top": logits.max(-1).values + columns["response_ids"]}

        def __call__(self, terms):
            return terms.logits["top"]

    add("clip", "top", Top)
    parts = rlx.build({"clip": "top"}, HOST)
    ids = torch.ones(4, 3)
    prepared = rlx.prepare(parts, scored().with_columns(response_ids=ids))
    logits = torch.zeros(4, 3, 5, dtype=torch.float64, requires_grad=True)
    totals = {"policy": prepared.batch.loss_count.sum()}
    loss, _ = rlx.policy_loss(parts, prepared.batch, torch.nan_to_num(scored().logp_old), totals=totals, logits=logits)
    assert float(loss.detach()) == pytest.approx(1.0)
    assert torch.autograd.grad(loss, logits)[0].abs().sum() > 0


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        (
            "advantage",
            lambda b: None,
            r"advantage odd returned None; it returns a mapping with \{.advantages.: \[B,T\]",
        ),
        ("advantage", lambda b: b.rewards, r"odd returned a tensor of shape \[4\]; it returns a mapping"),
        ("advantage", lambda b: {"advantage": b.rewards}, "odd returned a mapping with advantage; it returns"),
        (
            "advantage",
            lambda b: {"advantages": b.rewards},
            r"odd returned 'advantages' as a tensor of shape \[4\]; it is a tensor \[B,T\] with B=4, T=3",
        ),
        ("reward", lambda b: {"reward": b.rewards}, "reward odd returned a mapping with reward; it returns"),
        ("reward", lambda b: {"rewards": b.rewards[:-1]}, r"reward odd returned 'rewards' as .* \[3\]; .* B=4"),
        ("selector", lambda b: {"kept_length": b.rewards}, "selector odd returned 'weight' as None"),
        ("correction", lambda b: {"weight": 1.0}, "correction odd returned 'weight' as float 1.0"),
    ],
)
def test_columns_that_do_not_fit_their_kind_are_refused_by_name(add, kind, answer, message):
    add(kind, "odd", type("Odd", (getattr(rlx, kind.capitalize()),), {"__call__": lambda self, batch: answer(batch)}))
    with pytest.raises(rlx.RegistrationError, match=message):
        rlx.prepare(rlx.build({kind: "odd"}, HOST), scored())


def test_a_reward_part_may_drop_rows_or_only_look_on(add):
    keep = torch.tensor([True, True, False, True])
    add("reward", "looking", type("Looking", (rlx.Reward,), {"__call__": lambda self, batch: {}}))
    add("reward", "dropping", type("Dropping", (rlx.Reward,), {"__call__": lambda self, batch: {"keep": keep}}))
    assert rlx.prepare(rlx.build({"reward": ["looking", "dropping"]}, HOST), scored()).batch.size == 3


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("clip", lambda t: None, r"clip odd returned None; .* with B=4, T=3, or that and a mapping of metrics"),
        ("clip", lambda t: t.ratio.sum(), r"clip odd returned a tensor of shape \[\]"),
        ("clip", lambda t: (t.ratio.sum(1), {}), r"clip odd returned a tensor of shape \[4\]"),
        ("ratio", lambda t: t.log_ratio().exp()[:, :1], r"ratio odd returned a tensor of shape \[4, 1\]; .* B=4, T=3"),
    ],
)
def test_token_losses_and_ratios_of_another_shape_are_refused_by_name(add, kind, answer, message):
    add(kind, "odd", type("Odd", (getattr(rlx, kind.capitalize()),), {"__call__": lambda self, terms: answer(terms)}))
    parts = rlx.build({kind: "odd"}, HOST)
    prepared = rlx.prepare(parts, scored())
    with pytest.raises(rlx.RegistrationError, match=message):
        loss_of(parts, prepared, random_policy(prepared.batch))


def test_an_error_of_a_part_says_which_part_and_which_signal_holds_no_numbers(add):
    namespace = {"requires": frozenset({"predicted"}), "__call__": lambda self, batch: batch.predicted.float()}
    add("reward", "odd", type("Odd", (rlx.Reward,), namespace))
    host = rlx.HostProfile("test", frozenset({"logp_old", "predicted"}))
    with pytest.raises(AttributeError, match="float") as raised:
        rlx.prepare(rlx.build({"reward": "odd"}, host), scored().with_columns(predicted=["a", "b", "c", "d"]))
    assert raised.value.__notes__ == ["raised by reward odd; not every row has a number in predicted"]
