"""The loss that verl's training workers call, on data of their shapes."""

from __future__ import annotations

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl_tensors import PROFILE, VOCAB, batch, loss_and_gradient, nested_logp, parts, worker_data

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import columns, handover
from rlx_plugins.hosts.verl.loss import LOGITS, ActorLoss, HostTerms, worker_state

CLIPS = [
    {"clip": "ppo"},
    {"clip": "bapo"},
    {"clip": "sapo"},
    {"clip": "gmpo"},
    {"ratio": "sequence"},
    {"advantage": "dvao", "clip": "two_sided"},
    {"advantage": "gdpo", "aggregate": "seq_mean_token_mean"},
    {"advantage": "dr_grpo", "aggregate": "seq_mean_token_sum_norm"},
    {"correction": "tis"},
    {"selector": "nat_urs"},
    {"clip": "vespo"},
    {"clip": "sat"},
]


def new_logp(table, seed=1):
    noise = torch.randn(table.logp_old.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logp = torch.where(table.response_mask, table.logp_old, 0) + 0.2 * noise
    return torch.where(table.response_mask, logp, torch.nan)


def reference(chosen, table, logp_new, entropy=None):
    """The objective straight from core, on the whole batch."""
    logp = logp_new.clone().requires_grad_()
    totals = {name: count.sum() for name, count in table.counts().items()}
    loss, _ = rlx.policy_loss(chosen, table.batch, logp, totals=totals, entropy=entropy)
    loss.backward()
    return loss.detach(), logp.grad


@pytest.mark.parametrize("plugins", CLIPS, ids=str)
def test_loss_and_gradient_are_those_of_the_objective_on_the_whole_batch(plugins):
    chosen = parts(**plugins)
    table = rlx.prepare(chosen, batch())
    logp = new_logp(table.batch)
    wanted, gradient = reference(chosen, table, logp)
    loss, got, _ = loss_and_gradient(chosen, table, logp)
    assert abs(float(loss - wanted)) < 1e-9 and float(gradient.abs().sum()) > 0
    torch.testing.assert_close(got, gradient, atol=1e-9, rtol=0)


@pytest.mark.parametrize("plugins", [p for p in CLIPS if p.get("clip") not in ("bapo", "sat")], ids=str)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_one_micro_batch_equals_several_with_padding_rows_among_them(plugins, micro_batches):
    chosen = parts(**plugins)
    table = rlx.prepare(chosen, batch(rows=7))
    logp = new_logp(table.batch)
    one, gradient, _ = loss_and_gradient(chosen, table, logp, padding=1)
    many, got, _ = loss_and_gradient(chosen, table, logp, padding=1, micro_batches=micro_batches)
    assert abs(float(one - many)) < 1e-9
    torch.testing.assert_close(got, gradient, atol=1e-9, rtol=0)


def test_an_aggregate_of_micro_scope_averages_over_the_micro_batches():
    chosen = parts(aggregate="bnpo", advantage="grpo")
    table = rlx.prepare(chosen, batch())
    logp = new_logp(table.batch)
    got, _, _ = loss_and_gradient(chosen, table, logp, micro_batches=2)
    wanted = 0.0
    for rows in (torch.arange(4), torch.arange(4, 8)):
        part = table.batch.rows(rows)
        loss, _ = rlx.policy_loss(chosen, part, logp[rows], totals={"policy": part.loss_count.sum()})
        wanted += float(loss) / 2
    assert float(got) == pytest.approx(wanted, abs=1e-12)


def test_rows_of_different_optimizer_steps_are_divided_by_the_count_of_their_own():
    counts = {"policy": torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])}
    totals = columns.step_totals(counts, ranks=2, rows_per_step=4)["rlx/total/policy"]
    # rank 0 has rows 0-3, rank 1 rows 4-7; the first step is rows 0, 1 and 4, 5
    assert totals.tolist() == [14.0, 14, 22, 22, 14, 14, 22, 22]


