"""XRPO's seeding: who is seeded with which examples, what the prompt becomes, and what the corpus keeps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hints.xrpo import SEEDED
from rlx_plugins.hosts.table import PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.scripted import ScriptedExecutor

VECTOR = st.lists(st.integers(-3, 3).map(float), min_size=3, max_size=3)
CORPUS = st.lists(st.tuples(st.integers(0, 4), VECTOR, st.integers(1, 900)), max_size=6)


def plan(corpus, embedding, rewards=(0, 0), **params):
    inputs = {
        "rewards": list(rewards),
        "group": [0] * len(rewards),
        "prompt_embedding": [embedding],
        "corpus_prompt": [p for p, _, _ in corpus],
        "corpus_embedding": [e for _, e, _ in corpus],
        "corpus_tokens": [n for _, _, n in corpus],
    }
    return evaluate("hint", "xrpo", inputs, params)["plan"]


@settings(max_examples=80, deadline=None)
@given(CORPUS, VECTOR, st.integers(1, 3), st.integers(1, 1500))
def test_examples_are_the_most_similar_that_fit_and_never_the_own_solution(corpus, embedding, k, budget):
    chosen = plan(corpus, embedding, k=k, budget_tokens=budget)["0"]
    examples = chosen["examples"]
    assert len(examples) <= k and chosen["tokens"] == sum(n for *_, n in examples) <= budget
    assert [s for _, s, _ in examples] == sorted((s for _, s, _ in examples), reverse=True)
    assert all(corpus[i][0] != 0 for i, _, _ in examples)
    assert chosen["mode"] == ("seeded" if examples else "zero_shot")
    bigger = plan(
        [(p, [2 * x for x in e], n) for p, e, n in corpus], [0.5 * x for x in embedding], k=k, budget_tokens=budget
    )
    assert [i for i, _, _ in bigger["0"]["examples"]] == [i for i, _, _ in examples]


@pytest.mark.parametrize("scale", [0.7, 3.0, 7.0])
def test_the_length_of_an_embedding_is_nothing_and_equal_directions_go_by_age(scale):
    vector, query = [0.3, 0.1, 0.7], [0.1, 0.1, 0.9]
    corpus = [(1, vector, 3), (2, [scale * x for x in vector], 3)]
    assert [i for i, *_ in plan(corpus, query)["0"]["examples"]] == [0, 1]
    assert [i for i, *_ in plan(corpus, vector, min_sim=1.0)["0"]["examples"]] == [0, 1]


def test_a_group_with_a_success_is_not_seeded_and_an_unscorable_one_neither():
    corpus = [(1, [1.0, 0.0, 0.0], 3)]
    assert plan(corpus, [1.0, 0.0, 0.0], rewards=(0, 1)) == {}
    assert plan(corpus, [1.0, 0.0, 0.0], rewards=(None, None)) == {}
    assert plan(corpus, [1.0, 0.0, 0.0], rewards=(None, -1))["0"]["mode"] == "seeded"


def test_similarity_has_a_floor_and_nan_and_zero_vectors_do_no_harm():
    corpus = [(1, [0.0, 0.0, 0.0], 3), (2, [math.nan, 0.0, 1.0], 3), (3, [0.0, 1.0, 0.0], 3)]
    assert plan(corpus, [1.0, 0.0, 0.0])["0"]["examples"] == [[0, 0.0, 3], [2, 0.0, 3]]
    assert plan(corpus, [1.0, 0.0, 0.0], min_sim=0.1)["0"]["mode"] == "zero_shot"


def test_an_example_too_long_for_the_rest_is_skipped_for_a_shorter_one():
    corpus = [(1, [1.0, 0.0, 0.0], 6), (2, [1.0, 0.1, 0.0], 7), (3, [0.0, 1.0, 0.0], 4)]
    assert [i for i, *_ in plan(corpus, [1.0, 0.0, 0.0], budget_tokens=10)["0"]["examples"]] == [0, 2]


def part(**params):
    return rlx.create("hint", "xrpo", **{"column": "e", **params})


def group(key="q", prompt=(5, 6), embedding=(1.0, 0.0)):
    return rlx.Group(f"{key}#0", key, list(prompt), extras={"e": list(embedding)})


def entry(key="other", question=(1, 2), answer=(3, 4), embedding=(1.0, 0.0)):
    e = torch.tensor(embedding, dtype=torch.float64)
    return {"prompt_key": key, "embedding": e, "question": list(question), "answer": list(answer)}


def test_the_most_similar_example_comes_first_and_the_prompt_last():
    hint = part()
    hint.corpus = [entry("a", (1,), (2,), (0.5, 1.0)), entry("b", (3,), (4,))]
    assert hint.augmented(group()) == [3, 4, 1, 2, 5, 6]


def test_a_long_example_loses_the_end_of_its_reasoning():
    hint = part(max_example_tokens=6, answer_tokens=2)
    hint.corpus = [entry(question=(1, 2), answer=(11, 12, 13, 14, 15, 16))]
    assert hint.augmented(group())[:6] == [1, 2, 11, 12, 15, 16]
    assert part(max_example_tokens=6, answer_tokens=0).replace()._cut(hint.corpus[0], 3) == [1, 2, 11]


def test_examples_that_do_not_fit_the_models_prompt_are_dropped_from_the_last():
    hint = part(max_prompt_tokens=7)
    hint.corpus = [entry("a"), entry("b", embedding=(1.0, 0.2))]
    assert [e.index for e in hint.chosen(group())] == [0]
    assert part(max_prompt_tokens=1).chosen(group()) == []


def test_the_corpus_keeps_the_shortest_success_of_each_prompt_and_the_newest_entry():
    hint = part()
    ctx = rlx.Context(0, 9, 1, 2, 9, {})
    for step, lengths in enumerate(((3, 2, 1), (5, 4, 1))):
        g = group()
        for r, n, reward in zip(g.start(3), lengths, (1.0, 1.0, 0.0)):
            r.segments, r.reward = [rlx.Segment([step] * n)], reward
            r.finish("eos")
        hint.observe([g], ctx)
    assert [(e["prompt_key"], e["question"], e["answer"]) for e in hint.corpus] == [("q", [5, 6], [1] * 4)]


def step(hint, allocator=None, reward=lambda r: 0.0, **settings):
    columns = {"e": [1.0, 0.0]}
    ctx = rlx.Context(0, 9, 1, 4, 2, {"q": [5, 6]}, ["q"], columns=lambda key: columns)
    parts = rlx.Parts({"hint": [hint], "allocator": [allocator] if allocator else []})
    ready = rlx.drive(rlx.rollout_program(parts, ctx), ScriptedExecutor(reward, **settings))
    return ready, ctx


def test_alone_it_adds_seeded_rollouts_once_and_trains_them_with_their_examples():
    hint = part()
    hint.corpus = [entry()]
    (g,), ctx = step(hint)
    assert [(r.tag, r.prompt) for r in g.rollouts] == [("", [5, 6])] * 4 + [(SEEDED, [1, 2, 3, 4, 5, 6])] * 2
    batch = rlx.pack([g])
    assert batch.prompt_ids[5] == [1, 2, 3, 4, 5, 6] and batch.source[5] == SEEDED and len(batch.groups.ids) == 1
    assert ctx.metrics["hint/xrpo_seeded"] == 1


def test_beside_an_allocator_it_seeds_the_rollouts_of_later_rounds():
    hint = part(extra=0)
    hint.corpus = [entry()]
    allocator = rlx.create("allocator", "xrpo", first_wave=2, total_rollouts=6)
    (g,), _ = step(hint, allocator)
    assert [r.tag for r in g.rollouts] == ["", "", SEEDED, SEEDED, SEEDED, SEEDED]
    hint.corpus = [entry()]
    allocator = rlx.create("allocator", "xrpo", first_wave=2, total_rollouts=6)
    (g,), _ = step(hint, allocator, reward=lambda r: float(r.slot == 2))  # solved in the first round of two
    assert [r.tag for r in g.rollouts] == ["", "", SEEDED, SEEDED, "", ""]


def test_without_an_example_nothing_is_added():
    (g,), _ = step(part())
    assert len(g.rollouts) == 4


def test_trained_on_the_plain_prompt_a_row_says_what_it_was_sampled_with():
    hint = part(train_on="plain")
    hint.corpus = [entry()]
    (g,), _ = step(hint, logp=-0.5)
    batch = rlx.pack([g], dtype=torch.float64)
    assert batch.prompt_ids == [[5, 6]] * 6
    assert batch.logp_behavior[4:, 0].tolist() == [-0.5, -0.5] and bool(batch.logp_behavior[:4].isnan().all())
    hint.corpus = [entry()]
    with pytest.raises(rlx.DataError, match="hint xrpo: the engine reported no log-probabilities.*train_on=augmented"):
        step(hint, logp=None)


def test_the_embedding_is_checked():
    with pytest.raises(rlx.ConfigError, match="hint xrpo needs the signal 'embedding'"):
        rlx.build({"method": "xrpo"}, PROFILE)
    with pytest.raises(rlx.DataError, match="'e' of prompt 'q' must be a list of numbers, got 'text'"):
        part().embedding(rlx.Group("g", "q", [], extras={"e": "text"}))
    hint = part()
    hint.corpus = [entry()]
    with pytest.raises(rlx.DataError, match="has 3 numbers, those of the corpus 2"):
        hint.embedding(group(embedding=(1.0, 0.0, 0.0)))


def test_a_restored_corpus_chooses_what_the_saved_one_chose(tmp_path):
    hint = part()
    hint.corpus = [entry("a", embedding=(0.3, 1.0)), entry("b")]
    torch.save(hint.state_dict(), tmp_path / "state.pt")
    other = part()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.chosen(group()) == hint.chosen(group()) != []


def test_in_a_run_of_the_whole_method_failed_prompts_get_seeded():
    columns = {f"p{i}": {"embedding": [math.cos(i), math.sin(i)]} for i in range(24)}
    host = TableHost(24, columns=columns.__getitem__)
    config = {"method": {"name": "xrpo", "first_wave": 3, "bonus_coef": 1}}
    trainer = TableTrainer(config, host=host, groups=8, group_size=5, max_tokens=8, total_steps=6)
    trainer.run(3)
    assert trainer.log[0]["hint/xrpo_seeded"] == 0 and trainer.log[0]["hint/xrpo_corpus"] > 0
    assert any(entry["hint/xrpo_seeded"] > 0 for entry in trainer.log[1:])
    assert all(entry["rows"] == 40 for entry in trainer.log)
