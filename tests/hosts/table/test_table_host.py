"""The simulated host: what its engine and forward passes promise, and whole training runs on it."""

from dataclasses import dataclass

import pytest
import torch

from rlx_plugins import (
    Abort,
    ConfigError,
    Distill,
    Forward,
    Generate,
    Group,
    Hint,
    Replay,
    Segment,
    Temperature,
    pack,
    state,
)
from rlx_plugins.core.host import CAPABILITIES
from rlx_plugins.core.registry import forget, register
from rlx_plugins.hosts.table import CALL, EOS, GOOD, PROFILE, TableHost, TableTrainer
from rlx_plugins.hosts.table.policy import TOOL, score


def start(host, n=4, key="p0", max_tokens=12, **fields):
    group = Group(f"{key}#test", key, host.prompts[key], max_tokens)
    for r in group.start(n):
        r.state = "running"
        for name, value in fields.items():
            setattr(r, name, value)
    return group


def generate(host, *groups, until="all"):
    host.execute(Generate([r for g in groups for r in g.rollouts if r.state == "running"], until))


# ---- the engine


def test_rows_end_with_eos_or_at_the_length_bound_and_come_back_scored():
    host = TableHost(seed=1)
    group = start(host, 32, max_tokens=4)
    generate(host, group)
    assert {r.stop for r in group.rollouts} == {"eos", "length"}
    for r in group.rollouts:
        assert (r.stop == "eos") == (r.tokens[-1] == EOS)
        assert r.stop == "eos" or len(r) == 4
        assert (r.reward, r.components) == score(r.tokens, r.stop == "eos")


def test_the_reward_is_whether_half_of_the_steps_are_right():
    assert [score(tokens, True)[0] for tokens in ([1, 0, 2], [1, 0, 0, 2], [1], [2], [])] == [1, 0, 1, 0, 0]


def test_a_row_does_not_depend_on_what_runs_beside_it_or_on_interruptions():
    host, other = TableHost(), TableHost()
    alone, together = start(host, 1), start(other, 1)
    generate(host, alone)
    beside = start(other, 3, "p1")
    together.rollouts[0].pause_at = 2
    generate(other, together, beside)
    other.execute(Abort(together.rollouts))
    together.rollouts[0].pause_at, together.rollouts[0].state = None, "running"
    generate(other, together)
    assert together.rollouts[0].segments == alone.rollouts[0].segments


def test_another_seed_gives_other_rows():
    rows = []
    for seed in (0, 1):
        host = TableHost()
        host.engine.seed = seed
        group = start(host, 8)
        generate(host, group)
        rows.append([r.tokens for r in group.rollouts])
    assert rows[0] != rows[1]


def test_ticks_count_steps_of_the_engine_and_generated_its_tokens():
    host = TableHost(lengths=lambda r: [2, 5][r.slot])
    generate(host, start(host, 2))
    assert (host.engine.ticks, host.engine.generated) == (5, 7)


def test_until_group_returns_as_soon_as_one_group_has_settled():
    host = TableHost(lengths=lambda r: 2 if r.prompt_key == "p0" else 6)
    fast, slow = start(host), start(host, key="p1")
    generate(host, fast, slow, until="group")
    assert fast.idle and not slow.settled
    assert host.engine.ticks == 2


def test_a_row_pauses_at_its_length_unless_it_has_finished():
    host = TableHost(lengths=lambda r: [2, 6][r.slot])
    group = start(host, 2, pause_at=4)
    generate(host, group)
    assert [(r.state, len(r)) for r in group.rollouts] == [("finished", 2), ("paused", 4)]


def test_continuing_under_new_weights_opens_a_segment_of_the_new_version():
    host = TableHost(lengths=lambda r: 6)
    group = start(host, 1, pause_at=2)
    generate(host, group)
    host.engine.load(host.policy.theta + 1.0, version=3)
    group.rollouts[0].pause_at, group.rollouts[0].state = None, "running"
    generate(host, group)
    assert [(s.version, len(s.tokens), len(s.logp)) for s in group.rollouts[0].segments] == [(0, 2, 2), (3, 4, 4)]


def test_a_given_prefix_is_continued_in_a_segment_of_its_own():
    host = TableHost(lengths=lambda r: 4)
    group = start(host, 1, segments=[Segment([GOOD, GOOD], "hint")])
    generate(host, group)
    assert [(s.source, len(s.tokens)) for s in group.rollouts[0].segments] == [("hint", 2), ("policy", 2)]