def test_verls_kl_and_entropy_terms_stay():
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    chosen = parts(advantage="grpo")
    table = rlx.prepare(chosen, batch())
    logp, mask = new_logp(table.batch), table.batch.response_mask
    entropy = torch.where(mask, table.batch.entropy, torch.nan)
    terms = HostTerms(kl_coef=0.3, kl_type="low_var_kl", entropy_coef=0.2)
    plain, _ = reference(chosen, table, logp)
    loss, _, metrics = loss_and_gradient(chosen, table, logp, entropy=entropy, host_terms=terms)

    def whole(x):
        filled = torch.where(mask, x, 0.0)
        return agg_loss(loss_mat=filled, loss_mask=mask, loss_agg_mode="token-mean")

    kl = kl_penalty(torch.where(mask, logp, 0), torch.where(mask, table.batch.logp_ref, 0), "low_var_kl")
    assert float(loss) == pytest.approx(float(plain + 0.3 * whole(kl) - 0.2 * whole(entropy)), abs=1e-9)
    assert metrics[0]["actor/kl_loss"].aggregate() == pytest.approx(float(whole(kl)), abs=1e-9)


def test_cut_rows_train_like_whole_rows_with_the_same_weights(registered):
    @registered("selector", "test_first_two")
    class FirstTwo(rlx.Selector):
        cuts_rows = True

        def __call__(self, batch):
            first = torch.arange(batch.response_mask.shape[1]) < 2
            return {"weight": first.expand_as(batch.response_mask).double(), "kept_length": batch.group * 0 + 2}

    chosen = parts(selector="test_first_two")
    table = rlx.prepare(chosen, batch())
    logp = new_logp(table.batch)
    whole, gradient, _ = loss_and_gradient(chosen, table, logp)
    cut, got, _ = loss_and_gradient(chosen, table, logp, cut=True)
    assert int(columns.lengths(worker_data(chosen, table, cut=True)["responses"]).max()) == 2
    assert float(whole) == pytest.approx(float(cut), abs=1e-12)
    torch.testing.assert_close(got, gradient, atol=1e-12, rtol=0)


def test_the_result_carries_the_number_of_ranks():
    chosen = parts(advantage="grpo")
    table = rlx.prepare(chosen, batch())
    logp = new_logp(table.batch)
    data = worker_data(chosen, table, ranks=2)
    loss, _ = ActorLoss(chosen)(model_output={"log_probs": nested_logp(logp, data)}, data=data)
    single, _ = reference(chosen, table, logp)
    assert float(loss) == pytest.approx(2 * float(single), abs=1e-12)


def test_a_nan_log_prob_names_the_prompt():
    chosen = parts(advantage="grpo")
    table = rlx.prepare(chosen, batch())
    logp = new_logp(table.batch)
    logp[5, 0] = torch.nan
    with pytest.raises(rlx.DataError, match="'p1'.*1 of 8 rows"):
        loss_and_gradient(chosen, table, logp)


