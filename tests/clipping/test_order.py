"""Selecting on a CPU and sorting on an accelerator give the same tokens."""

import pytest
import torch

from rlx_plugins.clipping import _order
from rlx_plugins.clipping._order import first_k, kth_smallest


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_the_kth_smallest(k):
    x = torch.tensor([[3.0, 1.0, torch.inf], [2.0, 1.0, -1.0]])
    assert kth_smallest(x, torch.tensor(k)) == sorted(x.flatten().tolist())[k - 1]


@pytest.mark.parametrize(("k", "want"), [(1, [1]), (2, [1, 4]), (3, [1, 4, 5]), (9, [0, 1, 4, 5])])
def test_candidates_come_by_key_and_then_by_place(k, want):
    keys = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0]])
    candidates = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    picked = first_k(keys, candidates, torch.tensor(k))
    assert picked.flatten().nonzero().flatten().tolist() == want


def by_sorting(x, k):
    return x.flatten().sort().values[k.long() - 1]


def test_the_two_ways_agree(monkeypatch):
    g = torch.Generator().manual_seed(0)
    keys, candidates = torch.randint(9, (4, 50), generator=g).double(), torch.rand(4, 50, generator=g) < 0.7
    counts = [torch.tensor(k) for k in (1, 40, 200)]
    selected = [first_k(keys, candidates, k) for k in counts]
    monkeypatch.setattr(_order, "kth_smallest", by_sorting)
    assert all(torch.equal(mine, first_k(keys, candidates, k)) for mine, k in zip(selected, counts))