def test_a_prefix_as_long_as_the_bound_finishes_without_a_tick():
    host = TableHost()
    group = start(host, 1, max_tokens=2, segments=[Segment([GOOD, GOOD], "hint")])
    generate(host, group)
    assert (group.rollouts[0].stop, host.engine.ticks) == ("length", 0)


def test_low_temperature_takes_the_likeliest_token():
    host = TableHost(resolution=0.0)
    group = start(host, 8, temperature=1e-3)
    generate(host, group)
    assert len({tuple(r.tokens) for r in group.rollouts}) == 1


def test_context_makes_right_steps_likelier_and_is_recorded_as_behaviour():
    host = TableHost(resolution=0.0)
    plain, helped = start(host, 64), start(host, 64, context=[GOOD])
    generate(host, plain, helped)
    assert sum(r.reward for r in helped.rollouts) > sum(r.reward for r in plain.rollouts)
    behavior = helped.rollouts[0].segments[0].logp_behavior
    assert behavior == pytest.approx(host.execute(Forward(helped.rollouts, "logp"))[0])
    assert plain.rollouts[0].segments[0].logp_behavior is None


def test_a_tool_call_ends_a_turn_and_its_output_is_not_trained():
    host = TableHost(turns=3)
    groups = [start(host, 16, key) for key in host.prompts]
    generate(host, *groups)
    batch = pack(groups, dtype=torch.float64)
    tool = batch.response_ids == TOOL
    assert bool(tool.any()) and not bool((tool & batch.response_mask).any())
    assert {int(t) for t in batch.turn_ids[batch.response_mask].unique()} == {0, 1, 2}
    for r in batch.rollout:
        calls = [s.tokens[-1] == CALL for s in r.segments if s.source == "policy"]
        assert all(calls[:-1])


# ---- forward passes and signals


def test_an_engine_without_rounding_reports_the_trainer_s_log_probs():
    host = TableHost(resolution=0.0)
    group = start(host, 4, temperature=0.7)
    generate(host, group)
    for r, logp in zip(group.rollouts, host.execute(Forward(group.rollouts, "logp")), strict=True):
        assert r.segments[0].logp == pytest.approx(logp)


def test_the_reference_stays_and_the_averaged_policy_follows_slowly():
    trainer = TableTrainer(host=TableHost(4, resolution=0.0), total_steps=5)
    before = trainer.host.policy.theta.detach().clone()
    trainer.run()
    host = trainer.host
    moved, lag = (host.policy.theta.detach() - before).abs(), (host.prox - before).abs()
    assert torch.equal(host.reference, before)
    assert 0 < float(lag.sum()) < 0.5 * float(moved.sum())


def test_rounded_weights_make_engine_and_trainer_differ_a_little():
    host = TableHost(resolution=0.1)
    group = start(host, 16)
    generate(host, group)
    batch = host.signals(pack([group], dtype=torch.float64), frozenset())
    gap = (batch.logp_old - batch.logp_rollout)[batch.response_mask].abs()
    assert 0 < float(gap.max()) <= 0.1


def test_hidden_states_are_vectors_and_prompt_entropy_is_a_number():
    host = TableHost()
    group = start(host, 2)
    generate(host, group)
    hidden = host.execute(Forward(group.rollouts, "hidden"))
    assert [h.shape for h in hidden] == [(6,), (6,)]
    first, second = host.execute(Forward(group.rollouts, "prompt_entropy"))
    assert first == second and 0 < first < torch.log(torch.tensor(4.0))


def test_the_entropy_of_each_token_is_that_of_the_batch_phase():
    host = TableHost(turns=2)
    group = start(host, 6)
    generate(host, group)
    batch = host.signals(pack([group], dtype=torch.float64), frozenset({"entropy"}))
    for row, found in enumerate(host.execute(Forward(group.rollouts, "entropy"))):
        torch.testing.assert_close(batch.entropy[row, : len(group.rollouts[row])], torch.tensor(found).double())


def test_a_banned_token_is_not_the_next_one_and_may_be_the_one_after():
    host, plain = TableHost(), TableHost()
    group, free = start(host, 40), start(plain, 40)
    for r in group.rollouts:
        r.banned = [GOOD]
    generate(host, group)
    generate(plain, free)
    assert all(r.tokens[0] != GOOD and r.banned == [] for r in group.rollouts)
    assert any(GOOD in r.tokens for r in group.rollouts) and any(r.tokens[0] == GOOD for r in free.rollouts)
    kept = [(a, b) for a, b in zip(group.rollouts, free.rollouts) if a.tokens[0] == b.tokens[0]]
    assert kept and all(a.segments[0].logp[0] == b.segments[0].logp[0] for a, b in kept)


