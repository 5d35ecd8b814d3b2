"""Token budgets: counted, kept in checkpoints, and the end of verl's loop."""

from types import SimpleNamespace

import pytest

import rlx_plugins as rlx
from rlx_plugins.hosts.verl.budget import TokenBudget
from rlx_plugins.hosts.verl.profile import options
from rlx_plugins.hosts.verl.trainer import RLXTrainer


def budget(**limits):
    return TokenBudget.of(options({"rlx": limits}), plugins=True)


def test_it_is_spent_when_one_of_its_numbers_is_reached():
    b = budget(max_generated_tokens=100, max_update_tokens=50)
    b.count(generated=60, update=20)
    assert not b.is_spent
    b.count(generated=10, update=30)
    assert b.is_spent and not budget().is_spent


def test_a_resumed_run_goes_on_from_what_was_spent(tmp_path):
    b = budget(max_generated_tokens=100)
    b.count(generated=60, update=20)
    b.save(tmp_path / "global_step_1")
    again = budget(max_generated_tokens=100)
    again.load(tmp_path / "global_step_1")
    assert again.spent == {"generated": 60, "update": 20}
    with pytest.raises(rlx.ConfigError, match="had no token budget"):
        again.load(tmp_path)
    budget().save(tmp_path / "global_step_2")
    assert not (tmp_path / "global_step_2").exists()


@pytest.mark.parametrize("tokens", [0, "many", 1.5])
def test_a_bad_number_is_refused(tokens):
    with pytest.raises(rlx.ConfigError, match="rlx.max_update_tokens: a number of tokens"):
        budget(max_update_tokens=tokens)


def test_a_run_without_plugins_can_not_keep_one():
    with pytest.raises(rlx.ConfigError, match="counted in runs with plug-ins"):
        TokenBudget.of(options({"rlx": {"max_update_tokens": 5}}), plugins=False)


class Loop:
    """verl's training loop, as far as a budget meets it: a step, then the end of the step or of the training."""

    def __init__(self, steps, save_freq, test_freq):
        self.total_training_steps, self.global_steps = steps, 0
        trainer = {"save_freq": save_freq, "test_freq": test_freq}
        self.config = SimpleNamespace(trainer=SimpleNamespace(**trainer))
        self.saved, self.validated = [], []
        self.logger = SimpleNamespace(log=lambda data, step: self.validated.append(step))

    def fit(self):
        self.global_steps += 1
        while self.global_steps <= self.total_training_steps:
            last = self.global_steps >= self.total_training_steps
            self._budget.count(generated=10, update=5)
            if last or self.global_steps % self.config.trainer.save_freq == 0:
                self._save_checkpoint()
            self.on_step_end()
            if last or self.global_steps % self.config.trainer.test_freq == 0:
                self.validated.append(self.global_steps)
            self.global_steps += 1
            if last:
                return
        self.on_train_end()

    def on_step_end(self):
        pass

    on_train_end = on_validate_begin = on_validate_end = on_step_end

    def _validate(self):
        return {}


class Budgeted(RLXTrainer, Loop):
    def __init__(self, budget, **loop):
        self._budget = budget
        Loop.__init__(self, **loop)

    def _save_checkpoint(self):
        self.saved.append(self.global_steps)


@pytest.mark.parametrize(
    ("tokens", "save_freq", "saved", "validated"),
    [(30, 2, [2, 3], [3]), (20, 2, [2], [2]), (30, 100, [3], [3]), (60, 100, [6], [6]), (999, 100, [6], [6])],
)
def test_the_last_step_of_a_budget_is_saved_and_validated_once(tokens, save_freq, saved, validated):
    t = Budgeted(budget(max_generated_tokens=tokens), steps=6, save_freq=save_freq, test_freq=6)
    t.fit()
    assert (t.saved, t.validated) == (saved, validated)
