"""verl-shaped data for the tests: what a training worker gets of a batch, without Ray and without a model."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import columns, handover
from rlx_plugins.hosts.verl.loss import ActorLoss
from rlx_plugins.hosts.verl.profile import ALWAYS, UPDATE

PROFILE = rlx.HostProfile("verl", ALWAYS | {"logp_rollout", "logp_ref"}, UPDATE)
VOCAB = 11


def parts(**plugins):
    return rlx.build(plugins, PROFILE)


def batch(rows=8, width=6, *, seed=0, groups=2, dtype=torch.float64, components=2):
    """A scored batch: ragged responses with masked tokens inside, log-probs near each other, NaN under the mask."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    length = torch.randint(1, width + 1, (rows,), generator=g)
    length[0] = width
    inside = torch.arange(width)[None] < length[:, None]
    mask = inside & ((torch.rand(rows, width, generator=g) > 0.2) | (torch.arange(width)[None] == 0))
    old = -1 + 0.3 * normal(rows, width)
    hole = torch.where(mask, 0.0, torch.nan).to(dtype)
    rewards = normal(rows, components).round(decimals=1)
    return rlx.RolloutBatch(
        {
            "response_ids": torch.randint(0, VOCAB, (rows, width), generator=g),
            "response_mask": mask,
            "hint_mask": torch.zeros_like(mask),
            "turn_ids": columns.turns(mask),
            "segment_ids": columns.turns(mask),
            "logp_old": old + hole,
            "logp_rollout": old + 0.1 * normal(rows, width) + hole,
            "logp_ref": old + 0.1 * normal(rows, width) + hole,
            "entropy": 1 + normal(rows, width).abs() + hole,
            "staleness": torch.arange(rows)[:, None].expand(rows, width) % 3,
            "group": torch.arange(rows) * groups // rows,
            "row_id": torch.arange(rows) + 1000,
            "rewards": rewards.sum(1),
            "reward_components": rewards,
            "component_names": ("accuracy", "format"),
            "keep": torch.ones(rows, dtype=torch.bool),
            "helped": torch.zeros(rows, dtype=torch.bool),
            "correct": rewards.sum(1) > 0.5,
            "finished": torch.ones(rows, dtype=torch.bool),
            "temperature": torch.ones(rows, dtype=dtype),
            "propensity": torch.ones(rows, dtype=dtype),
            "prompt_key": [f"p{i * groups // rows}" for i in range(rows)],
            "source": ["fresh"] * rows,
            "length": length,
        },
        step=3,
        total_steps=10,
        seed=5,
    )


def nested_logp(logp, data):
    """[B,T] log-probs of responses as a model of verl returns them: over prompt and response, shifted by one."""
    prompt, response = columns.lengths(data["prompts"]), columns.lengths(data["responses"])
    values = []
    for row, p, r in zip(logp, prompt.tolist(), response.tolist()):
        values.append(torch.cat([row.new_full((p - 1,), -7.0), row[:r], row.new_full((1,), -9.0)]))
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def worker_data(chosen, prepared, *, ranks=1, rows_per_step=None, padding=0, micro_batch=None, cut=False):
    """The whole batch as a training worker gets it, with `padding` rows of verl at the end."""
    table = prepared.batch
    size = table.size
    n = size + padding
    rows = torch.cat([table["length"], torch.ones(padding, dtype=torch.int64)])
    if cut:
        rows[:size] = torch.minimum(rows[:size], table.kept_length.clamp(min=1))
    prompt = 2 + torch.arange(n) % 3
    fields, run = handover.hand_over(
        chosen, table, torch.arange(size), rows, ranks=ranks, rows_per_step=rows_per_step or n
    )

    def token_field(column):
        full = column.new_zeros(n, column.shape[1])
        full[:size] = column
        return columns.nest(full, rows)

    ids = token_field(table.response_ids)
    fields |= {
        "responses": ids,
        "prompts": columns.nest(torch.ones(n, 4, dtype=torch.int64), prompt),
        "old_log_probs": token_field(table.logp_old),
        "ref_log_prob": token_field(table.logp_ref),
    }
    data = columns.fields_dict(fields, n)
    tu.assign_non_tensor(data, dp_size=ranks, global_batch_size=rows_per_step or n, batch_num_tokens=123)
    tu.assign_non_tensor(data, micro_batch_size_per_gpu=micro_batch or n)
    tu.assign_non_tensor_data(data, columns.RUN, run)
    return data


def loss_and_gradient(chosen, prepared, logp_new, *, micro_batches=1, padding=0, entropy=None, host_terms=None, **data):
    """Loss and gradient [B,T] of one optimizer step on one rank, over `micro_batches`."""
    n = prepared.batch.size + padding
    whole = worker_data(chosen, prepared, padding=padding, micro_batch=n // micro_batches, **data)
    logp = torch.cat([logp_new, logp_new.new_zeros(padding, logp_new.shape[1])]).requires_grad_()
    loss_fn = ActorLoss(chosen, host_terms)
    total, metrics = 0.0, []
    for i, part in enumerate(tu.chunk_tensordict(whole, micro_batches)):
        rows = slice(i * n // micro_batches, (i + 1) * n // micro_batches)
        output = {"log_probs": nested_logp(logp[rows], part)}
        if entropy is not None:
            filler = entropy.new_zeros(padding, entropy.shape[1])
            output["entropy"] = nested_logp(torch.cat([entropy, filler])[rows], part)
        loss, report = loss_fn(model_output=output, data=part)
        loss.backward()
        total = total + loss.detach()
        metrics.append(report)
    return total, logp.grad[: prepared.batch.size], metrics


__all__ = ["TensorDict", "batch", "loss_and_gradient", "nested_logp", "parts", "worker_data"]
