"""The rollout program inside the trainer: its operations, and what becomes of its rows."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from trl_tiny import dataset, logs, run, trainer, weights

import rlx_plugins as rlx
from rlx_plugins import Forward


@pytest.fixture
def batches(registered):
    """The batches the advantage sees, in a list."""
    seen = []

    @registered("advantage", "test_watching")
    class Watching(rlx.Advantage):
        requires = frozenset({"rollout", "logp_old", "logp_rollout"})

        def __call__(self, batch):
            seen.append(batch)
            return {"advantages": batch.spread(batch.rewards)}

    return seen


def _run(model, tmp_path, plugins, **changes):
    return run(model, tmp_path, plugins={"advantage": "test_watching", **plugins}, **{"max_steps": 2, **changes})


def test_without_a_sampler_the_step_trains_the_prompts_of_trls_data_loader(model, tmp_path, registered, batches):
    @registered("temperature", "test_nothing")
    class Nothing(rlx.Temperature):
        def prepare(self, new, groups, ctx):
            pass

    plain = run(model, tmp_path / "a", plugins={"advantage": "grpo"}, max_steps=2)
    with_program = _run(model, tmp_path / "b", {"temperature": "test_nothing"})
    assert [sorted(set(b.prompt_key)) for b in batches] == _prompts_of(plain, 2)
    assert [b.size for b in batches] == [8, 8]
    assert logs(with_program)[0]["completions/max_length"] <= 10


def _prompts_of(trainer, steps):
    order = list(trainer._get_train_sampler(trainer.train_dataset))
    return [sorted({str(i) for i in order[8 * s : 8 * s + 8]}) for s in range(steps)]


def test_rollouts_pause_and_go_on_from_their_own_tokens(model, tmp_path, registered, batches):
    looks = []

    @registered("pruner", "test_looking")
    class Looking(rlx.Pruner):
        def pause(self, ctx):
            return [3, 6]

        def look(self, groups, ctx):
            paused = [r for g in groups for r in g.rollouts if r.state == "paused"]
            hidden = yield Forward(paused, "hidden")
            looks.append({r.slot: (list(r.tokens), h.shape) for r, h in zip(paused, hidden)})
            if len(looks) == 1:
                paused[0].state = "pruned"

    _run(model, tmp_path, {"pruner": "test_looking"}, max_steps=1, per_device_train_batch_size=4)
    first, second = looks[:2]
    assert {len(tokens) for tokens, _ in first.values()} == {3} and {len(t) for t, _ in second.values()} == {6}
    assert len(second) == len(first) - 1
    for slot, (tokens, shape) in second.items():
        assert tokens[:3] == first[slot][0] and shape == (32,)
    rows = {r.slot: r.tokens for r in batches[0].rollout}
    assert all(rows[slot][:6] == tokens for slot, (tokens, _) in second.items())
    assert batches[0].size == 3


def test_a_context_is_sampled_with_and_trained_without(model, tmp_path, registered, batches):
    scored = {}

    @registered("hint", "test_context")
    class Context(rlx.Hint):
        token_columns = frozenset({"help"})

        def prepare(self, new, groups, ctx):
            for r in new:
                r.context = groups[r.group].extras["help"]

        def annotate(self, groups, ctx):
            rows = [r for g in groups for r in g.done()]
            for r, logp in zip(rows, (yield Forward(rows, "logp"))):
                scored[r.group, r.slot] = logp

    data = dataset(help=["(help)"] * 24)
    t = _run(model, tmp_path, {"hint": "test_context"}, train_dataset=data, max_steps=1)
    (batch,) = batches
    assert batch.helped.all() and t.processing_class.decode(batch.rollout[0].context) == "(help)"
    plain = t.processing_class(data[int(batch.prompt_key[0])]["prompt"])["input_ids"]
    assert batch.prompt_ids[0] == plain
    for i, r in enumerate(batch.rollout):
        n = len(r)
        helped = torch.tensor(scored[r.group, r.slot])
        torch.testing.assert_close(batch.logp_rollout[i, :n], helped, atol=1e-5, rtol=0)  # the engine saw the context
        assert (batch.logp_old[i, :n] - helped).abs().max() > 1e-3  # training does not


def test_entropies_during_the_rollout_are_those_of_the_batch(model, tmp_path, registered, batches):
    found = {}

    @registered("allocator", "test_uncertain")
    class Uncertain(rlx.Allocator):
        requires = frozenset({"entropy"})
        capabilities = frozenset({"forward:entropy"})

        def more(self, idle, ctx):
            rows = [r for g in idle for r in g.rollouts]
            entropies = yield Forward(rows, "entropy")
            found.update(((r.group, r.slot), e) for r, e in zip(rows, entropies))
            return [r for g in idle if not g.rollouts for r in g.start(2)]

    _run(model, tmp_path, {"allocator": "test_uncertain"}, max_steps=1)
    (batch,) = batches
    assert len(found) == batch.size == 4
    for i, r in enumerate(batch.rollout):
        torch.testing.assert_close(batch.entropy[i, : len(r)], torch.tensor(found[r.group, r.slot]))


def test_a_banned_token_is_not_sampled_where_it_is_banned(model, tmp_path, registered, batches):
    banned = list(range(2, 40))

    @registered("hint", "test_ban")
    class Ban(rlx.Hint):
        capabilities = frozenset({"ban_tokens"})

        def prepare(self, new, groups, ctx):
            for r in new:
                r.banned = banned if r.slot % 2 else []

    _run(model, tmp_path, {"hint": "test_ban"}, max_steps=2)
    rows = [r for batch in batches for r in batch.rollout]
    assert all(r.tokens[0] not in banned and r.banned == [] for r in rows if r.slot % 2)
    assert any(t in banned for r in rows if r.slot % 2 for t in r.tokens[1:])
    assert any(r.tokens[0] in banned for r in rows if not r.slot % 2)


def test_rollouts_are_forked_where_the_policy_has_become_less_certain(model, tmp_path, batches):
    own = {"total_rollouts": 6, "first_wave": 3, "measured_tokens": 1, "boundary_tokens": list(range(3, 40))}
    plugins = {"allocator": {"name": "arpo", **own}}
    t = _run(model, tmp_path, plugins, max_steps=1, generation_chunk=4, learning_rate=0.0)
    (batch,) = batches
    rows = {(r.group, r.slot): r for r in batch.rollout}
    assert batch.groups.sizes.tolist() == [6, 6] and logs(t)[0]["rlx/allocator/arpo_forks"] >= 1
    for i, r in enumerate(batch.rollout):
        if not r.tag:
            continue
        slot, at = r.forked
        parent = rows[r.group, slot]
        assert r.tokens[:at] == parent.tokens[:at] and r.tokens[at - 1] in own["boundary_tokens"]
        assert not batch.response_mask[i, :at].any() and batch.response_mask[i, at:].any()
        if not parent.tag:
            logits = t.model(input_ids=torch.tensor([r.prompt + parent.tokens])).logits[0].detach()
            entropy = torch.distributions.Categorical(logits=logits).entropy()
            assert entropy[len(r.prompt) - 1 + at] > entropy[len(r.prompt) - 1]


def test_partners_with_a_summary_continue_the_roots_of_their_group(model, tmp_path, registered):
    seen = []

    @registered("reward", "test_seeing")
    class Seeing(rlx.Reward):
        requires = frozenset({"rollout", "hint_mask"})

        def __call__(self, batch):
            seen.append(batch)
            return {}

    method = {"name": "resum", "phrase": [20, 21], "trees": 2, "per_tree": 3}
    t = run(model, tmp_path, plugins={"method": method, "reward": "test_seeing"}, max_steps=1)
    (batch,) = seen
    assert batch.groups.sizes.tolist() == [6, 6] and logs(t)[0]["rlx/rows"] == 12
    made = [i for i in range(12) if batch.hint_mask[i].any()]
    assert made and all(batch.is_artificial_branch[i] == 1 for i in made)
    for i in made:
        slot, at = batch.rollout[i].forked
        (root,) = [r for r in batch.rollout if (r.group, r.slot) == (batch.rollout[i].group, slot)]
        assert batch.rollout[i].tokens[: at + 2] == [*root.tokens[:at], 20, 21]
        assert not batch.response_mask[i, : at + 2].any() and batch.response_mask[i, at + 2]


def test_a_hint_prefix_is_in_the_response_but_not_in_the_loss(model, tmp_path, registered, batches):
    @registered("hint", "test_prefix")
    class Prefix(rlx.Hint):
        def prepare(self, new, groups, ctx):
            for r in new:
                r.segments = [rlx.Segment([20, 21, 22], "hint")]

    _run(model, tmp_path, {"hint": "test_prefix"}, max_steps=1)
    (batch,) = batches
    assert batch.response_ids[:, :3].tolist() == [[20, 21, 22]] * 8
    assert batch.hint_mask[:, :3].all() and not batch.response_mask[:, :3].any()
    assert (batch.response_mask.sum(1) <= 7).all() and batch.response_mask.any(1).all()


def test_hinted_rollouts_follow_plain_ones_and_their_hints_are_trained(model, tmp_path, batches):
    solutions = [f"{i}{i}{i}..." for i in range(10, 34)]
    plugins = {"hint": {"name": "adhint", "noise_width": 0.0}, "selector": "adhint"}
    settings = {"reward_funcs": lambda completions, **columns: [float("..." in text) for text in completions]}
    t = _run(model, tmp_path, plugins, train_dataset=dataset(solution=solutions), max_steps=1, **settings)
    (batch,) = batches
    assert batch.helped.tolist() == [False, False, True, True] * 2 and batch.groups.sizes.tolist() == [4, 4]
    assert batch.source == (["fresh"] * 2 + ["hinted"] * 2) * 2
    hint = int(0.9 * 9 + 0.5)  # nine tokens, one of them left to the model; no plain rollout has three points
    for i in batch.helped.nonzero()[:, 0].tolist():
        told = solutions[int(batch.prompt_key[i])][:hint]
        assert batch.response_ids[i, :hint].tolist() == t.processing_class(told)["input_ids"]
        assert batch.hint_mask[i, :hint].all() and not batch.hint_mask[i, hint:].any()
        assert batch.response_mask[i, :hint].all() and batch.logp_rollout[i, :hint].isnan().all()
        ids = torch.tensor([batch.prompt_ids[i] + batch.rollout[i].tokens])
        assert batch.logp_old[i, :hint].isfinite().all() and ids.shape[1] > len(batch.prompt_ids[i]) + hint
    assert not batch.hint_mask[~batch.helped].any() and batch.rewards.tolist() == [0, 0, 0, 0] * 2
    (log,) = logs(t)
    assert (log["rlx/hint/adhint_difficulty"], log["rlx/hint/adhint_hinted"]) == (1, 1)
    assert log["rlx/selector/adhint/hint_tokens"] == 4 * hint


def test_every_row_has_its_own_temperature(model, tmp_path, registered, batches):
    @registered("temperature", "test_two")
    class Two(rlx.Temperature):
        def prepare(self, new, groups, ctx):
            for r in new:
                r.temperature = 1e-4 if r.slot < 2 else 3.0

    _run(model, tmp_path, {"temperature": "test_two"}, max_steps=1)
    for g in {r.group for r in batches[0].rollout}:
        cold = [r.tokens for r in batches[0].rollout if r.group == g and r.slot < 2]
        hot = [r.tokens for r in batches[0].rollout if r.group == g and r.slot >= 2]
        assert cold[0] == cold[1] and hot[0] != hot[1]


def test_with_chunks_a_group_moves_on_before_the_others_have_ended(model, tmp_path, registered):
    calls = []

    @registered("pruner", "test_early")
    class Early(rlx.Pruner):
        capabilities = frozenset({"until_group", "abort"})
        ends_generation = True

        def enough(self, ready, ctx):
            calls.append(len(ready))
            return len(ready) >= 1

        def close(self, left, ctx):
            states = {r.state for g in left for r in g.rollouts}
            ctx.log("pruner/parked", sum(r.state == "parked" for g in left for r in g.rollouts))
            assert states <= {"parked", "finished"}

    @registered("hint", "test_ended")
    class Ended(rlx.Hint):
        """The rows of the first group need one more token; the others ten."""

        def prepare(self, new, groups, ctx):
            for r in new:
                r.max_tokens = 1 if groups[r.group] is ctx.started[0] else 10

    plugins = {"pruner": "test_early", "hint": "test_ended"}
    t = run(model, tmp_path, plugins=plugins, generation_chunk=1, max_steps=1)
    assert logs(t)[0]["rlx/rows"] == 4 and logs(t)[0]["rlx/pruner/parked"] >= 1
    assert logs(t)[0]["completions/max_length"] == 1


def test_a_sampler_draws_from_the_whole_dataset_and_learns_from_the_update(model, tmp_path, registered, batches):
    told = []

    @registered("sampler", "test_first")
    class First(rlx.Sampler):
        capabilities = frozenset({"choose_prompts"})
        told: list = rlx.state(factory=list)

        def draw(self, n, ctx):
            assert len(ctx.prompts) == 24 and ctx.columns("p3")["target"] == 3
            return [f"p{i + len(self.told)}" for i in range(n)]

        def feedback(self, batch, ctx):
            self.told.append(sorted(set(batch.prompt_key)))
            told.append((ctx.step, float(batch.logp_old[batch.response_mask].mean())))

    data = dataset(prompt_key=[f"p{i}" for i in range(24)])
    t = _run(model, tmp_path, {"sampler": "test_first"}, train_dataset=data, max_steps=4, num_iterations=2)
    assert t.parts.one("sampler").told == [["p0", "p1"], ["p1", "p2"]]
    assert [step for step, _ in told] == [0, 2]


def test_rows_that_do_not_fill_the_batch_are_padded_with_rows_that_count_nowhere(model, tmp_path, registered, batches):
    @registered("allocator", "test_odd")
    class Odd(rlx.Allocator):
        def more(self, idle, ctx):
            return [r for g in idle if not g.rollouts for r in g.start(3 if g is ctx.started[0] else 2)]

    counts = []

    @registered("clip", "test_counting")
    class Counting(rlx.Clip):
        def __call__(self, terms):
            counts.append(terms.batch)
            return -terms.ratio * terms.advantages

    plugins = {"allocator": "test_odd", "clip": "test_counting"}
    t = _run(model, tmp_path, plugins, max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert batches[0].size == 5
    assert [b.size for b in counts] == [4, 4]
    assert sum(int((b.loss_count > 0).sum()) for b in counts) == 5
    assert logs(t)[0]["completions/min_length"] >= 1 and logs(t)[0]["rlx/rows"] == 5


def test_reward_functions_see_finished_rows_and_their_columns(model, tmp_path, registered):
    calls = []

    def reward(prompts, completions, completion_ids, target, log_extra, **columns):
        calls.append((len(prompts), sorted(set(target))))
        log_extra("length", [len(ids) for ids in completion_ids])
        assert all(prompt == f"{t}+{t * t}=" for prompt, t in zip(prompts, target))
        return [float(len(ids)) for ids in completion_ids]

    @registered("allocator", "test_rounds")
    class Rounds(rlx.Allocator):
        def more(self, idle, ctx):
            return [r for g in idle if len(g.rollouts) < 4 for r in g.start(2)]

        def observe(self, groups, ctx):
            for g in groups:
                assert [r.reward for r in g.rollouts] == [len(r) for r in g.rollouts]
                assert all(r.components == {"reward": r.reward} for r in g.rollouts)

    t = run(
        model, tmp_path, plugins={"allocator": "test_rounds"}, reward_funcs=reward, max_steps=1, log_completions=True
    )
    assert [n for n, _ in calls] == [4, 4]
    assert len(t._logs["extra"]["length"]) == len(t._logs["prompt"]) == 8


def test_truncated_rows_are_masked_where_trl_masks_them(model, tmp_path, registered, batches):
    @registered("hint", "test_bounded")
    class Bounded(rlx.Hint):
        def prepare(self, new, groups, ctx):
            for r in new:
                r.segments = [rlx.Segment([20, 1] if r.slot == 0 else [20], "reused", version=0)]

    _run(model, tmp_path, {"hint": "test_bounded"}, max_steps=1, mask_truncated_completions=True)
    (batch,) = batches
    assert batch.finished[0] and batch.response_mask[0].sum() == 2  # reused tokens that end in the end of sequence
    assert torch.equal(batch.response_mask.any(1), batch.finished) and not batch.finished.all()


def test_prompt_entropy_is_the_mean_over_the_prompts_own_tokens(model, tmp_path, registered):
    found = {}

    @registered("sampler", "test_entropies")
    class Entropies(rlx.Sampler):
        capabilities = frozenset({"choose_prompts", "forward:prompt_entropy"})

        def draw(self, n, ctx):
            keys = list(ctx.prompts)[: n + 3]
            asked = [rlx.Rollout(key, key, 0, list(ctx.prompts[key])) for key in keys]
            found.update(zip(keys, (yield Forward(asked, "prompt_entropy"))))
            return keys[:n]

    t = trainer(model, tmp_path, plugins={"sampler": "test_entropies"}, max_steps=1, learning_rate=0.0)
    t.train()
    for key, value in found.items():
        ids = torch.tensor([t.prompts[key]])
        logp = t.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        assert value == pytest.approx(float(-(logp.exp() * logp).sum(-1).mean().detach()), abs=1e-5)
    assert len(found) == 5


def test_chats_are_generated_and_scored_as_chats(model, tmp_path, registered, batches):
    @registered("hint", "test_chat")
    class Chat(rlx.Hint):
        def prepare(self, new, groups, ctx):
            for r in new:
                r.segments = [rlx.Segment([20], "hint")]

    def reward(prompts, completions, completion_ids, **columns):
        assert all(p[-1]["role"] == "user" and c[0]["role"] == "assistant" for p, c in zip(prompts, completions))
        characters = [len([t for t in ids if t > 5]) for ids in completion_ids]
        return [float(len(c[0]["content"]) == n) for c, n in zip(completions, characters)]

    chats = [[{"role": "user", "content": f"{i}+{i}="}] for i in range(8)]
    data = Dataset.from_dict({"prompt": chats})
    t = _run(model, tmp_path, {"hint": "test_chat"}, train_dataset=data, reward_funcs=reward, max_steps=1)
    (batch,) = batches
    assert (batch.rewards == 1).all()
    key = batch.prompt_key[0]
    assert t.processing_class.decode(batch.prompt_ids[0]) == f"<|user|>{key}+{key}=<|assistant|>"


def test_the_weights_do_not_move_when_every_advantage_is_zero(model, tmp_path, registered):
    @registered("hint", "test_idle")
    class Idle(rlx.Hint):
        def prepare(self, new, groups, ctx):
            pass

    settings = {"reward_funcs": lambda completions, **columns: [1.0] * len(completions), "optim": "sgd"}
    t = run(model, tmp_path / "a", plugins={"hint": "test_idle"}, max_steps=2, **settings)
    still = run(model, tmp_path / "b", plugins={"hint": "test_idle"}, max_steps=1, learning_rate=0.0, **settings)
    assert all(torch.equal(w, weights(still)[name]) for name, w in weights(t).items())


def test_a_phase_that_trains_on_stored_rollouts_generates_nothing(model, tmp_path, monkeypatch):
    from rlx_plugins.hosts.trl import RLXTrainer

    calls = []
    generate = RLXTrainer._generate_single_turn
    monkeypatch.setattr(
        RLXTrainer, "_generate_single_turn", lambda t, *a: (calls.append(t.state.global_step), generate(t, *a))[1]
    )
    method = {"name": "cadence", "marker": [30], "phase": 0.5, "min_samples": 1, "min_consistency": 0}
    settings = {"reward_funcs": lambda completions, **columns: [1.0] * len(completions), "max_completion_length": 40}
    t = run(model, tmp_path, plugins={"method": method, "reward": None}, num_generations=8, max_steps=4, **settings)
    stored = t.parts.one("replay").buffer
    assert stored and set(calls) == {0, 1}
    rows = sum(len(g["rollouts"]) for g in stored[:1])
    assert [entry["rlx/rows"] for entry in logs(t)] == [8, 8, rows, rows]
