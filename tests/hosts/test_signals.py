"""Fields that users supply: per-token lists are checked and padded, row values become columns."""

from __future__ import annotations

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.hosts import signals

LENGTHS = [3, 1]


def row(i):
    return f"row {i}"


def column(rows, name="confidence", width=4):
    return signals.token_column(name, rows, LENGTHS, width, row)


def test_numbers_and_unknown_entries_are_a_float_column_padded_with_nan():
    made = column([[0.5, None, 1], [2]])
    assert made.dtype == torch.float32 and torch.isnan(made).tolist() == [[0, 1, 0, 1], [0, 1, 1, 1]]
    assert made[0, 2] == 1 and made[1, 0] == 2
    assert torch.isnan(column([None, [1]])[0]).all()


def test_likeliest_tokens_are_cut_or_padded_to_one_number_of_them():
    ids, logp = signals.top_tokens([list(range(21)), [7]], [[-0.1 * i for i in range(21)], [None]])
    assert ids.shape == logp.shape == (2, signals.TOP_K) and (ids.dtype, logp.dtype) == (torch.int32, torch.float32)
    assert ids[0].tolist() == list(range(20)) and ids[1].tolist() == [7] + [-1] * 19
    assert float(logp[0, 19]) == pytest.approx(-1.9) and torch.isnan(logp[1]).all()
    columns = signals.top_columns([(ids, logp), None], width=3)
    assert columns["rollout_top_ids"][0, 0].tolist() == list(range(20))
    assert torch.isnan(columns["rollout_top_logp"][1]).all() and (columns["rollout_top_ids"][0, 2] == -1).all()
    assert [len(x) for x in signals.top_tokens([], [])] == [0, 0]


@pytest.mark.parametrize(
    ("rows", "padded"),
    [
        ([[7, 8, 9], [0]], [[7, 8, 9, -1], [0, -1, -1, -1]]),
        ([[True, False, True], [True]], [[1, 0, 1, 0], [1, 0, 0, 0]]),
    ],
)
def test_ids_are_padded_with_minus_one_and_masks_with_false(rows, padded):
    made = column(rows, "node_ids")
    assert made.tolist() == padded and made.dtype == (torch.bool if rows[0][0] is True else torch.int64)


def test_several_numbers_per_token_are_one_dimension_more():
    made = column([[[1.0, 2.0]] * 3, [[3.0, 4.0]]], "rollout_top_logp", width=3)
    assert made.shape == (2, 3, 2) and made[1, 0].tolist() == [3, 4] and torch.isnan(made[1, 1:]).all()
    with pytest.raises(rlx.DataError, match="'rollout_top_logp' has entries of different sizes"):
        column([[[1.0, 2.0]] * 3, [[3.0]]], "rollout_top_logp")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0.5, 0.5], [0.5]], "'confidence' of row 0 has 2 entries for a response of 3 tokens"),
        ([[0.5] * 3, 0.5], "'confidence' of row 1 has 0.5 for a response of 1 tokens"),
        ([[0.5] * 3, []], "'confidence' of row 1 has 0 entries"),
        ([["a"] * 3, [0.5]], "'confidence' of row 0 does not hold numbers"),
    ],
)
def test_a_list_of_another_length_names_field_and_row(rows, message):
    with pytest.raises(rlx.DataError, match=message):
        column(rows)


def table():
    mask = torch.tensor([[True, False, True], [True, False, False]])
    return {
        "prompt_key": ["a", "b"],
        "response_mask": mask,
        "turn_ids": torch.where(mask, 0, -1),
        "hint_mask": torch.zeros_like(mask),
    }


def test_a_users_turns_take_the_place_of_the_hosts_inside_the_mask():
    columns = table()
    fields = {"turn_ids": [[0, 5, 1], [2]], "hint_mask": [[1, 0, None], [0]]}
    signals.add_supplied(columns, fields, LENGTHS, signals.TOKEN_SIGNALS)
    assert columns["turn_ids"].tolist() == [[0, -1, 1], [2, -1, -1]] and columns["turn_ids"].dtype == torch.int64
    assert columns["hint_mask"].tolist() == [[True, False, False], [False] * 3]


def test_other_fields_are_numbers_by_row_or_lists_of_any_length():
    columns = table()
    fields = {"critical_turn": [1, None], "info_gain": [[0.1, 0.2], []], "answer": ["4", None]}
    signals.add_supplied(columns, fields, LENGTHS, signals.TOKEN_SIGNALS)
    assert columns["critical_turn"][0] == 1 and math.isnan(columns["critical_turn"][1])
    assert columns["info_gain"] == [[0.1, 0.2], []] and columns["answer"] == ["4", None]


def test_a_plugin_declares_its_own_signals_per_token():
    class Part:
        token_signals = frozenset({"surprise"})

    assert signals.per_token([Part()]) == signals.TOKEN_SIGNALS | {"surprise"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("info_gain", r"rollout_signals: expected names like \[info_gain,confidence\], got 'info_gain'"),
        ([1], "expected names"),
        (["info_gain", "logp_old"], "'logp_old', which the host makes itself"),
        (["rewards"], "'rewards', which the host makes itself"),
    ],
)
def test_names_of_fields_are_checked(names, message):
    with pytest.raises(rlx.ConfigError, match=message):
        signals.check_names("rollout_signals", names)
    assert signals.check_names("rollout_signals", ["info_gain", "turn_ids"]) == ("info_gain", "turn_ids")
