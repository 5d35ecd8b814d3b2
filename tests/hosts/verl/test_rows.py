"""The signal table of rows that verl's agent loops generated."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import rlx_plugins as rlx
from rlx_plugins.core.host import TOKEN_SIGNALS
from rlx_plugins.hosts.verl import columns
from rlx_plugins.hosts.verl.rows import Step, prompt_key, signal_table

EOS = 9


def nested(rows, dtype=torch.float32):
    return torch.nested.as_nested_tensor([torch.tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)


def verl_rows(order=(0, 1, 2, 3, 4)):
    """Two prompts with two rollouts each, a tool call in one, and one padding row of verl's; in any order."""
    rows = [
        # key, ids, mask, reward, extra, tag, prompt
        ("b_0_0", [1, 2, 9], [1, 1, 1], 1.0, {"accuracy": 1.0, "format": 0.0}, {"min_global_steps": 4}, "two"),
        ("b_1_0", [1, 2, 3, 4], [1, 0, 1, 1], 0.0, {"accuracy": 0.0, "format": None}, {"min_global_steps": 3}, "two"),
        ("a_0_0", [9], [1], float("nan"), {"accuracy": None, "format": 1.0}, {"min_global_steps": 4}, "one"),
        ("a_1_0", [5, 9], [1, 1], 1.0, {"accuracy": 1.0, "format": 1.0}, {"min_global_steps": 2}, "one"),
        ("pad00_0_0", [9], [0], 0.0, {"accuracy": 7.0, "format": 7.0}, {"is_padding": True}, "two"),
    ]
    rows = [rows[i] for i in order]
    scores = [[0.0] * (len(ids) - 1) + [reward] for _, ids, _, reward, *_ in rows]
    runs = [[2, 3], [2, 4]]
    extra = [
        {
            "reward_extra_info": {"score": r[3], **r[4], "answer": f"a{len(r[1])}"},
            "info_gain": [0.5] * sum(r[2]),
            "confidence": [0.1 * t for t in r[1]],
            "turn_ids": [5] * len(r[1]),
        }
        | ({"rlx_versions": runs} if r[0] == "b_1_0" else {})
        for r in rows
    ]
    messages = [[{"role": "user", "content": r[6]}] for r in rows]
    fields = {
        "responses": nested([r[1] for r in rows], torch.int64),
        "response_mask": nested([r[2] for r in rows], torch.int64),
        "rm_scores": nested(scores),
        "old_log_probs": nested([[-0.1 * t for t in r[1]] for r in rows]),
        "entropy": nested([[0.5] * len(r[1]) for r in rows]),
        "extra_fields": extra,
        "raw_prompt": messages,
        "data_source": ["x"] * len(rows),
        "extra_info": [{"prior": 0.25, "topic": r[6]} for r in rows],
        "domain": [len(r[6]) if r[6] == "one" else 7 for r in rows],
    }
    return columns.fields_dict(fields, len(rows)), [r[0] for r in rows], [r[5] for r in rows]


def table(order=(0, 1, 2, 3, 4), *, names=None, wanted=(), supplied=(), change=None):
    data, keys, tags = verl_rows(order)
    if change is not None:
        change(columns.as_list(data["extra_fields"]))
    return signal_table(
        data,
        keys,
        tags,
        Step(number=4, total=10, seed=3, version=4),
        eos=[EOS],
        temperature=0.7,
        success_threshold=0.5,
        component_names=names,
        wanted=frozenset(wanted),
        supplied=supplied,
        token_signals=TOKEN_SIGNALS,
    )


def test_padding_rows_of_verl_are_not_in_the_table():
    batch, place = table()
    assert batch.size == 4 and set(place.tolist()) == {0, 1, 2, 3}


def test_rows_do_not_depend_on_the_order_in_which_verl_keeps_them():
    one, _ = table()
    other, place = table((4, 2, 0, 3, 1))
    assert one.row_id.tolist() == other.row_id.tolist() and one.prompt_key == other.prompt_key
    assert one.response_ids.tolist() == other.response_ids.tolist()
    assert place.tolist() != sorted(place.tolist())


def test_signals_of_a_row():
    batch, place = table()
    row = place.tolist().index(1)  # the one with a tool call
    assert batch.response_ids[row].tolist() == [1, 2, 3, 4]
    assert batch.response_mask[row].tolist() == [True, False, True, True]
    assert batch.turn_ids[row].tolist() == [0, -1, 1, 1]
    assert batch.logp_old[row].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert not batch.finished[row] and batch.finished.sum() == 3
    assert batch.temperature.tolist() == pytest.approx([0.7] * 4)
    assert batch.groups.sizes.tolist() == [2, 2]


def test_staleness_is_known_by_token_where_the_client_told_and_by_row_otherwise():
    batch, place = table()
    by_row = {int(p): s for p, s in zip(place, batch.staleness.tolist())}
    assert by_row[1] == [1, 1, 0, 0]
    assert by_row[3][:2] == [2, 2] and by_row[0][:3] == [0, 0, 0]


