"""Rows that the rollout program made, as verl's records and back."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl_tensors import PROFILE

import rlx_plugins as rlx
from rlx_plugins.core.config import build
from rlx_plugins.hosts.verl import columns, program
from rlx_plugins.testing.scripted import ScriptedExecutor

HOST = rlx.HostProfile(
    "verl",
    PROFILE.signals | {"rollout", "domain", "answer", "confidence", "value_prior"},
    frozenset({"rounds", "continue", "context", "forward:logp"}),
)


class Dataset:
    """Four prompts, one token each."""

    rows = [
        {"prompt_key": f"k{i}", "raw_prompt": [{"role": "user", "content": str(i)}], "data_source": "x", "domain": i}
        for i in range(4)
    ]
    dataframe = SimpleNamespace(column_names=["prompt_key"])

    def __getitem__(self, i):
        return dict(self.rows[i])

    def __len__(self):
        return len(self.rows)


class DataFrame(dict):
    column_names = ["prompt_key"]


@pytest.fixture
def source(monkeypatch):
    """`source(**plugins)`: the program in a trainer, with a script for an engine; the trainer; what it gave verl."""
    puts = []
    monkeypatch.setattr(program.tq, "kv_batch_put", lambda **given: puts.append(given))
    dataset = Dataset()
    dataset.dataframe = DataFrame(prompt_key=[row["prompt_key"] for row in Dataset.rows])
    offered = iter(range(4))

    def fetch():
        row = dataset[next(offered)]
        return tu.get_tensordict({name: [value] for name, value in row.items()})

    trainer = SimpleNamespace(
        config=OmegaConf.create(
            {
                "actor_rollout_ref": {"rollout": {"n": 2}},
                "data": {"max_response_length": 6, "max_prompt_length": 8},
            }
        ),
        rlx={"seed": 0, "success_threshold": 0.5, "rollout_signals": ["answer", "confidence"]},
        total_training_steps=5,
        train_dataset=dataset,
        tokenizer=lambda text, **kwargs: {"input_ids": [7]},
        eos=[9],
        _fetch_one_gen_batch=fetch,
        _context=None,
        value_model=None,
        reports_top_tokens=False,
    )

    def make(**plugins):
        made = program.RolloutSource(trainer, build(plugins, HOST), buffer=SimpleNamespace(sample=lambda **k: "stock"))
        made.prompts.__dict__["_build"] = lambda messages: [100 + int(messages[0]["content"])]
        script = ScriptedExecutor(lambda r: float(r.slot), length=lambda r: 1 + r.slot)
        script.generated = 0
        script.execute = script
        monkeypatch.setattr(made, "_engine", lambda ctx: script)
        return made, trainer, puts

    return make


def test_rows_are_written_as_verls_agent_loops_write_them(source):
    made, trainer, puts = source(allocator="vigor")
    meta, _ = made.sample(global_steps=3, partition_id="train", batch_size=2)
    (put,) = puts
    assert put["keys"] == meta.keys and len(meta.keys) == len(set(meta.keys)) and trainer._context.step == 2
    fields, i = put["fields"], 1
    rollout = made.batch.rollout[i]
    assert fields["prompts"][i].tolist() == [100] and fields["responses"][i].tolist() == rollout.tokens
    assert fields["rm_scores"][i].tolist() == [0.0] * (len(rollout) - 1) + [rollout.reward]
    assert fields["input_ids"][i].tolist() == [100, *rollout.tokens]
    assert put["tags"][i]["seq_len"] == 1 + len(rollout) and put["tags"][i]["min_global_steps"] == 2 - 2
    uids = columns.as_list(fields["uid"])
    assert [uids.count(u) for u in dict.fromkeys(uids)] == made.batch.groups.sizes.tolist()


def test_rows_find_their_log_probs_again_after_verl_has_moved_them(source):
    made, _, _ = source(allocator="vigor")
    meta, _ = made.sample(global_steps=1, partition_id="train", batch_size=2)
    n = len(meta.keys)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    keys = [meta.keys[i] for i in order] + ["pad00_0_0"]
    rows = [len(made.batch.rollout[i]) for i in order] + [1]
    old = torch.nested.as_nested_tensor(
        [torch.full((k,), float(i)) for i, k in zip([*order, 99], rows)], layout=torch.jagged
    )
    table, place = made.table({"old_log_probs": old, "entropy": old}, keys)
    assert table.size == n and [keys[p] for p in place.tolist()] == meta.keys
    first = table.logp_old[:, 0].tolist()
    assert first == [float(i) for i in range(n)] and torch.equal(table.logp_behavior, table.logp_old)
    assert table.correct.tolist() == (table.rewards > 0.5).tolist()


def test_rows_none_of_which_was_sampled_have_unknown_likeliest_tokens(source):
    made, trainer, _ = source(allocator="vigor")
    trainer.reports_top_tokens = True
    meta, _ = made.sample(global_steps=1, partition_id="train", batch_size=1)
    old = torch.nested.as_nested_tensor([torch.zeros(len(r)) for r in made.batch.rollout], layout=torch.jagged)
    table, _ = made.table({"old_log_probs": old}, meta.keys)
    assert table.rollout_top_logp.shape[:2] == table.response_mask.shape and torch.isnan(table.rollout_top_logp).all()


def test_columns_of_the_dataset_reach_parts_and_batch(source, registered):
    @registered("advantage", "test_by_domain")
    class ByDomain(rlx.Advantage):
        requires = frozenset({"domain", "rollout"})

        def __call__(self, batch):
            return {"advantages": batch.spread(batch.domain)}

    made, _, _ = source(advantage="test_by_domain")
    meta, _ = made.sample(global_steps=1, partition_id="train", batch_size=3)
    old = torch.nested.as_nested_tensor([torch.zeros(len(r)) for r in made.batch.rollout], layout=torch.jagged)
    table, _ = made.table({"old_log_probs": old}, meta.keys)
    assert sorted(set(table.domain.tolist())) == [0.0, 1.0, 2.0]


def test_imitated_hint_tokens_are_trained(source, registered):
    @registered("hint", "test_prefix")
    class Prefix(rlx.Hint):
        def prepare(self, new, groups, ctx):
            for r in new:
                r.segments = [rlx.Segment([5, 6], "hint", imitated=r.slot == 1)]

    made, _, puts = source(hint="test_prefix", selector="adhint")
    meta, _ = made.sample(global_steps=1, partition_id="train", batch_size=1)
    masks = [row.tolist() for row in puts[0]["fields"]["response_mask"].unbind()]
    assert masks == [[0, 0] + [1] * (len(masks[0]) - 2), [1] * len(masks[1])]
    zeros = torch.nested.as_nested_tensor([torch.zeros(len(m)) for m in masks], layout=torch.jagged)
    table, _ = made.table({"old_log_probs": zeros, "entropy": zeros + 1}, meta.keys)
    prepared = rlx.prepare(made.parts, table.with_columns(entropy=torch.where(table.hint_mask, 2.0, 1.0))).batch
    up = prepared.advantages[1, 0] > 0
    assert prepared.loss_weight[1, :2].tolist() == pytest.approx([math.exp(-1)] * 2 if up else [0, 0], abs=1e-6)
    assert (prepared.loss_weight[0, :2] == 0).all() and (
        prepared.loss_weight[1, 2:][table.response_mask[1, 2:]] == 1
    ).all()


def test_hinted_rollouts_follow_plain_ones_and_their_hints_are_trained(source, monkeypatch):
    monkeypatch.setitem(Dataset.rows[0], "solution", "worked")
    made, trainer, puts = source(method="adhint")
    trainer.tokenizer = lambda text, **kwargs: {"input_ids": [5, 6, 7]}
    meta, _ = made.sample(global_steps=1, partition_id="train", batch_size=1)
    plain, hinted = made.batch.rollout
    assert not plain.helped and plain.reward == 0 and hinted.tokens[:2] == [5, 6]  # failed: 0.9 of three, less the last
    fields = puts[0]["fields"]
    assert fields["response_mask"][1].tolist() == [1] * len(hinted)
    assert made.batch.hint_mask.tolist()[1] == [True] * 2 + [False] * (len(hinted) - 2)
    zeros = torch.nested.as_nested_tensor([torch.zeros(len(r)) for r in made.batch.rollout], layout=torch.jagged)
    table, _ = made.table({"old_log_probs": zeros, "entropy": zeros + 1}, meta.keys)
    assert table.helped.tolist() == [False, True] and table.logp_rollout[1, :2].isnan().all()
    prepared = rlx.prepare(made.parts, table)
    assert prepared.metrics["selector/adhint/hint_tokens"] == 2
    assert prepared.batch.loss_weight[1, : len(hinted)].tolist() == [1] * len(hinted)


def test_what_the_reward_function_says_of_a_row_is_a_signal(source, registered):
    @registered("advantage", "test_by_answer")
    class ByAnswer(rlx.Advantage):
        requires = frozenset({"answer", "confidence", "rollout"})

        def __call__(self, batch):
            return {"advantages": batch.spread(batch.rewards)}

    made, _, _ = source(advantage="test_by_answer")
    meta, _ = made.sample(global_steps=1, partition_id="train", batch_size=1)
    old = torch.nested.as_nested_tensor([torch.zeros(len(r)) for r in made.batch.rollout], layout=torch.jagged)
    for r in made.batch.rollout:
        r.extras |= {"answer": f"a{r.slot}", "confidence": [0.5 + r.slot] * len(r)}
    table, _ = made.table({"old_log_probs": old}, meta.keys)
    assert table.answer == ["a0", "a1"] and table.confidence[1].tolist() == [1.5, 1.5]
    made.batch.rollout[1].extras["confidence"] = [0.5]
    with pytest.raises(rlx.DataError, match=r"'confidence' of row 1 \(prompt 'k0'\) has 1 entries .* of 2 tokens"):
        made.table({"old_log_probs": old}, meta.keys)
    del made.batch.rollout[1].extras["answer"]
    with pytest.raises(rlx.DataError, match=r"rlx.rollout_signals names 'answer', but row 1 \(prompt 'k0'\)"):
        made.table({"old_log_probs": old}, meta.keys)


def test_parts_that_plan_rollouts_are_told_the_prior_of_a_prompt(source, registered):
    @registered("allocator", "test_planning")
    class Planning(rlx.Allocator):
        requires = frozenset({"value_prior"})

        def more(self, idle, ctx):
            return []

    made, trainer, _ = source(allocator="test_planning")
    asked = []
    trainer.value_model = lambda prompts, responses, masks: [asked.append(p) or [p[0] / 100] for p in prompts]
    assert [made.columns(key)["value_prior"] for key in ("k3", "k1", "k3")] == pytest.approx([1.03, 1.01, 1.03])
    assert asked == [[103], [101]]


def test_a_part_may_ask_for_any_prompt_of_the_dataset(source):
    made, _, _ = source(allocator="vigor")
    assert list(made.prompts) == ["k0", "k1", "k2", "k3"] and len(made.prompts) == 4
    assert made.prompts["k3"] == [103] and "k3" in made.prompts and "k9" not in made.prompts


def test_validation_is_the_stock_buffers(source):
    made, _, _ = source(allocator="vigor")
    assert made.sample(global_steps=1, partition_id="val", batch_size=4) == "stock"
