"""Weights and counts of the aggregates, worked out by hand on rows of 3, 1 and 0 tokens."""

import pytest
import torch

from rlx_plugins.core.batch import RolloutBatch
from rlx_plugins.core.objective import reduce
from rlx_plugins.core.registry import create

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
LOSS = torch.tensor([[1.0, 2.0, 6.0, torch.nan], [torch.nan, 5.0, torch.nan, torch.nan], [torch.nan] * 4]).double()


def reduced(rule, mask=MASK, loss=LOSS, rows=None):
    """The loss of an optimizer step over micro-batches of the given rows; one micro-batch of all rows without."""
    batch = RolloutBatch(
        {"response_mask": mask, "group": torch.arange(len(mask)), "rewards": torch.zeros(len(mask)).double()}
    )
    columns = rule(batch, mask)
    total = columns["count"].sum()
    return sum(
        float(reduce(loss[r], columns["weight"][r], total)) for r in ([slice(None)] if rows is None else rows)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("token_mean", {}, 14 / 4),
        ("bnpo", {}, 14 / 4),
        ("token_sum", {}, 14),
        ("seq_mean_token_mean", {}, (3 + 5) / 2),
        ("seq_mean_token_mean", {"empty_rows": "count"}, (3 + 5) / 3),
        ("seq_mean_token_sum", {}, (9 + 5) / 2),
        ("seq_mean_token_sum", {"empty_rows": "count"}, (9 + 5) / 3),
        ("seq_mean_token_sum_norm", {}, (9 + 5) / 2 / 4),
        ("seq_mean_token_sum_norm", {"horizon": 10}, (9 + 5) / 2 / 10),
        ("seq_mean_token_sum_norm", {"horizon": 10, "empty_rows": "count"}, (9 + 5) / 3 / 10),
    ],
)
def test_a_reduction_gives_the_number_its_formula_says(name, parameters, expected):
    rule = create("aggregate", name, **parameters)
    assert reduced(rule) == pytest.approx(expected)
    assert reduced(rule, rows=[slice(0, 1), slice(1, 3)]) == pytest.approx(expected), "two micro-batches"


@pytest.mark.parametrize(
    "name",
    ["token_mean", "bnpo", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"],
)
def test_a_batch_without_a_model_token_has_loss_zero(name):
    assert reduced(create("aggregate", name), mask=torch.zeros_like(MASK)) == 0


def test_only_bnpo_counts_by_the_micro_batch():
    scopes = {name: create("aggregate", name).scope for name in ("bnpo", "token_mean", "token_sum")}
    assert scopes == {"bnpo": "micro", "token_mean": "row", "token_sum": "row"}
