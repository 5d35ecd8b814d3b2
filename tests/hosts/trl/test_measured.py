"""The trainer behind `rlx run`: it trains as its parent does, counts tokens and fingerprints its data."""

import functools

import pytest
import torch
from trl_tiny import dataset, run, trainer, weights

from rlx_plugins.hosts.trl.measured import MeasuredTrainer, Spent, TokenBudget
from rlx_plugins.hosts.trl.run import MetricsLog, spent_before
from rlx_plugins.hosts.trl.trainer import RLXTrainer
from rlx_plugins.recipes.run_folder import RunFolder

PLAIN = {}
PLUGINS = {"clip": {"name": "ppo", "eps_low": 0.001, "eps_high": 0.001}}
SELECTOR = {"selector": {"name": "nat_urs", "p": 0.5}}
ALLOCATOR = {"allocator": {"name": "vigor", "first_wave": 2, "rounds": 2}}


class Watched(MeasuredTrainer):
    """Keeps what it measured of each batch, and the lengths of what was sampled."""

    def __init__(self, *args, **kwargs):
        self.batches, self.lengths = [], []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args, **kwargs):
        ids, logps = super()._generate_single_turn(*args, **kwargs)
        self.lengths += [len(row) for row in ids]
        return ids, logps

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        self.batches.append(dict(self.measured))
        return out


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A function that trains once per setting."""

    @functools.cache
    def train(name, seed=7, **changes):
        plugins = {"plain": PLAIN, "plugins": PLUGINS, "selector": SELECTOR, "allocator": ALLOCATOR}[name]
        data = dataset(24, domain=["a", "b", "b"] * 8)
        return run(
            model,
            tmp_path_factory.mktemp(name),
            Watched,
            plugins=plugins or None,
            seed=seed,
            train_dataset=data,
            **changes,
        )

    return train


@pytest.mark.parametrize("plugins", [None, PLUGINS])
def test_it_trains_exactly_as_its_parent(model, tmp_path, plugins):
    one = run(model, tmp_path / "a", RLXTrainer, plugins=plugins, max_steps=2)
    other = run(model, tmp_path / "b", MeasuredTrainer, plugins=plugins, max_steps=2)
    mine, theirs = weights(other), weights(one)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_arms_of_one_seed_see_the_same_prompts_and_another_seed_does_not(trained):
    plain = [b["prompts"] for b in trained("plain").batches]
    assert len(set(plain)) == 4
    for name in ("plugins", "selector", "allocator"):
        assert [b["prompts"] for b in trained(name).batches] == plain
    assert [b["prompts"] for b in trained("plain", seed=8).batches] != plain


def test_tokens_are_counted_as_they_are_sampled_and_as_they_are_trained(trained):
    for name in ("plain", "plugins", "allocator"):
        t = trained(name)
        assert t.spent.generated == sum(t.lengths) > 0
    assert trained("plain").spent.update == trained("plain").spent.generated
    assert trained("plugins").spent.update == trained("plugins").spent.generated
    half = trained("selector").spent
    assert 0.2 * half.generated < half.update < 0.8 * half.generated
    assert all(trained(name).spent.rollout_seconds > 0 for name in ("plain", "allocator"))


def test_update_tokens_count_every_pass_and_a_last_batch_that_is_cut_short(trained):
    t = trained("plain", num_iterations=2, max_steps=3)
    first, second = sum(t.lengths[:8]), sum(t.lengths[8:])
    assert len(t.lengths) == 16
    assert t.spent.update == 2 * first + second
    assert {b["tokens/uses"] for b in t.batches} == {2.0}


def test_plain_runs_and_runs_with_plugins_measure_the_same_things(trained):
    plain, plugins = trained("plain").batches[0], trained("plugins").batches[0]
    assert set(plain) == set(plugins)
    for name in ("groups/all_fail", "groups/distinct", "length/p99_over_p50", "prompts"):
        assert plain[name] == plugins[name], name  # the first batch is sampled by the same weights


def test_shares_of_domains_are_those_of_the_rows_and_of_the_data(trained):
    for name in ("plain", "allocator"):
        first = trained(name).batches[0]
        assert first["domain_target/a"] == pytest.approx(1 / 3)
        assert first["domain_share/a"] + first["domain_share/b"] == pytest.approx(1.0)


def test_a_token_budget_ends_the_run_after_the_batch_that_reaches_it(model, tmp_path):
    t = trainer(model, tmp_path, Watched, max_steps=20, num_iterations=2)
    t.add_callback(TokenBudget(t, generated=100))
    t.train()
    assert t.state.global_step % 2 == 0 and t.state.global_step < 20
    assert t.spent.generated >= 100 > t.spent.generated - sum(t.lengths[-8:])


@pytest.mark.parametrize("plugins", [None, PLUGINS], ids=["plain", "plugins"])
def test_a_run_resumed_at_its_end_makes_no_step(model, tmp_path, plugins):
    whole = {"plugins": plugins, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    ended = run(model, tmp_path, MeasuredTrainer, **whole)
    again = trainer(model, tmp_path, MeasuredTrainer, **whole)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 2 and again.spent == Spent()
    assert all(torch.equal(weights(ended)[name], value) for name, value in weights(again).items())


def test_a_run_resumed_with_its_budget_spent_makes_no_step(model, tmp_path):
    whole = {"max_steps": 20, "save_strategy": "steps", "save_steps": 1}
    ended = trainer(model, tmp_path, MeasuredTrainer, **whole)
    ended.add_callback(TokenBudget(ended, generated=1))
    ended.train()
    again = trainer(model, tmp_path, MeasuredTrainer, **whole)
    again.spent = ended.spent
    again.add_callback(TokenBudget(again, generated=1))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert ended.state.global_step == again.state.global_step == 1


def test_the_log_has_a_record_per_batch_with_the_clip_of_all_its_updates(model, tmp_path):
    folder = RunFolder.open(tmp_path / "run")
    t = trainer(model, tmp_path / "out", MeasuredTrainer, plugins=PLUGINS, num_iterations=2, max_steps=4)
    t.add_callback(MetricsLog(folder, t, 0.0, None))
    t.train()
    records = folder.records()
    clipped = [row["rlx/clip/clipped"] for row in t.state.log_history if "rlx/clip/clipped" in row]
    assert [r["step"] for r in records] == [1, 3]
    assert clipped[0] == clipped[2] == 0 and clipped[1] > 0  # nothing is clipped at a ratio of 1
    assert [r["rlx/clip/clipped"] for r in records] == pytest.approx([clipped[1] / 2, clipped[3] / 2])
    assert records[-1]["generated_tokens"] == t.spent.generated
    assert spent_before(folder, step=4)[0] == Spent(
        t.spent.generated, t.spent.update, pytest.approx(t.spent.rollout_seconds, abs=0.001)
    )
    assert spent_before(folder, step=0)[0] == Spent()
