"""Prompts one after the other."""

from rlx_plugins import Context, create

CTX = Context(0, 1, 1, 1, 1, {key: [0] for key in "abc"})


def test_prompts_come_in_the_order_of_the_dataset_and_again_from_the_beginning():
    sampler = create("sampler", "in_order")
    assert [sampler.draw(2, CTX) for _ in range(3)] == [["a", "b"], ["c", "a"], ["b", "c"]]


def test_without_repeating_the_last_draw_is_smaller_and_the_next_one_empty():
    sampler = create("sampler", "in_order", repeat=False)
    assert [sampler.draw(2, CTX) for _ in range(3)] == [["a", "b"], ["c"], []]


def test_a_draw_larger_than_the_dataset_goes_round():
    assert create("sampler", "in_order").draw(4, CTX) == ["a", "b", "c", "a"]


def test_a_resumed_sampler_goes_on_with_the_next_prompt():
    sampler, resumed = create("sampler", "in_order"), create("sampler", "in_order")
    sampler.draw(2, CTX)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.draw(1, CTX) == ["c"]


def test_an_empty_dataset_gives_no_prompts():
    assert create("sampler", "in_order").draw(2, Context(0, 1, 1, 1, 1, {})) == []
