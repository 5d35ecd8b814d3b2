"""The batch phase and the loss inside the trainer."""

from __future__ import annotations

import math

import pytest
import torch
from trl import GRPOTrainer
from trl_tiny import TRL_EQUIVALENT, dataset, digits, logs, lower, run, trainer, weights

import rlx_plugins as rlx
from rlx_plugins.hosts.trl import checkpoint


def test_a_selector_that_cuts_rows_shortens_the_training_forward(model, tmp_path, registered):
    @registered("selector", "test_first_half")
    class FirstHalf(rlx.Selector):
        cuts_rows = True

        def __call__(self, batch):
            first = torch.arange(batch.response_mask.shape[1]) < 4
            return {"weight": first.expand_as(batch.response_mask).float(), "kept_length": batch.group * 0 + 4}

    t = trainer(model, tmp_path, plugins={"selector": "test_first_half"}, max_steps=1, beta=0.1)
    seen = {True: [], False: []}
    t.model.register_forward_hook(
        lambda module, args, kwargs, out: seen[torch.is_grad_enabled()].append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    t.train()
    with_gradient = seen[True]
    longest_prompt = max(len(t.processing_class(p)["input_ids"]) for p in t.train_dataset["prompt"])
    assert len(with_gradient) == 1 and with_gradient[0] <= longest_prompt + 4
    assert math.isfinite(logs(t)[0]["loss"]) and logs(t)[0]["grad_norm"] > 0


def test_cut_rows_train_like_whole_rows_with_the_same_weights(model, tmp_path, registered):
    def first_tokens(name, cuts):
        @registered("selector", name)
        class First(rlx.Selector):
            cuts_rows = cuts

            def __call__(self, batch):
                weight = (torch.arange(batch.response_mask.shape[1]) < 3).expand_as(batch.response_mask).float()
                return {"weight": weight} | ({"kept_length": batch.group * 0 + 3} if cuts else {})

        return run(model, tmp_path / name, plugins={**TRL_EQUIVALENT, "selector": name}, optim="sgd", learning_rate=0.5)

    cut, whole = first_tokens("test_cut", True), first_tokens("test_whole", False)
    assert [r["loss"] for r in logs(cut)] == pytest.approx([r["loss"] for r in logs(whole)], abs=1e-6)
    for name, weight in weights(cut).items():
        torch.testing.assert_close(weight, weights(whole)[name], atol=1e-6, rtol=0)


def test_dropped_rows_count_nowhere(model, tmp_path, registered):
    seen = []

    @registered("reward", "test_drop_worst")
    class DropWorst(rlx.Reward):
        def __call__(self, batch):
            return {"keep": batch.rewards > batch.rewards.min()}

    @registered("clip", "test_watching")
    class Watching(rlx.Clip):
        def __call__(self, terms):
            seen.append(terms.batch)
            return -terms.ratio * terms.advantages

    plugins = {"reward": "test_drop_worst", "clip": "test_watching"}
    run(model, tmp_path, plugins=plugins, max_steps=1, gradient_accumulation_steps=2)
    rows = torch.cat([batch.loss_weight.sum(1) for batch in seen])
    counts = torch.cat([batch.loss_count for batch in seen])
    assert len(rows) == 16 and (counts == rows).all() and 0 < (rows == 0).sum() < 8


def test_columns_stay_with_their_rows_through_trls_shuffle(model, tmp_path, registered):
    seen = []

    @registered("advantage", "test_row_number")
    class RowNumber(rlx.Advantage):
        provides = frozenset({"first_token", "text"})
        requires = frozenset({"entropy", "logp_old", "target"})

        def __call__(self, batch):
            assert torch.isfinite(batch.entropy[batch.response_mask]).all()
            return {
                "advantages": batch.spread(batch.row_id.float()),
                "first_token": batch.response_ids[:, 0].clone(),
                "text": [f"{key}/{int(target)}" for key, target in zip(batch.prompt_key, batch.target)],
            }

    @registered("clip", "test_looking")
    class Looking(rlx.Clip):
        def __call__(self, terms):
            seen.append(terms.batch)
            return terms.ratio * 0

    plugins = {"advantage": "test_row_number", "clip": "test_looking"}
    run(model, tmp_path, plugins=plugins, max_steps=1, gradient_accumulation_steps=2)
    assert len(seen) == 2
    for batch in seen:
        assert torch.equal(batch.first_token, batch.response_ids[:, 0])
        assert torch.equal(batch.advantages, batch.spread(batch.row_id.float()))
        assert batch.text == [f"{key}/{key}" for key in batch.prompt_key]  # the dataset's target is its row number


def test_auxiliary_and_distillation_terms_join_the_loss(model, tmp_path, registered):
    @registered("auxiliary", "test_entropy_term")
    class EntropyTerm(rlx.Auxiliary):
        coef: float = 0.5
        requires = frozenset({"entropy"})

        def __call__(self, terms, loss):
            return terms.entropy

    @registered("distill", "test_forward_kl")
    class ForwardKL(rlx.Distill):
        requires = frozenset({"logp_teacher"})
        capabilities = frozenset({"logits", "teacher_logits"})

        def from_logits(self, logits, columns):
            p = columns["teacher_logits"].log_softmax(-1)
            return {"kl": (p.exp() * (p - logits.log_softmax(-1))).sum(-1), "rebuilt": logits.log_softmax(-1)}

        def __call__(self, terms, loss):
            chosen = terms.logits["rebuilt"].gather(-1, terms.batch.response_ids[..., None])[..., 0]
            torch.testing.assert_close(chosen[terms.mask], terms.logp_new[terms.mask])
            return terms.logits["kl"]

    plugins = {"auxiliary": "test_entropy_term", "distill": "test_forward_kl", "distill_coef": 2.0}
    t = run(model, tmp_path, plugins=plugins, teacher_model=model, num_iterations=2, max_steps=2, temperature=0.7)
    first, second = logs(t)
    assert first["rlx/distill/loss"] == pytest.approx(0.0, abs=1e-6)  # the student starts as its teacher
    assert second["rlx/distill/loss"] > 1e-4
    assert first["rlx/auxiliary/test_entropy_term"] == pytest.approx(first["entropy"], rel=1e-5)
    assert first["loss"] == pytest.approx(0.5 * first["entropy"], abs=1e-4)


def test_a_quant_plugin_wraps_the_model_before_the_optimizer_is_built(model, tmp_path, registered):
    @registered("quant", "test_rounding")
    class Rounding(rlx.Quant):
        batches: int = rlx.state(0)

        def wrap(self, model):
            model.lm_head.register_forward_pre_hook(lambda module, args: ((args[0] * 64).round() / 64,))
            self.wrapped = True
            return model

        def observe(self, batch):
            self.batches += 1

    t = run(model, tmp_path, plugins={"quant": "test_rounding"}, max_steps=2)
    assert t.parts.one("quant").wrapped and t.parts.one("quant").batches == 2


def test_lora_with_a_reference_trains_its_adapter(model, tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    t = run(model, tmp_path, plugins=TRL_EQUIVALENT, peft_config=lora, beta=0.05, num_iterations=2)
    trained = {name: w for name, w in weights(t).items() if "lora_B" in name}
    assert trained and all(float(w.abs().max()) > 0 for w in trained.values())
    assert logs(t)[1]["kl"] > 0


def test_evaluation_is_trls(model, tmp_path, registered):
    @registered("advantage", "test_far_off")
    class FarOff(rlx.Advantage):
        def __call__(self, batch):
            return {"advantages": batch.spread(batch.rewards * 0 + 7)}

    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8, "max_steps": 2}
    settings |= {"eval_dataset": dataset(4), "learning_rate": 0.0}
    ours = run(model, tmp_path / "a", plugins={"advantage": "test_far_off"}, **settings)
    theirs = run(model, tmp_path / "b", cls=GRPOTrainer, **settings)

    def evaluated(t):
        (row,) = [row for row in t.state.log_history if "eval_loss" in row]
        return {k: v for k, v in row.items() if "time" not in k and "per_second" not in k}

    assert evaluated(ours) == evaluated(theirs) and logs(ours)[0]["loss"] == pytest.approx(-7.0)


def test_reward_functions_may_be_async_or_answer_none(model, tmp_path):
    async def slow(completions, **columns):
        return digits(completions)

    def sometimes(completions, **columns):
        return [None if i % 4 == 0 else 1.0 * i for i, _ in enumerate(completions)]

    def seldom(completions, **columns):
        return [None if i % 4 == 0 else 0.0 for i, _ in enumerate(completions)]

    plugins = {"advantage": {"name": "grpo"}}
    t = run(model, tmp_path / "a", plugins=plugins, reward_funcs=[sometimes, seldom], max_steps=1)
    assert logs(t)[0]["rlx/unscorable"] == 2.0
    t = run(model, tmp_path / "b", plugins=plugins, reward_funcs=[slow, lower], max_steps=1)
    assert "rewards/slow/mean" in logs(t)[0]


def test_a_stream_of_rows_trains_with_update_side_parts(model, tmp_path):
    stream = dataset(200).to_iterable_dataset()
    ours = run(model, tmp_path / "a", plugins=TRL_EQUIVALENT, train_dataset=stream, max_steps=2)
    theirs = run(model, tmp_path / "b", cls=GRPOTrainer, train_dataset=dataset(200).to_iterable_dataset(), max_steps=2)
    assert [r["loss"] for r in logs(ours)] == pytest.approx([r["loss"] for r in logs(theirs)], abs=1e-6)


def test_tokens_of_an_environment_are_not_trained(model, tmp_path, registered):
    seen = []

    @registered("advantage", "test_turns")
    class Turns(rlx.Advantage):
        requires = frozenset({"turn_ids", "logp_rollout"})

        def __call__(self, batch):
            seen.append(batch)
            return {"advantages": batch.spread(batch.rewards)}

    def rollouts(prompts, trainer):
        n = len(prompts)
        ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
        return {
            "prompt_ids": ids,
            "completion_ids": [[20, 21, 30, 31, 22, 1]] * n,
            "env_mask": [[1, 1, 0, 0, 1, 1]] * n,
            "logprobs": [[-1.0] * 6] * n,
        }

    run(model, tmp_path, plugins={"advantage": "test_turns"}, rollout_func=rollouts, max_steps=1)
    (batch,) = seen
    assert batch.turn_ids.tolist() == [[0, 0, -1, -1, 1, 1]] * 8
    assert batch.finished.all() and (batch.logp_rollout == -1).all()


def test_resuming_passes_over_a_checkpoint_that_was_not_finished(model, tmp_path):
    settings = {"plugins": {"advantage": "grpo"}, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = run(model, tmp_path, **settings)
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_')
    again = trainer(model, tmp_path, **settings)
    again.train(resume_from_checkpoint=True)
    assert checkpoint.latest(str(tmp_path)).endswith("checkpoint-3") and again.state.global_step == 3
    assert logs(again) == logs(whole)


def test_of_a_run_without_plugins_too_the_newest_whole_checkpoint_is_taken(model, tmp_path):
    run(model, tmp_path, save_strategy="steps", save_steps=1, max_steps=2)
    assert checkpoint.latest(str(tmp_path)) is None  # it has no state of plug-ins
    assert checkpoint.latest(str(tmp_path), parts=False).endswith("checkpoint-2")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    assert checkpoint.latest(str(tmp_path), parts=False).endswith("checkpoint-1")


def test_a_checkpoint_without_plugins_is_refused_where_a_part_has_state(model, tmp_path, registered):
    @registered("advantage", "test_stateful")
    class Stateful(rlx.Advantage):
        steps: int = rlx.state(0)

        def __call__(self, batch):
            self.steps += 1
            return {"advantages": batch.spread(batch.rewards)}

    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    run(model, tmp_path, **settings)
    with pytest.raises(rlx.ConfigError, match="written without plug-ins, but advantage test_stateful"):
        t = trainer(model, tmp_path, plugins={"advantage": "test_stateful"}, **settings)
        t.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    t = trainer(model, tmp_path, plugins={"advantage": "grpo"}, **settings)
    t.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert t.state.global_step == 2