def test_every_signal_of_the_profile_is_in_a_batch():
    host = TableHost()
    group = start(host)
    generate(host, group)
    batch = host.signals(pack([group], dtype=torch.float64), host.profile.signals)
    assert [s for s in sorted(host.profile.signals) if not batch.has(s)] == ["logp_new"]


def test_columns_of_the_dataset_are_signals():
    host = TableHost(columns=lambda key: {"level": int(key[1:]) * 2, "topic": f"about {key}"})
    groups = [start(host, 1, key) for key in ("p1", "p4")]
    generate(host, *groups)
    batch = host.signals(pack(groups), frozenset({"level", "topic", "domain"}))
    assert {"level", "topic", "domain", "solution"} <= host.profile.signals
    assert (batch.level.tolist(), batch.topic, batch.domain.tolist()) == ([2, 8], ["about p1", "about p4"], [1, 1])


def test_log_probs_of_tokens_that_are_not_the_model_s_are_nan():
    host = TableHost(turns=3)
    groups = [start(host, 16, key) for key in host.prompts]
    generate(host, *groups)
    batch = host.signals(pack(groups, dtype=torch.float64), frozenset())
    assert bool(torch.isnan(batch.logp_old[batch.response_ids == TOOL]).all())
    assert bool(torch.isfinite(batch.logp_old[batch.response_mask]).all())


def test_the_profile_names_capabilities_that_exist():
    assert PROFILE.capabilities <= set(CAPABILITIES)


def test_what_the_host_can_not_do_is_refused_with_the_remedy():
    @register("temperature", "patching")
    @dataclass
    class Patching(Temperature):
        capabilities = frozenset({"engine_patch"})

        def prepare(self, new, groups, ctx):
            pass

    try:
        with pytest.raises(ConfigError, match="use host trl or verl"):
            TableTrainer({"temperature": "patching"})
    finally:
        forget("temperature", "patching")


# ---- training


def test_grpo_learns():
    trainer = TableTrainer(host=TableHost(6), total_steps=30)
    rewards = [entry["reward"] for entry in trainer.run()]
    assert sum(rewards[:5]) / 5 < 0.65
    assert sum(rewards[-5:]) / 5 > 0.9


@pytest.mark.parametrize("pruner", ["april", {"name": "arrol", "length": 3, "warmup": 2}])
def test_grpo_learns_with_a_pruner(pruner):
    trainer = TableTrainer({"pruner": pruner}, host=TableHost(6), total_steps=30)
    trainer.run()
    host = trainer.host
    groups = [start(host, 16, key) for key in host.prompts]
    generate(host, *groups)
    assert sum(r.reward for g in groups for r in g.rollouts) / 96 > 0.85


