"""Group statistics against a plain loop, on ragged groups in any order, with entries left out."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import Segments
from rlx_plugins.core.segments import zscore

VALUES = st.one_of(st.floats(-10, 10), st.just(math.nan), st.just(math.inf))
ROWS = st.lists(st.tuples(st.integers(-3, 5), VALUES, st.booleans()), min_size=1, max_size=40)


def by_group(rows, *, use_where=True):
    groups = {}
    for g, x, ok in rows:
        groups.setdefault(g, [])
        if math.isfinite(x) and (ok or not use_where):
            groups[g].append(x)
    return dict(sorted(groups.items()))


def columns(rows):
    g, x, ok = zip(*rows, strict=True)
    return Segments(torch.tensor(g)), torch.tensor(x, dtype=torch.float64), torch.tensor(ok)


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_statistics_equal_a_loop_over_the_groups(rows):
    segments, x, ok = columns(rows)
    want = by_group(rows)
    assert segments.ids.tolist() == list(want)
    mean, std, n = segments.mean_std(x, ok)
    for i, values in enumerate(want.values()):
        assert n[i] == len(values)
        assert segments.sum(x, ok)[i] == pytest.approx(sum(values), abs=1e-9)
        assert mean[i] == pytest.approx(statistics.fmean(values) if values else 0, abs=1e-9)
        assert std[i] == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0, abs=1e-9)
        assert segments.std(x, ok, ddof=0)[i] == pytest.approx(statistics.pstdev(values) if values else 0, abs=1e-9)
        assert segments.min(x, ok)[i] == min(values, default=math.inf)
        assert segments.max(x, ok)[i] == max(values, default=-math.inf)
        median = float(segments.median(x, ok)[i])
        assert median == pytest.approx(statistics.median(values)) if values else math.isnan(median)


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_rank_counts_the_smaller_and_the_earlier_equal_ones(rows):
    segments, x, ok = columns(rows)
    rank = segments.rank(x, ok).tolist()
    counts = [ok_i and math.isfinite(v) for _, v, ok_i in rows]
    for i, (g, v, _) in enumerate(rows):
        before = [
            j
            for j, (h, u, _) in enumerate(rows)
            if h == g and counts[j] and (u < v or (u == v and j < i)) and counts[i]
        ]
        assert rank[i] == (len(before) if counts[i] else -1)


@settings(max_examples=50, deadline=None)
@given(ROWS, st.randoms())
def test_permuting_the_rows_permutes_the_scores(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    segments, x, _ = columns(rows)
    shuffled, y, _ = columns([rows[i] for i in order])
    torch.testing.assert_close(zscore(shuffled, y, 1e-6), zscore(segments, x, 1e-6)[order], rtol=0, atol=1e-9)


def test_sorted_and_unsorted_groups_give_the_same_index():
    segments = Segments(torch.tensor([2, 2, 7, 9, 9]))
    assert segments.index.tolist() == [0, 0, 1, 2, 2]
    assert Segments(torch.tensor([9, 2, 7, 2, 9])).index.tolist() == [2, 0, 1, 0, 2]
    assert segments.sizes.tolist() == [2, 1, 2]


def test_blocks_of_one_size_give_what_the_same_rows_give_in_another_order():
    g = torch.Generator().manual_seed(0)
    group = torch.arange(6).repeat_interleave(4)
    x = torch.randn(24, generator=g, dtype=torch.float64)
    x[[1, 2, 8, 9, 10, 11]] = torch.nan
    order = torch.randperm(24, generator=g)
    blocks, scattered = Segments(group), Segments(group[order])
    assert blocks.equal_size == 4 and scattered.equal_size is None
    for name in ("sum", "mean", "std", "min", "max", "count", "median"):
        want = getattr(scattered, name)(x[order])
        torch.testing.assert_close(getattr(blocks, name)(x), want, rtol=0, atol=1e-12, equal_nan=True)
    assert torch.equal(blocks.spread(blocks.ids), group)
    assert torch.equal(blocks.rank(x)[order], scattered.rank(x[order]))


def test_components_are_reduced_column_by_column():
    segments = Segments(torch.tensor([0, 0, 1]))
    x = torch.tensor([[1.0, math.nan], [3.0, 5.0], [4.0, 6.0]], dtype=torch.float64)
    mean, _, n = segments.mean_std(x)
    assert mean.tolist() == [[2.0, 5.0], [4.0, 6.0]]
    assert n.tolist() == [[2.0, 1.0], [1.0, 1.0]]


def test_zscore_is_zero_in_a_group_of_one_and_for_unscorable_rows():
    segments = Segments(torch.tensor([0, 1, 1, 1]))
    x = torch.tensor([3.0, 1.0, 2.0, math.nan], dtype=torch.float64)
    assert zscore(segments, x, 1e-6).tolist() == pytest.approx([0, -0.7071058, 0.7071058, 0])


def test_statistics_keep_the_dtype_but_half_precision_is_computed_in_float32():
    segments = Segments(torch.tensor([0] * 300))
    for dtype, expected in ((torch.float64, torch.float64), (torch.float32, torch.float32)):
        assert segments.mean(torch.ones(300, dtype=dtype)).dtype == expected
    half = torch.ones(300, dtype=torch.bfloat16)  # bfloat16 can't count beyond 256
    assert segments.count(half).tolist() == segments.sum(half).tolist() == [300.0]
    assert segments.mean_std(half)[0].dtype == torch.float32


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 50))
def test_equal_entries_have_exactly_their_value_as_mean_and_no_spread(value, n):
    mean, std, _ = Segments(torch.zeros(n, dtype=torch.int64)).mean_std(torch.full((n,), value))
    assert mean.tolist() == [value] and std.tolist() == [0.0]


def test_an_empty_batch_has_no_groups():
    assert len(Segments(torch.empty(0, dtype=torch.int64))) == 0


def test_group_ids_must_be_one_per_row():
    with pytest.raises(ValueError, match="one per row"):
        Segments(torch.zeros(2, 2, dtype=torch.int64))
