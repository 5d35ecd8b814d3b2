"""The same tensors give the same advantages, loss and gradient on verl as on TRL: mixes, then every built-in part."""

from __future__ import annotations

import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl_tensors import batch, nested_logp, parts

import rlx_plugins as rlx
from rlx_plugins.core.registry import builtin_names
from rlx_plugins.hosts.verl import columns, handover
from rlx_plugins.hosts.verl.loss import ActorLoss
from rlx_plugins.testing.conformance.setting import Setting

pytest.importorskip("trl", reason="TRL is not installed")

MIXES = [
    {"clip": "bapo", "advantage": "dvao"},
    {"clip": "bapo", "advantage": "grpo", "reward": "alp"},
    {"clip": "ppo", "advantage": "grpo", "aggregate": "seq_mean_token_mean"},
    {"clip": "sapo", "advantage": "gdpo", "correction": "tis"},
    {"ratio": "sequence", "advantage": "rloo"},
    {"ratio": "pnpo", "advantage": "reinforce_pp"},
    {"clip": "gmpo", "advantage": "dr_grpo", "selector": "nat_urs"},
    {"clip": "vespo", "advantage": "gapo_snr", "aggregate": "asyncweb_norm"},
    {"clip": "cispo", "advantage": "lead", "reward": "lead"},
    {"clip": "two_sided", "advantage": "avspo"},
    {"clip": "sat", "advantage": "grpo"},
]

KINDS = ("advantage", "clip", "correction", "ratio", "aggregate", "selector", "reward")
BUILT_IN = [(kind, name) for kind in KINDS for name in sorted(builtin_names(kind))]


class Step:
    """One optimizer step on the rows of a scored batch, with logits [N,T,V] that everything is made of.

    prepared  the rows of the batch phase; ids [N,T] and lengths [N] of all rows, padding to `micro_batches` included
    """

    def __init__(self, prepared, table, logits, micro_batches):
        self.prepared, self.micro_batches = prepared.batch, micro_batches
        size, padding = table.size, -table.size % micro_batches
        self.n, self.ids = size + padding, torch.nn.functional.pad(table.response_ids, (0, 0, 0, padding))
        self.lengths = torch.cat([table["length"], torch.ones(padding, dtype=torch.int64)])
        self.logits = torch.nn.functional.pad(logits, (0, 0, 0, 0, 0, padding)).requires_grad_()
        self.rows = torch.arange(self.n).chunk(micro_batches)

    def policy(self, rows, width):
        """logp_new and entropy of some rows, cut to `width`."""
        everything = self.logits[rows, :width].log_softmax(-1)
        ids = self.ids[rows, :width].clamp(max=everything.shape[-1] - 1)  # tool output stands outside the vocabulary
        return everything.gather(-1, ids[..., None])[..., 0], -(everything.exp() * everything).sum(-1)


def on_trl(chosen, step):
    """Loss the way the TRL host goes: its columns, its totals, its micro-batches, its cut rows."""
    from rlx_plugins.hosts.loss_terms import count_columns, micro_terms
    from rlx_plugins.hosts.trl.columns import PREFIX, cut_responses, micro_batch, own_rows
    from rlx_plugins.hosts.trl.losses import window_totals, with_micro_scope

    keys, values = own_rows(step.prepared, step.n, slice(0, step.n), step.ids.shape[1])
    keys |= {"completion_ids": step.ids, "prompt_ids": torch.zeros(step.n, 2, dtype=torch.int64)}
    counts, micro = count_columns(chosen), micro_terms(chosen)
    chunks = []
    for rows in step.rows:
        pick = rows.tolist()
        chunks.append({n: v[rows] if isinstance(v, torch.Tensor) else [v[i] for i in pick] for n, v in keys.items()})
    window = window_totals(chunks, counts, lambda x: x, 1)
    total = 0.0
    for rows, chunk in zip(step.rows, chunks):
        if f"{PREFIX}kept_length" in chunk:
            chunk = cut_responses(chunk, max(1, int(chunk[f"{PREFIX}kept_length"].max())))
        totals = with_micro_scope(window, micro, chunk, counts, step.micro_batches)
        table = micro_batch(chunk, values, step.prepared)
        logp, entropy = step.policy(rows, chunk["completion_ids"].shape[1])
        made = {}
        for part in chosen.with_hook("from_logits"):
            made |= part.from_logits(step.logits[rows, : logp.shape[1]], table.token_columns())
        loss, _ = rlx.policy_loss(chosen, table, logp, totals=totals, entropy=entropy, logits=made or None)
        loss.backward()
        total += float(loss.detach())
    return total