def test_the_result_does_not_depend_on_the_number_of_micro_batches():
    runs = [TableTrainer({"aggregate": "token_mean"}, total_steps=3, micro_batches=m) for m in (1, 5)]
    losses = [[entry["loss"] for entry in run.run()] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert torch.allclose(runs[0].host.policy.theta, runs[1].host.policy.theta, atol=1e-12)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    a, b, c = (TableTrainer(seed=seed, total_steps=3).run() for seed in (0, 0, 1))
    assert a == b
    assert a != c


def test_a_student_follows_the_teacher_whose_logits_a_distillation_reads():
    @register("distill", "toward_teacher")
    @dataclass
    class TowardTeacher(Distill):
        capabilities = frozenset({"logits", "teacher_logits"})

        def from_logits(self, logits, columns):
            teacher, student = columns["teacher_logits"].log_softmax(-1), logits.log_softmax(-1)
            return {"kl": (teacher.exp() * (teacher - student)).sum(-1)}

        def __call__(self, terms, loss):
            return terms.logits["kl"]

    try:
        trainer = TableTrainer({"distill": "toward_teacher", "distill_coef": 10.0}, host=TableHost(6), total_steps=10)
        kl = [entry["distill/loss"] for entry in trainer.run()]
    finally:
        forget("distill", "toward_teacher")
    assert kl[-1] < 0.3 * kl[0]


def test_the_first_update_of_a_batch_has_ratio_one_and_later_epochs_do_not():
    one, three = TableTrainer(total_steps=1), TableTrainer(total_steps=1, epochs=3, learning_rate=1.0)
    assert one.run()[0]["clip/clipped"] == 0.0
    assert three.run()[0]["clip/clipped"] > 0.0


def test_an_engine_synchronised_every_third_step_gives_stale_rollouts():
    trainer = TableTrainer(total_steps=7, sync_every=3)
    assert [entry["off_policy"] for entry in trainer.run()] == [0, 1, 1, 0, 1, 1, 0]


def test_prompts_come_in_order_and_again_from_the_beginning():
    trainer = TableTrainer(host=TableHost(5), groups=3)
    drawn = []
    for _ in range(3):
        ctx = trainer.context()
        batch = trainer.rollouts(ctx)
        drawn.append(sorted(set(batch.prompt_key)))
        trainer.offered += len(ctx.started)
    assert drawn == [["p0", "p1", "p2"], ["p0", "p3", "p4"], ["p1", "p2", "p3"]]


RESUMED = {
    "plain": {},
    "april": {"sampler": "in_order", "pruner": "april"},
    "arrol": {"pruner": {"name": "arrol", "length": 3, "warmup": 1, "learning_rate": 0.01}},
    "both": {"sampler": "in_order", "pruner": [{"name": "arrol", "length": 3, "warmup": 1}, "april"]},
}


@pytest.mark.parametrize("config", RESUMED.values(), ids=RESUMED)
def test_a_killed_run_resumed_from_its_checkpoint_is_the_run(config, tmp_path):
    def trainer():
        return TableTrainer(config, total_steps=6, sync_every=2, epochs=2, groups=3)

    whole = trainer()
    whole.run()
    killed = trainer()
    killed.run(3)
    torch.save(killed.state_dict(), tmp_path / "checkpoint.pt")
    resumed = trainer()
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert resumed.run() == whole.log[3:]
    assert torch.equal(resumed.host.policy.theta, whole.host.policy.theta)
    assert resumed.parts.state_dict().keys() == whole.parts.state_dict().keys()


def test_a_checkpoint_does_not_change_with_the_run_it_was_taken_from():
    trainer = TableTrainer(RESUMED["both"], total_steps=4, groups=3)
    trainer.run(2)
    saved = trainer.state_dict()
    theta, parked = saved["host"]["theta"].clone(), len(saved["parts"]["pruner/1/april"]["parked"])
    trainer.run(2)
    assert torch.equal(saved["host"]["theta"], theta)
    assert len(saved["parts"]["pruner/1/april"]["parked"]) == parked


def test_parts_of_every_rollout_kind_run_together():
    @register("temperature", "by_slot")
    @dataclass
    class BySlot(Temperature):
        capabilities = frozenset({"row_temperature"})

        def prepare(self, new, groups, ctx):
            for r in new:
                r.temperature = 0.8 + 0.1 * (r.slot % 4)

    @register("hint", "quarter")
    @dataclass
    class Quarter(Hint):
        capabilities = frozenset({"continue", "context"})

        def prepare(self, new, groups, ctx):
            for r in new:
                if r.slot % 4 == 0:
                    r.segments = [Segment(groups[r.group].extras["solution"][:2], "hint")]
                if r.slot % 4 == 1:
                    r.context = groups[r.group].extras["hint"]

    @register("replay", "last_best")
    @dataclass
    class LastBest(Replay):
        best: list = state(factory=list)

        def complete(self, group, ctx):
            group.rollouts += [r for saved in self.best for r in Group.from_plain(saved).rollouts[:1]]

        def observe(self, groups, ctx):
            self.best = [g.to_plain() for g in groups[:1]]

    try:
        config = {
            "sampler": "in_order",
            "temperature": "by_slot",
            "hint": "quarter",
            "replay": "last_best",
            "pruner": [{"name": "arrol", "length": 4, "warmup": 0}, "april"],
        }
        trainer = TableTrainer(config, host=TableHost(turns=2), total_steps=4, groups=4, micro_batches=3)
        log = trainer.run()
        batch = trainer.rollouts(trainer.context())
    finally:
        for kind, name in (("temperature", "by_slot"), ("hint", "quarter"), ("replay", "last_best")):
            forget(kind, name)
    assert all(abs(entry["loss"]) < 10 and entry["rows"] > 0 for entry in log)
    assert bool(batch.hint_mask.any()) and bool(batch.helped.any())
    assert bool((batch.propensity < 1).any())
    assert len(batch.temperature.unique()) > 1