def test_parts_make_columns_of_the_logits_of_response_tokens(registered):
    @registered("clip", "test_squared_probs")
    class SquaredProbs(rlx.Clip):
        capabilities = frozenset({"logits"})
        requires = frozenset({"logp_old"})

        def from_logits(self, logits, columns):
            chosen = logits.log_softmax(-1).gather(-1, columns["response_ids"][..., None])[..., 0]
            return {"again": chosen, "squared": logits.softmax(-1).square().sum(-1)}

        def __call__(self, terms):
            return -terms.advantages * terms.logits["again"] * terms.logits["squared"]

    chosen = parts(clip="test_squared_probs")
    table = rlx.prepare(chosen, batch())
    data = worker_data(chosen, table)
    total = int((columns.lengths(data["prompts"]) + columns.lengths(data["responses"])).sum())
    logits = torch.randn(1, total, VOCAB, dtype=torch.float64).requires_grad_()
    loss_fn = ActorLoss(chosen)
    made = loss_fn(student_logits=logits, data=data)
    assert set(made) == {LOGITS + "again", LOGITS + "squared"} and all(v.shape == (1, total) for v in made.values())
    offsets = torch.nn.functional.pad(
        (columns.lengths(data["prompts"]) + columns.lengths(data["responses"])).cumsum(0), (1, 0)
    )
    nested = {k: torch.nested.nested_tensor_from_jagged(v[0], offsets) for k, v in made.items()}
    logp = nested_logp(new_logp(table.batch), data)
    loss, _ = loss_fn(model_output={"log_probs": logp, **nested}, data=data)
    loss.backward()
    # by hand, row by row
    probs, at, wanted = logits.detach()[0].log_softmax(-1), 0, 0.0
    for b in range(table.batch.size):
        prompt, n = int(columns.lengths(data["prompts"])[b]), int(table.batch["length"][b])
        for t in range(n):
            if table.batch.response_mask[b, t]:
                row = probs[at + prompt + t - 1]
                wanted -= float(
                    table.batch.advantages[b, t] * row[table.batch.response_ids[b, t]] * (2 * row).exp().sum()
                )
        at += prompt + n
    wanted /= float(table.batch.response_mask.sum())
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-12) and float(logits.grad.abs().sum()) > 0


def test_the_worker_tells_the_state_of_its_own_parts_only(registered):
    @registered("clip", "test_counting")
    class Counting(rlx.Clip):
        calls: int = rlx.state(0)

        def __call__(self, terms):
            self.calls += 1
            return -terms.ratio * terms.advantages

    chosen = parts(clip="test_counting", advantage="lead", reward="lead")
    table = rlx.prepare(chosen, batch())
    loss_and_gradient(chosen, table, new_logp(table.batch), micro_batches=4)
    state = worker_state(None)
    assert state["clip/0/test_counting"] == {"calls": 4} and "advantage/0/lead" not in state


def test_the_advantages_state_goes_from_the_driver_to_its_in_loss(registered):
    @registered("advantage", "test_scaled")
    class Scaled(rlx.Advantage):
        scale: float = rlx.state(1.0)

        def __call__(self, batch):
            self.scale = 3.0
            return {"advantages": batch.spread(batch.rewards)}

        def in_loss(self, terms):
            return terms.advantages * self.scale

    driver, worker = parts(advantage="test_scaled"), parts(advantage="test_scaled")
    table = rlx.prepare(driver, batch())
    data = worker_data(driver, table)
    logp = new_logp(table.batch)
    ActorLoss(worker)(model_output={"log_probs": nested_logp(logp, data)}, data=data)
    assert worker.one("advantage").scale == 3.0


