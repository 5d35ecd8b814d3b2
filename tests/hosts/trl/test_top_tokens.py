"""What vLLM reports of its likeliest tokens, with an engine of its own arithmetic in vLLM's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from trl_tiny import dataset, logs, run, trainer

import rlx_plugins as rlx
from rlx_plugins.hosts.signals import TOP_K
from rlx_plugins.hosts.trl.top_tokens import TopTokens, check_server

VOCABULARY = 40
PLUGINS = {"advantage": "test_reading", "clip": "pdm"}


class Engine:
    """Draws each token from a distribution that its place alone decides, and reports as vLLM does: `logprobs` tokens
    in the order of their rank, and the sampled one in its place among them."""

    def __init__(self, model, temperature, max_completion_length, logprobs, mode="colocate", **settings):
        self.temperature, self.max_completion_length, self.logprobs = temperature, max_completion_length, logprobs
        self.generator = torch.Generator().manual_seed(3)
        self.asked = []

    def sync_weights(self):
        pass

    def logp(self, place):
        """[VOCABULARY] float32: the engine's distribution at a place, at its temperature."""
        scores = torch.arange(VOCABULARY) * (1 + place % 3) * 7 % 31 / 10
        return (scores / self.temperature).log_softmax(-1)

    def generate(self, prompts, images, num_generations, profiler=None):
        self.asked.append(self.logprobs)
        completions, reported, ids = [], [], []
        for prompt in prompts:
            row = ([], [], [])
            for place in range(len(prompt), len(prompt) + self.max_completion_length):
                logp = self.logp(place)
                token = int(torch.multinomial(logp.exp(), 1, generator=self.generator))
                order = logp.argsort(descending=True, stable=True).tolist()
                listed = [t for rank, t in enumerate(order) if rank < self.logprobs or t == token]
                for values, new in zip(row, (token, logp[listed].tolist(), listed)):
                    values.append(new)
            for values, new in zip((completions, reported, ids), row):
                values.append(new)
        return prompts, completions, reported, ids


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    return {"use_vllm": True, "vllm_mode": "colocate", "max_steps": 1, "temperature": 0.7}


@pytest.fixture
def seen(registered):
    """Batches that the advantage `test_reading` was given."""
    batches = []

    @registered("advantage", "test_reading")
    class Reading(rlx.Advantage):
        requires = frozenset({"logp_rollout"})

        def __call__(self, batch):
            batches.append(batch)
            return {"advantages": batch.spread(batch.rewards)}

    return batches


@pytest.mark.parametrize(
    ("more", "chunk"),
    [({}, None), ({"allocator": {"name": "vigor", "rounds": 2}}, None), ({"sampler": "in_order"}, 4)],
    ids=["TRL generates", "the program", "in chunks"],
)
def test_the_columns_are_the_engines_not_the_trainers(model, tmp_path, vllm, seen, more, chunk):
    plugins = {**PLUGINS, **more}
    t = run(model, tmp_path, plugins=plugins, generation_chunk=chunk, **vllm)
    (batch,) = seen
    mask, ids, top = batch.response_mask, batch.rollout_top_ids, batch.rollout_top_logp
    assert ids.shape == top.shape == (*mask.shape, TOP_K) and ids.dtype == torch.int32
    assert t.vllm_generation.asked and set(t.vllm_generation.asked) == {TOP_K}
    prompts = [len(t.prompts[key]) for key in batch.prompt_key]
    listed = 0
    for b, place in mask.nonzero().tolist():
        expected = t.vllm_generation.logp(prompts[b] + place)
        torch.testing.assert_close(top[b, place], expected.topk(TOP_K).values, atol=1e-6, rtol=0)
        torch.testing.assert_close(expected[ids[b, place].long()], top[b, place])
        assert float(batch.logp_rollout[b, place]) == pytest.approx(
            float(expected[batch.response_ids[b, place]]), abs=1e-6
        )
        listed += int(batch.response_ids[b, place] in ids[b, place])
    assert 0 < listed < int(mask.sum())  # the sampled token is not always among the likeliest
    assert logs(t)[0]["rlx/clip/divergence"] > 0.5  # an untrained policy is not this engine


def test_the_engine_is_asked_for_more_only_where_a_part_reads_it(model, tmp_path, vllm, seen):
    t = run(model, tmp_path, plugins={"advantage": "test_reading", "correction": "tis"}, **vllm)
    assert set(t.vllm_generation.asked) == {0} and isinstance(t.vllm_generation, Engine)
    assert not any(seen[0].has(name) for name in ("rollout_top_ids", "rollout_top_logp"))


def test_confidence_stays_the_policys(model, tmp_path, vllm, registered):
    batches = []

    @registered("advantage", "test_reading")
    class Reading(rlx.Advantage):
        requires = frozenset({"confidence"})

        def __call__(self, batch):
            batches.append(batch)
            return {"advantages": batch.spread(batch.rewards)}

    run(model, tmp_path, plugins=PLUGINS, **vllm)
    (batch,) = batches
    engines = batch.rollout_top_logp[..., :5].exp().sum(-1)
    assert ((batch.confidence - engines).abs() > 0.01)[batch.response_mask].all()


def test_rows_no_engine_has_sampled_in_this_step_have_no_entries(model, tmp_path, vllm, seen):
    hinted = dataset(solution=["12345"] * 24)
    run(model, tmp_path, plugins={**PLUGINS, "hint": "adaprefix"}, train_dataset=hinted, **vllm)
    (batch,) = seen
    known = ~torch.isnan(batch.rollout_top_logp[..., 0])
    assert torch.equal(known, batch.response_mask & (batch.segment_ids > 0))  # hint tokens are nobody's


def test_an_engine_that_reports_no_others_is_an_error():
    engine = SimpleNamespace(logprobs=0, generate=lambda: ([[1]], [[2]], [[[-1.0]]], None))
    with pytest.raises(rlx.DataError, match="reports no likeliest tokens"):
        TopTokens(engine).generate()
    assert engine.logprobs == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"logprobs_mode": "raw_logprobs", "max_logprobs": 20}, "--logprobs-mode processed_logprobs"),
        ({"logprobs_mode": "processed_logprobs", "max_logprobs": 5}, "reports 5 log-probs.*--max-logprobs 20"),
    ],
)
def test_a_server_that_reports_other_log_probs_or_too_few_is_refused(model, message):
    def trainer_of(config, mode="server"):
        client = SimpleNamespace(get_server_info=lambda: {"model_config": config})
        return SimpleNamespace(
            vllm_mode=mode,
            accelerator=SimpleNamespace(is_main_process=True),
            vllm_generation=SimpleNamespace(vllm_client=client),
        )

    with pytest.raises(rlx.ConfigError, match=message):
        check_server(trainer_of(model))
    check_server(trainer_of(model, mode="colocate"))
    check_server(trainer_of({"logprobs_mode": "processed_logprobs", "max_logprobs": -1}))


def test_rollout_code_of_ones_own_returns_them_itself(model, tmp_path, vllm):
    with pytest.raises(rlx.ConfigError, match="'rollout_top_ids'.*named in rollout_signals"):
        trainer(model, tmp_path, plugins={"clip": "pdm"}, rollout_func=lambda prompts, t: {}, **vllm)
