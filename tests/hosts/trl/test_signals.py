"""Signals that only the user's side has: of the dataset, a rollout_func, a reward function or a value model."""

from __future__ import annotations

import pytest
import torch
from trl_tiny import dataset, digits, logs, run, trainer

import rlx_plugins as rlx

TOKENS = [20, 21, 30, 31, 22, 1]
TWO_TURNS = [1, 1, 0, 0, 1, 1]

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")


def rollouts(**fields):
    """A rollout_func of two turns with a tool's answer between them, and further fields."""

    def generate(prompts, trainer):
        n = len(prompts)
        ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
        made = {"prompt_ids": ids, "completion_ids": [TOKENS] * n, "logprobs": [[-1.0] * 6] * n}
        return made | {"env_mask": [TWO_TURNS] * n} | {name: make(n) for name, make in fields.items()}

    return generate


@pytest.fixture
def reading(registered):
    """`reading(*signals)`: an advantage that requires them; the batches it is given are appended to the list."""

    def make(*signals, **attributes):
        seen = []

        @registered("advantage", "test_reading")
        class Reading(rlx.Advantage):
            requires = frozenset(signals)

            def __call__(self, batch):
                seen.append(batch)
                return {"advantages": batch.spread(batch.rewards)}

        for name, value in attributes.items():
            setattr(Reading, name, value)
        return seen

    return make


def one_step(model, folder, **settings):
    run(model, folder, plugins={"advantage": "test_reading"}, max_steps=1, **settings)


def test_fields_of_a_rollout_func_are_signals_when_they_are_declared(model, tmp_path, reading):
    seen = reading("gain", "turn_gains", "confidence", "turn_ids")
    own = rollouts(
        gain=lambda n: [0.5 * i for i in range(n)],
        turn_gains=lambda n: [[0.1, 0.2]] * n,
        confidence=lambda n: [[0.01 * t for t in TOKENS]] * n,
        turn_ids=lambda n: [[0, 1, 1, 1, 2, 3]] * n,
    )
    settings = {"plugins": {"advantage": "test_reading"}, "rollout_func": own}
    with pytest.raises(rlx.ConfigError, match="needs the signal 'gain'.*rollout_signals"):
        trainer(model, tmp_path, **settings)
    names = ["gain", "turn_gains", "confidence", "turn_ids"]
    one_step(model, tmp_path, rollout_signals=names, rollout_func=own)
    (batch,) = seen
    assert batch.gain.tolist() == [0.5 * i for i in range(8)]
    assert batch.turn_gains == [[0.1, 0.2]] * 8
    torch.testing.assert_close(batch.confidence, batch.response_ids * 0.01)
    assert batch.turn_ids.tolist() == [[0, 1, -1, -1, 2, 3]] * 8


def test_the_engines_likeliest_tokens_are_the_policys_where_transformers_samples(model, tmp_path, reading):
    seen = reading("rollout_top_ids", "rollout_top_logp", "logp_rollout", "confidence")
    run(model, tmp_path, plugins={"advantage": "test_reading", "clip": "pdm"}, max_steps=1, temperature=0.7)
    (batch,) = seen
    mask, top = batch.response_mask, batch.rollout_top_logp
    assert top.shape == (*mask.shape, 20) and (top.diff(dim=-1) <= 0).all()
    listed = (batch.rollout_top_ids == batch.response_ids[..., None]) & mask[..., None]
    found = listed.nonzero(as_tuple=True)
    assert len(found[0]) > 0
    torch.testing.assert_close(top[found], batch.logp_rollout[found[:2]], atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.confidence, top[..., :5].exp().sum(-1))
    with pytest.raises(rlx.ConfigError, match="'rollout_top_ids'.*named in rollout_signals"):
        trainer(model, tmp_path, plugins={"clip": "pdm"}, rollout_func=rollouts())


def test_the_likeliest_tokens_are_unknown_for_hinted_rows(model, tmp_path, reading):
    seen = reading("rollout_top_ids", "rollout_top_logp")
    plugins = {"advantage": "test_reading", "clip": "pdm", "hint": "adaprefix"}
    run(model, tmp_path, plugins=plugins, train_dataset=dataset(solution=["12345"] * 24), max_steps=1)
    (batch,) = seen
    assert batch.helped.all() and torch.isnan(batch.rollout_top_logp).all()


def test_without_a_users_word_turns_follow_the_mask_and_confidence_is_computed(model, tmp_path, reading):
    seen = reading("confidence", "turn_ids")
    t = trainer(
        model,
        tmp_path,
        plugins={"advantage": "test_reading"},
        rollout_func=rollouts(),
        max_steps=1,
        temperature=0.7,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    with torch.no_grad():
        prompts = t.processing_class(list(t.train_dataset["prompt"]))["input_ids"]
        rows = [torch.tensor([ids + TOKENS]) for ids in prompts]
        logits = [t.model(input_ids=row).logits[0, -7:-1] / 0.7 for row in rows]
        expected = [x.softmax(-1).sort(-1).values[:, -5:].sum(-1) for x in logits]
    t.train()
    (batch,) = seen
    assert batch.turn_ids.tolist() == [[0, 0, -1, -1, 1, 1]] * 8
    for key, found in zip(batch.prompt_key, batch.confidence):
        torch.testing.assert_close(found, expected[int(key)], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (lambda n: [[0.5] * 6] * 2 + [[0.5] * 4] * (n - 2), r"'confidence' of row 2 \(prompt '\d+'\) has 4 entries.*6"),
        (lambda n: [[0.5] * 6] * (n - 1), r"names 'confidence', but completion 7 \(prompt '\d+'\) has no such field"),
    ],
    ids=["of another length", "not for every completion"],
)
def test_fields_that_do_not_fit_the_completions_name_field_and_row(model, tmp_path, reading, field, message):
    reading("confidence")
    with pytest.raises(rlx.DataError, match=message):
        one_step(model, tmp_path, rollout_signals=["confidence"], rollout_func=rollouts(confidence=field))


