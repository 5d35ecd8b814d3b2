"""Discounted sums of long rows, in blocks, against the recursion."""

import pytest
import torch

from rlx_plugins.advantages._discounted import BLOCK, Packing, discounted_returns, discounted_sums


def recursion(x, factor):
    out, last = torch.zeros_like(x), torch.zeros(len(x), dtype=x.dtype)
    for t in reversed(range(x.shape[1])):
        last = x[:, t] + factor * last
        out[:, t] = last
    return out


@pytest.mark.parametrize("width", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, BLOCK**2 + 1])
@pytest.mark.parametrize("factor", [[0.0, 0.7, 1.0], [0.95]], ids=["per row", "for all"])
def test_blocks_give_the_recursion(width, factor):
    x = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factor = torch.tensor(factor, dtype=torch.float64)
    torch.testing.assert_close(discounted_sums(x, factor), recursion(x, factor))


def test_masked_tokens_neither_earn_nor_discount():
    rewards = torch.tensor([[1.0, torch.nan, 2.0, 4.0], [torch.inf, 3.0, torch.nan, torch.nan]]).double()
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0]]).bool()
    want = torch.tensor([[1 + 0.5 * 2 + 0.25 * 4, 0, 2 + 0.5 * 4, 4], [0, 3, 0, 0]]).double()
    assert torch.equal(discounted_returns(rewards, mask, 0.5), want)


def test_packing_moves_the_tokens_of_the_mask_to_the_left_and_back():
    mask = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    x = torch.arange(1.0, 13.0).reshape(3, 4)
    packing = Packing(mask)
    packed = packing.pack(x)
    assert packed.tolist() == [[2, 4, 0, 0], [0] * 4, [9, 10, 11, 12]]
    assert torch.equal(packing.unpack(packed), torch.where(mask, x, 0))