def test_distillation_and_auxiliary_terms_have_totals_of_their_own(registered):
    @registered("distill", "test_reverse_kl")
    class ReverseKL(rlx.Distill):
        requires = frozenset({"logp_rollout"})

        def __call__(self, terms, loss):
            return rlx.masked(terms.logp_new, terms.mask) - rlx.masked(terms.batch.logp_rollout, terms.mask)

    @registered("auxiliary", "test_first_token")
    class FirstToken(rlx.Auxiliary):
        coef: float = 0.5
        requires = frozenset({"entropy"})

        def mask(self, batch):
            return batch.response_mask & (torch.arange(batch.response_mask.shape[1]) == 0)

        def __call__(self, terms, loss):
            return terms.entropy * terms.logp_new

    chosen = parts(distill="test_reverse_kl", auxiliary="test_first_token", distill_coef=0.3)
    table = rlx.prepare(chosen, batch())
    logp = new_logp(table.batch)
    entropy = torch.where(table.batch.response_mask, table.batch.entropy, 0)
    wanted, gradient = reference(chosen, table, logp, entropy)
    for micro_batches in (1, 4):
        loss, got, metrics = loss_and_gradient(chosen, table, logp, entropy=entropy, micro_batches=micro_batches)
        assert float(loss) == pytest.approx(float(wanted), abs=1e-9)
        torch.testing.assert_close(got, gradient, atol=1e-9, rtol=0)
    assert {"rlx/distill/loss", "rlx/auxiliary/test_first_token"} <= set(metrics[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_that_of_the_log_probs(dtype):
    chosen = parts(advantage="dvao", clip="bapo")
    table = rlx.prepare(chosen, batch(dtype=dtype))
    loss, gradient, _ = loss_and_gradient(chosen, table, new_logp(table.batch).to(dtype))
    assert loss.dtype == gradient.dtype == dtype and bool(torch.isfinite(gradient).all())


def test_groups_of_one_and_empty_responses_are_harmless():
    table = batch(rows=5, groups=5)
    empty = table.response_mask.clone()
    empty[3] = False
    chosen = parts(advantage="grpo")
    prepared = rlx.prepare(chosen, table.with_columns(response_mask=empty, rewards=table.rewards * 0))
    loss, gradient, _ = loss_and_gradient(chosen, prepared, new_logp(prepared.batch), micro_batches=5)
    assert float(loss) == 0 and (gradient == 0).all()


def test_a_batch_that_asks_for_confidence_gets_the_mass_of_the_five_likeliest_tokens(monkeypatch):
    chosen = parts(clip="ppo")
    data = columns.fields_dict({}, 2)
    tu.assign_non_tensor(data, **{columns.ASKED: columns.CONFIDENCE})
    logits = torch.randn(1, 9, VOCAB, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("rlx_plugins.hosts.verl.loss.TOKENS_AT_A_TIME", 4)
    made = ActorLoss(chosen)(student_logits=logits, data=data)
    expected = logits.softmax(-1).sort(-1).values[..., -5:].sum(-1)
    torch.testing.assert_close(made[columns.CONFIDENCE], expected)
    assert ActorLoss(chosen)(model_output={}, data=data) == (0, {})


def test_a_users_signal_is_sent_only_where_the_loss_reads_it(registered):
    @registered("advantage", "test_by_field")
    class ByField(rlx.Advantage):
        requires = frozenset({"info_gain", "confidence"})

        def __call__(self, batch):
            return {"advantages": batch.spread(batch.rewards)}

    host = rlx.HostProfile("verl", PROFILE.signals | {"info_gain", "confidence"}, PROFILE.capabilities)
    fields = {"info_gain": [[0.5]] * 8, "confidence": torch.rand(8, 6)}
    for clip, sent in (("ppo", set()), ("echo", {"rlx/confidence"})):
        chosen = rlx.build({"advantage": "test_by_field", "clip": clip}, host)
        table = rlx.prepare(chosen, batch().with_columns(**fields)).batch
        made, _ = handover.hand_over(chosen, table, torch.arange(8), table["length"], ranks=1, rows_per_step=8)
        assert {"rlx/info_gain", "rlx/confidence"} & set(made) == sent and "rlx/advantages" in made


def test_a_critic_learns_the_returns_of_rows_that_are_trained_and_keeps_its_value_elsewhere():
    from rlx_plugins.hosts.verl.trainer import critic_targets

    prepared = rlx.RolloutBatch(
        {
            "group": torch.arange(2),
            "response_mask": torch.tensor([[True, False], [True, True]]),
            "rewards": torch.tensor([1.0, torch.nan]),
            "returns": torch.tensor([[5.0, 6.0], [7.0, 8.0]]),
        }
    )
    values = columns.nest(torch.arange(6.0).reshape(3, 2), torch.tensor([2, 2, 1]))
    assert critic_targets(values, prepared, torch.tensor([1, 0])).tolist() == [[0, 1], [5, 3], [4, 0]]