def test_a_plugins_own_signals_per_token_are_checked_too(model, tmp_path, reading):
    reading("surprise", token_signals=frozenset({"surprise"}))
    own = rollouts(surprise=lambda n: [[0.5]] * n)
    with pytest.raises(rlx.DataError, match="'surprise' of row 0 .* 1 entries for a response of 6 tokens"):
        one_step(model, tmp_path, rollout_signals=["surprise"], rollout_func=own)


@pytest.mark.parametrize("plugins", [{}, {"allocator": "vigor"}], ids=["batch by batch", "in the program"])
def test_what_a_reward_function_reports_is_a_signal(model, tmp_path, reading, plugins):
    seen = reading("answer", "steps")

    def reward(completions, log_extra, **columns):
        log_extra("answer", [text[:2] for text in completions])
        log_extra("steps", [len(text) for text in completions])
        return [float(len(text)) for text in completions]

    run(
        model,
        tmp_path,
        plugins={"advantage": "test_reading", **plugins},
        reward_funcs=reward,
        rollout_signals=["answer", "steps"],
        max_steps=1,
    )
    (batch,) = seen
    assert torch.equal(batch.steps, batch.rewards) and len({*batch.answer}) > 1
    assert all(len(text) <= 2 for text in batch.answer)


def test_a_reported_field_that_is_missing_is_named(model, tmp_path, reading):
    reading("answer")
    for plugins in ({}, {"allocator": "vigor"}):
        with pytest.raises(rlx.DataError, match="names 'answer', but .* has no such field.*log_extra"):
            run(
                model,
                tmp_path,
                plugins={"advantage": "test_reading", **plugins},
                rollout_signals=["answer"],
                reward_funcs=digits,
                max_steps=1,
            )


def test_a_dataset_column_is_a_signal_and_a_prior(model, tmp_path):
    priors = [0.1 * (i % 5) for i in range(24)]
    t = run(
        model,
        tmp_path,
        plugins={"advantage": {"name": "v05", "reward_min": 0, "reward_max": 2}},
        train_dataset=dataset(value_prior=priors),
        max_steps=1,
    )
    assert logs(t)[0]["grad_norm"] > 0 and t.needs.dataset == ("value_prior",) and t.value_model is None


@pytest.mark.parametrize("plugins", [{}, {"allocator": "vigor"}], ids=["batch by batch", "in the program"])
def test_a_value_model_supplies_values_and_priors(model, tmp_path, reading, plugins):
    seen = reading("values", "value_prior")
    chosen = {"advantage": "test_reading", **plugins}
    with pytest.raises(rlx.ConfigError, match="needs the signal 'value_prior': set value_model"):
        trainer(model, tmp_path, plugins=chosen)
    with pytest.raises(rlx.ConfigError, match="value_model 'trl_tiny:gone'"):
        trainer(model, tmp_path, plugins=chosen, value_model="trl_tiny:gone")
    t = run(model, tmp_path, plugins=chosen, value_model="trl_tiny:token_values", max_steps=1)
    (batch,) = seen
    lengths = [len(t.processing_class(t.train_dataset[int(k)]["prompt"])["input_ids"]) for k in batch.prompt_key]
    expected = 0.1 * torch.tensor(lengths)[:, None] + 0.01 * batch.response_ids
    torch.testing.assert_close(batch["values"][batch.response_mask], expected[batch.response_mask])
    torch.testing.assert_close(batch.value_prior, expected[:, 0])


def test_parts_that_plan_rollouts_are_told_the_prior_of_a_prompt(model, tmp_path, registered):
    told = {}

    @registered("allocator", "test_planning")
    class Planning(rlx.Allocator):
        requires = frozenset({"value_prior"})

        def more(self, idle, ctx):
            told.update((g.prompt_key, (len(g.prompt), g.extras["value_prior"])) for g in idle)
            return [r for g in idle if not g.rollouts for r in g.start(2)]

    run(model, tmp_path, plugins={"allocator": "test_planning"}, value_model="trl_tiny:token_values", max_steps=1)
    eos = 1
    assert told and all(prior == pytest.approx(0.1 * n + 0.01 * eos) for n, prior in told.values())


def test_truncated_completions_that_are_masked_keep_their_fields(model, tmp_path, reading):
    seen = reading("confidence", "values")

    def cut_off(prompts, trainer):
        made = rollouts(confidence=lambda n: [[0.25] * 6] * n)(prompts, trainer)
        return made | {"completion_ids": [[20, 21, 30, 31, 22, 23 + i % 2] for i in range(len(prompts))]}

    settings = {"rollout_signals": ["confidence"], "rollout_func": cut_off, "value_model": "trl_tiny:token_values"}
    one_step(model, tmp_path, mask_truncated_completions=True, **settings)
    (batch,) = seen
    assert not batch.response_mask.any() and (batch.confidence == 0.25).all() and torch.isfinite(batch["values"]).all()
