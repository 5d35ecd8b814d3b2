"""One rank of a two-rank update with FSDP2 on gloo: saves its gradient, and hidden states of its rows.

usage: two_ranks.py RANK PORT OUT CLIP
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from training_worker import ROWS as SEQUENCES
from training_worker import language_model, on_the_cpu, shard, worker_of
from verl_tensors import VOCAB, batch, nested_logp, parts, worker_data

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import columns, hidden
from rlx_plugins.hosts.verl.loss import ActorLoss

ROWS, STEP = 8, 4


class Table(nn.Module):
    """Log-probs of the response tokens from a table of logits: every row has its own context."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter(torch.randn(ROWS, VOCAB, dtype=torch.float64))

    def forward(self, rows, ids):
        return self.logits.log_softmax(-1)[rows].gather(1, ids)


def update(plugins, rank, ranks, model):
    """Both optimizer steps of the batch, without an optimizer: the gradients add up."""
    chosen = parts(**plugins)
    table = rlx.prepare(chosen, batch(rows=ROWS))
    data = worker_data(chosen, table, ranks=ranks, rows_per_step=STEP, micro_batch=1)
    data["row"] = torch.arange(ROWS)
    loss_fn = ActorLoss(chosen)
    own = torch.arange(ROWS).chunk(ranks)[rank]
    from verl.utils.tensordict_utils import index_select_tensor_dict

    losses = []
    for step in own.split(STEP // ranks):
        for row in step.split(1):
            part = index_select_tensor_dict(data, row)
            ids = columns.padded(part["responses"])
            logp = nested_logp(model(part["row"], ids), part)
            loss, _ = loss_fn(model_output={"log_probs": logp}, data=part, dp_group=None)
            loss.backward()
            losses.append(float(loss.detach()))
    return losses


def states(rank, mesh):
    """Hidden states of this rank's half of the sequences: packed by number of tokens, padded two by two."""
    on_the_cpu()
    model, own = shard(language_model(), mesh), SEQUENCES[4 * rank : 4 * rank + 4]
    options = ({"packed": True, "tokens": 12}, {"packed": False, "rows": 2})
    return [hidden.last_states(worker_of(model, **chosen), own) for chosen in options]


def main():
    rank, port, out, clip = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    model = Table()
    fully_shard(model, mesh=mesh)
    losses = update({"clip": clip, "advantage": "dvao", "aggregate": "seq_mean_token_mean"}, rank, 2, model)
    gradient = model.logits.grad.full_tensor()
    torch.save({"gradient": gradient, "losses": losses, "states": states(rank, mesh)}, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