def on_verl(chosen, step):
    """Loss the way verl's training workers go: nested fields, packed logits, rows cut before they arrive."""
    table, lengths = step.prepared, step.lengths.clone()
    if table.has("kept_length"):
        kept = torch.ones_like(lengths).index_put((table.row,), table.kept_length)
        lengths = torch.minimum(lengths, kept.clamp(min=1))
    prompts = 2 + torch.arange(step.n) % 3
    fields, run = handover.hand_over(chosen, table, table.row, lengths, ranks=1, rows_per_step=step.n)

    def token_field(column):
        return columns.nest(column.new_zeros(step.ids.shape).index_put((table.row,), column), lengths)

    fields |= {
        "responses": columns.nest(step.ids, lengths),
        "prompts": columns.nest(torch.ones(step.n, 4, dtype=torch.int64), prompts),
        "old_log_probs": token_field(table.logp_old),
        "row": torch.arange(step.n),
    }
    if table.has("logp_ref"):
        fields["ref_log_prob"] = token_field(table.logp_ref)
    data = columns.fields_dict(fields, step.n)
    tu.assign_non_tensor(data, dp_size=1, global_batch_size=step.n, batch_num_tokens=1)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=step.n // step.micro_batches)
    tu.assign_non_tensor_data(data, columns.RUN, run)
    loss_fn, total = ActorLoss(chosen), 0.0
    for part in tu.chunk_tensordict(data, step.micro_batches):
        loss, _ = loss_fn(model_output=model_output(chosen, loss_fn, step, part), data=part)
        loss.backward()
        total += float(loss.detach())
    return total


def model_output(chosen, loss_fn, step, part):
    """What verl's engine returns of a micro-batch, logits processed on the way."""
    logp, entropy = step.policy(part["row"], step.ids.shape[1])
    output = {"log_probs": nested_logp(logp, part), "entropy": nested_logp(entropy, part)}
    if not chosen.with_hook("from_logits"):
        return output
    responses = columns.lengths(part["responses"])
    ends = (columns.lengths(part["prompts"]) + responses).cumsum(0)
    there = torch.arange(step.ids.shape[1])[None] < responses[:, None]
    packed = step.logits.new_zeros(int(ends[-1]), step.logits.shape[-1])
    packed = packed.index_put((columns.response_positions(part),), step.logits[part["row"]][there])
    made = loss_fn(student_logits=packed[None], data=part)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    return output | {k: torch.nested.nested_tensor_from_jagged(v[0], offsets) for k, v in made.items()}


@pytest.mark.parametrize("plugins", MIXES, ids=str)
def test_verl_and_trl_agree(plugins):
    table = batch()
    for micro_batches in (1, 2):
        assert_parity(parts(**plugins), parts(**plugins), table, new_logits(table, 11), micro_batches)


@pytest.mark.parametrize(("kind", "name"), BUILT_IN, ids=[f"{kind}-{name}" for kind, name in BUILT_IN])
def test_every_built_in_part_agrees(kind, name):
    """In its second step, so that what it has learnt matters; signals are those of the table host."""
    run, other = (Setting.of(kind, name).trainer(groups=6) for _ in range(2))
    run.train_step()
    learnt = run.parts.state_dict()
    table = run.rollouts(run.context())
    table = table.with_columns(length=torch.tensor([max(len(r), 1) for r in table.rollout]))
    for micro_batches in (1, 2):
        run.parts.load_state_dict(learnt)
        other.parts.load_state_dict(learnt)
        assert_parity(run.parts, other.parts, table, new_logits(table, 4), micro_batches)


def new_logits(table, vocabulary):
    """[N,T,V] logits that gave logp_old on model tokens, moved far enough to be clipped."""
    shape, g = table.response_mask.shape, torch.Generator().manual_seed(2)
    noise = torch.randn(*shape, vocabulary, generator=g, dtype=torch.float64)
    mask = table.response_mask
    old = torch.where(mask, table.logp_old, -1.0).clamp(max=-1e-6)
    ids = table.response_ids.clamp(max=vocabulary - 1)[..., None]
    rest = torch.log1p(-old.exp()) - torch.log(torch.tensor(vocabulary - 1.0))
    return rest[..., None].repeat(1, 1, vocabulary).scatter(-1, ids, old[..., None]) + 0.6 * noise


def assert_parity(ours, theirs, table, logits, micro_batches):
    on_ours, on_theirs = rlx.prepare(ours, table), rlx.prepare(theirs, table)
    torch.testing.assert_close(on_ours.batch.advantages, on_theirs.batch.advantages, atol=1e-9, rtol=0)
    verl, trl = (Step(prepared, table, logits.clone(), micro_batches) for prepared in (on_ours, on_theirs))
    assert on_verl(ours, verl) == pytest.approx(on_trl(theirs, trl), abs=1e-9)
    assert float(trl.logits.grad.abs().sum()) > 0
    torch.testing.assert_close(verl.logits.grad, trl.logits.grad, atol=1e-9, rtol=0)
