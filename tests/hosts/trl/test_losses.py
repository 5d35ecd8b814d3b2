"""The divisor of TRL's losses: what each rank and micro-batch divides by, so that the step's gradient is right."""

import pytest
import torch

pytest.importorskip("trl")

from rlx_plugins.hosts.trl.losses import window_totals

COUNTS = {"policy": "loss_count"}


def chunk(*counts):
    mask = torch.ones(len(counts), 2, dtype=torch.bool)
    return {"rlx/loss_count": torch.tensor(counts, dtype=torch.float64), "rlx/response_mask": mask}


def test_the_count_of_all_ranks_is_shared_because_gradients_are_averaged_over_them():
    totals = window_totals([chunk(3.0, 1.0), chunk(2.0)], COUNTS, lambda x: 2 * x, ranks=2)
    assert totals["policy"] == 6.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rule_that_only_sums_is_undone_of_the_average_over_ranks(ranks):
    totals = window_totals([chunk(0.0, 0.0)], COUNTS, lambda x: ranks * x, ranks)
    assert totals["policy"] == 1 / ranks