def test_components_are_all_numbers_but_the_score_or_those_that_are_named():
    batch, place = table()
    assert batch.component_names == ("accuracy", "format")
    first = batch.reward_components[place.tolist().index(0)]
    assert first.tolist() == [1.0, 0.0] and torch.isnan(batch.reward_components).sum() == 2
    named, _ = table(names=["format"])
    assert named.component_names == ("format",) and named.reward_components.shape == (4, 1)
    with pytest.raises(
        rlx.DataError, match="'fromat', but the reward function returned accuracy, answer, format, score"
    ):
        table(names=["fromat"])


def test_an_unscorable_row_keeps_its_nan():
    batch, _ = table()
    assert torch.isnan(batch.rewards).sum() == 1 and batch.rewards.nansum() == 2


def test_dataset_columns_and_entries_of_extra_info_are_signals():
    batch, _ = table(wanted=("domain", "prior", "topic"))
    assert sorted(batch.domain.tolist()) == [3, 3, 7, 7]
    assert batch.prior.tolist() == [0.25] * 4 and set(batch.topic) == {"one", "two"}


def test_named_fields_of_agent_loop_and_reward_function_are_signals():
    names = ["info_gain", "confidence", "turn_ids", "answer"]
    batch, place = table(wanted=names, supplied=names)
    rows = {int(p): i for i, p in enumerate(place)}
    assert batch.info_gain[rows[1]] == [0.5] * 3 and batch.answer[rows[3]] == "a2"
    torch.testing.assert_close(batch.confidence[rows[0], :3], torch.tensor([0.1, 0.2, 0.9]))
    assert batch.turn_ids[rows[1]].tolist() == [5, -1, 5, 5] and batch.turn_ids.dtype == torch.int64
    unnamed, _ = table(wanted=["info_gain", "turn_ids"])
    assert "info_gain" not in unnamed and unnamed.turn_ids[rows[1]].tolist() == [0, -1, 1, 1]


def test_a_named_number_of_the_reward_function_is_no_component():
    batch, _ = table(wanted=["format"], supplied=["format"])
    assert batch.component_names == ("accuracy",) and batch.format.nansum() == 2


def test_fields_that_do_not_fit_their_rows_name_both():
    def shorten(extra):
        extra[1]["confidence"] = [0.5, 0.5]

    def forget(extra):
        del extra[1]["info_gain"]

    with pytest.raises(rlx.DataError, match=r"'confidence' of row \d \(prompt '\w+'\) has 2 entries .* of 4 tokens"):
        table(wanted=["confidence"], supplied=["confidence"], change=shorten)
    with pytest.raises(rlx.DataError, match=r"rlx.rollout_signals names 'info_gain', but row \d \(prompt '\w+'\)"):
        table(wanted=["info_gain"], supplied=["info_gain"], change=forget)


def test_several_outputs_of_one_agent_loop_are_refused():
    data, keys, tags = verl_rows()
    keys[1] = "b_0_1"
    with pytest.raises(rlx.DataError, match="one AgentLoopOutput per run"):
        signal_table(
            data, keys, tags, Step(0, 1, 0, 0), eos=[EOS], temperature=1.0, success_threshold=0.5,
            component_names=None, wanted=frozenset(),
        )  # fmt: skip


def test_a_prompts_key_is_its_column_or_a_hash_of_its_messages():
    message = [{"role": "user", "content": "1 + 1"}]
    assert prompt_key({"prompt_key": 7, "raw_prompt": message}) == "7"
    same = [prompt_key({"raw_prompt": list(message), "data_source": "x", "index": i}) for i in (0, 1)]
    assert same[0] == same[1] != prompt_key({"raw_prompt": message, "data_source": "y"})


def test_the_teachers_log_probs_are_those_of_the_response_tokens():
    data = columns.fields_dict(
        {
            "prompts": nested([[1, 1], [1, 1, 1]], torch.int64),
            "responses": nested([[5, 6], [7]], torch.int64),
            # entry t belongs to token t + 1, the last one to none
            "teacher_logprobs": torch.nested.nested_tensor_from_jagged(
                torch.tensor([0.0, -5, -6, 0, 0, 0, -7, 0])[:, None], torch.tensor([0, 4, 8])
            ),
        },
        2,
    )
    assert columns.teacher_log_probs(data, 3).tolist() == [[-5, -6, 0], [-7, 0, 0]]


def test_the_behaviour_of_stale_tokens_is_what_the_engine_reported():
    table = {
        "logp_old": torch.tensor([[-1.0, -1.0, -1.0, -1.0]]),
        "logp_rollout": torch.tensor([[-2.0, -2.0, torch.nan, -2.0]]),
        "staleness": torch.tensor([[0, 1, 1, 1]]),
    }
    assert columns.logp_behavior(table).tolist() == [[-1, -2, -1, -2]]
    recorded = torch.tensor([[torch.nan, torch.nan, torch.nan, -3.0]])
    assert columns.logp_behavior(table, recorded).tolist() == [[-1, -2, -1, -3]]


def test_nested_tensors_survive_padding():
    column = torch.arange(6.0).reshape(2, 3)
    assert columns.padded(columns.nest(column, torch.tensor([1, 3])), 4).tolist() == [[0, 0, 0, 0], [3, 4, 5, 0]]
    assert isinstance(columns.fields_dict({"a": column}, 2), TensorDict)
