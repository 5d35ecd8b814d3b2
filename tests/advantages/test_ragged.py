"""Columns of lists as rectangular tensors, and runs of equal ids."""

import math

import pytest
import torch

from rlx_plugins import RolloutBatch
from rlx_plugins.advantages._ragged import padded_ids, ragged
from rlx_plugins.advantages._runs import Runs


def batch(column):
    return RolloutBatch({"x": column, "group": torch.arange(len(column)), "rewards": torch.zeros(len(column)).double()})


def test_lists_of_any_length_keep_it_and_none_is_unknown():
    values, lengths = ragged(batch([[1, 2.5, None], None, [], (True,)]), "x")
    assert lengths.tolist() == [3, 0, 0, 1] and values.dtype == torch.float64
    want = [[1, 2.5, math.nan], [math.nan] * 3, [math.nan] * 3, [1, math.nan, math.nan]]
    torch.testing.assert_close(values, torch.tensor(want).double(), equal_nan=True)


@pytest.mark.parametrize("column", [[], [None, []]])
def test_a_column_without_any_number_has_no_width(column):
    values, lengths = ragged(batch(column), "x")
    assert values.shape == (len(column), 0) and not lengths.any()


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_ids_are_padded_or_cut(kind):
    rows = [kind([4, 5, 6]), kind([7])]
    assert padded_ids(rows, torch.device("cpu")).tolist() == [[4, 5, 6], [7, -1, -1]]
    assert padded_ids(rows, torch.device("cpu"), 2).tolist() == [[4, 5], [7, -1]]
    assert padded_ids(rows, torch.device("cpu"), 4).tolist() == [[4, 5, 6, -1], [7, -1, -1, -1]]


def test_runs_of_a_row():
    ids = torch.tensor([[5, 5, -1, 5], [2, 2, 2, 2], [1, 2, 3, 4]])
    runs = Runs(ids)
    assert runs.of.tolist() == [[5, -1, 5, -1], [2, -1, -1, -1], [1, 2, 3, 4]]
    assert torch.equal(runs.spread(runs.of), ids)
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()
    assert runs.any(mask).tolist() == [[True, True, False, False], [False] * 4, [True, False, False, True]]
