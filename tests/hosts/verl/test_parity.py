"""The same tensors give the same advantages, loss and gradient on verl as on TRL."""

from __future__ import annotations

import pytest
import torch
from verl_tensors import batch, loss_and_gradient, parts

import rlx_plugins as rlx

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


def on_trl(chosen, prepared, logp_new, micro_batches):
    """Loss and gradient of one optimizer step the way the TRL host goes: its columns, its totals, its micro-batches."""
    from rlx_plugins.hosts.loss_terms import count_columns, micro_terms
    from rlx_plugins.hosts.trl.columns import micro_batch, own_rows
    from rlx_plugins.hosts.trl.losses import window_totals, with_micro_scope

    size, width = prepared.batch.response_mask.shape
    keys, values = own_rows(prepared.batch, size, slice(0, size), width)
    counts, micro = count_columns(chosen), micro_terms(chosen)
    chunks = []
    for rows in torch.arange(size).chunk(micro_batches):
        pick = [int(i) for i in rows]
        chunks.append({n: v[rows] if isinstance(v, torch.Tensor) else [v[i] for i in pick] for n, v in keys.items()})
    window = window_totals(chunks, counts, lambda x: x, 1)
    logp = logp_new.clone().requires_grad_()
    total = 0.0
    for rows, chunk in zip(torch.arange(size).chunk(micro_batches), chunks):
        totals = with_micro_scope(window, micro, chunk, counts, micro_batches)
        table = micro_batch(chunk, values, prepared.batch)
        loss, _ = rlx.policy_loss(chosen, table, logp[rows], totals=totals)
        loss.backward()
        total += float(loss.detach())
    return total, logp.grad


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("plugins", MIXES, ids=str)
def test_verl_and_trl_agree(plugins, micro_batches):
    ours, theirs = parts(**plugins), parts(**plugins)
    table = batch()
    on_verl, prepared = rlx.prepare(ours, table), rlx.prepare(theirs, table)
    torch.testing.assert_close(on_verl.batch.advantages, prepared.batch.advantages, atol=1e-9, rtol=0)
    noise = torch.randn(table.logp_old.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logp = torch.where(
        table.response_mask, torch.where(table.response_mask, table.logp_old, 0) + 0.2 * noise, torch.nan
    )
    loss, gradient, _ = loss_and_gradient(ours, on_verl, logp, micro_batches=micro_batches)
    wanted, wanted_gradient = on_trl(theirs, prepared, logp, micro_batches)
    assert float(loss) == pytest.approx(wanted, abs=1e-9) and float(wanted_gradient.abs().sum()) > 0
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-9, rtol=0)
