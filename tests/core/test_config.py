"""The grammar of a configuration, and what is refused before anything runs."""

from dataclasses import dataclass

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core import registry
from rlx_plugins.core.config import describe, expand, merge_override
from rlx_plugins.core.errors import ConfigError

HOST = rlx.HostProfile(
    "test", frozenset({"logp_old"}), frozenset({"rounds"}), {"logp_rollout": "set use_vllm=True to get it"}
)


def update_part(base, **attributes):
    """A plug-in class of an update-side kind with the given class attributes."""
    takes_terms = base in (rlx.Clip, rlx.Ratio)
    call = (lambda self, terms: terms.ratio) if takes_terms else (lambda self, batch: {})
    body = {"__call__": call, "__doc__": "A part for tests.", **attributes}
    return dataclass(type("Part", (base,), body))


@pytest.fixture
def add():
    made = []

    def adder(kind, name, cls):
        made.append((kind, name))
        return rlx.register(kind, name)(cls)

    yield adder
    for kind, name in made:
        registry.forget(kind, name)


def test_a_name_a_mapping_and_a_chain_are_the_three_forms(add):
    add("reward", "a", update_part(rlx.Reward))
    add("reward", "b", update_part(rlx.Reward))
    parts = rlx.build(
        {"clip": {"name": "ppo", "eps_high": 0.28}, "advantage": "grpo", "reward": ["a", {"name": "b"}]}, HOST
    )
    assert parts.one("clip").eps_high == 0.28
    assert [p.name for p in parts["reward"]] == ["a", "b"]


def test_kinds_not_named_get_their_defaults():
    parts = rlx.build({"clip": "ppo"}, HOST)
    assert {p.kind: p.name for p in parts} == {
        "advantage": "grpo",
        "aggregate": "token_mean",
        "ratio": "token",
        "clip": "ppo",
    }
    assert parts.named == {"clip"}


def test_overrides_of_a_command_line_become_the_same_configuration():
    config = rlx.parse_overrides(
        ["advantage=dvao", "clip=bapo", "clip.target=1.0", "reward=[alp,lead]", "reward.1.l_min=8"]
    )
    assert config == {
        "advantage": "dvao",
        "clip": {"name": "bapo", "target": 1.0},
        "reward": [{"name": "alp"}, {"name": "lead", "l_min": 8}],
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("true", True),
        ("null", None),
        ("inf", float("inf")),
        ("[1, 2]", [1, 2]),
        ("[[1, 2], [], [x]]", [[1, 2], [], ["x"]]),
        ("'x'", "x"),
        ("[]", []),
    ],
)
def test_values_on_a_command_line_are_read_by_their_look(text, value):
    config = {"clip": "ppo"}
    merge_override(config, "clip.eps_low", rlx.core.config.read_value(text))
    assert config["clip"]["eps_low"] == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["clip"], "expected key=value"),
        (["clipp=ppo"], "unknown kind 'clipp'; did you mean 'clip'"),
        (["clip.eps=1"], r"name the plug-in first \(clip=NAME\)"),
        (["clip=ppo", "clip.1.eps=1"], r"expected clip\.parameter"),
        (["baseline=all", "baseline.x=1"], "has no parameters"),
    ],
)
def test_a_bad_override_is_explained(words, message):
    with pytest.raises(rlx.ConfigError, match=message):
        rlx.parse_overrides(words)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"clip": ["ppo", "ppo"]}, "clip takes one plug-in, got ppo, ppo"),
        ({"clip": 3}, "expected a name or"),
        ({"clip": {"eps_low": 1}}, "expected a name or"),
        ({"baseline": "some"}, "expected 'kept' or 'all'"),
        ({"distill_coef": "x"}, "expected a number"),
        (
            {"ratio": {"name": "token", "denominator": "logp_rollout"}},
            r"needs the signal 'logp_rollout': set use_vllm=True",
        ),
    ],
)
def test_a_bad_configuration_is_explained(config, message):
    with pytest.raises(rlx.ConfigError, match=message):
        rlx.build(config, HOST)


def test_a_signal_another_part_provides_is_enough(add):
    add("clip", "reads", update_part(rlx.Clip, requires=frozenset({"scale"})))
    add("advantage", "makes", update_part(rlx.Advantage, provides=frozenset({"scale"})))
    with pytest.raises(rlx.ConfigError, match="clip reads needs the signal 'scale'"):
        rlx.build({"clip": "reads"}, HOST)
    assert rlx.build({"clip": "reads", "advantage": "makes"}, HOST).one("clip").name == "reads"


def test_a_missing_capability_is_named_with_the_host(add):
    @dataclass
    class Peeks(rlx.Pruner):
        capabilities = frozenset({"pause"})

        def pause(self, ctx):
            return 4

    add("pruner", "peeks", Peeks)
    with pytest.raises(
        rlx.ConfigError, match="pruner peeks needs a host with the capability 'pause', which test lacks"
    ):
        rlx.build({"pruner": "peeks"}, HOST)


def test_a_method_expands_to_kinds_and_an_explicit_key_wins(add):
    @dataclass
    class Both(rlx.Method):
        eps: float = 0.3

        def expand(self):
            return {"clip": {"name": "ppo", "eps_low": self.eps}, "advantage": "grpo", "aggregate": "token_mean"}

    add("method", "both", Both)
    assert expand({"method": {"name": "both", "eps": 0.1}})["clip"]["eps_low"] == 0.1
    assert rlx.build({"method": "both", "clip": "ppo"}, HOST).one("clip").eps_low == 0.2
    with pytest.raises(rlx.ConfigError, match="method takes one name"):
        rlx.build({"method": ["both", "both"]}, HOST)


def test_two_parts_that_end_generation_are_refused(add):
    for name in ("first", "second"):
        add("pruner", name, dataclass(type("Ends", (rlx.Pruner,), {"ends_generation": True, "__doc__": "Ends."})))
    with pytest.raises(rlx.ConfigError, match="pruner first and pruner second both end generation early"):
        rlx.build({"pruner": ["first", "second"]}, HOST)


def test_a_batch_wide_allocator_is_refused_beside_a_part_that_ends_generation(add):
    add("pruner", "ends", dataclass(type("Ends", (rlx.Pruner,), {"ends_generation": True, "__doc__": "Ends."})))
    allocator = {"scope": "batch", "more": lambda self, idle, ctx: [], "__doc__": "Ranks."}
    add("allocator", "ranks", dataclass(type("Ranks", (rlx.Allocator,), allocator)))
    with pytest.raises(rlx.ConfigError, match="allocator ranks ranks all groups.*pruner ends ends generation early"):
        rlx.build({"pruner": "ends", "allocator": "ranks"}, HOST)


def test_two_weighing_corrections_are_refused_and_a_mask_may_chain(add):
    add("correction", "w1", update_part(rlx.Correction))
    add("correction", "w2", update_part(rlx.Correction))
    add("correction", "m", update_part(rlx.Correction, masks_only=True))
    with pytest.raises(rlx.ConfigError, match="correction w1 and correction w2 both weigh"):
        rlx.build({"correction": ["w1", "w2"]}, HOST)
    assert len(rlx.build({"correction": ["w1", "m"]}, HOST)["correction"]) == 2


def test_a_correction_against_the_ratios_own_denominator_is_refused(add):
    add("correction", "w", update_part(rlx.Correction))
    host = rlx.HostProfile("test", frozenset({"logp_old", "logp_rollout"}))
    with pytest.raises(rlx.ConfigError, match="the mismatch would count twice"):
        rlx.build({"correction": "w", "ratio": {"name": "token", "denominator": "logp_rollout"}}, host)


def test_a_selector_that_cuts_rows_is_refused_beside_a_rule_that_needs_them_whole(add):
    add("selector", "cuts", update_part(rlx.Selector, cuts_rows=True))
    add("ratio", "whole", update_part(rlx.Ratio, needs_full_rows=True))
    with pytest.raises(rlx.ConfigError, match="selector cuts cuts rows short, but ratio whole needs full rows"):
        rlx.build({"selector": "cuts", "ratio": "whole"}, HOST)


def test_a_part_that_fixes_a_kind_gets_it_and_refuses_another(add):
    add("clip", "wants_token", update_part(rlx.Clip, fixes={"ratio": "token", "correction": None}))
    add("ratio", "other", update_part(rlx.Ratio))
    add("correction", "w", update_part(rlx.Correction))
    assert rlx.build({"clip": "wants_token"}, HOST).one("ratio").name == "token"
    with pytest.raises(rlx.ConfigError, match="clip wants_token works with ratio=token only, got ratio=other"):
        rlx.build({"clip": "wants_token", "ratio": "other"}, HOST)
    with pytest.raises(rlx.ConfigError, match="does the work of a correction itself"):
        rlx.build({"clip": "wants_token", "correction": "w"}, HOST)


def counting():
    @dataclass
    class Counting(rlx.Advantage):
        """Counts its calls."""

        calls: int = rlx.state(0)

        def __call__(self, batch):
            self.calls += 1
            return {"advantages": torch.zeros(batch.response_mask.shape)}

    return Counting


def test_state_of_all_parts_is_saved_and_restored(add):
    add("advantage", "counting", counting())
    parts = rlx.build({"advantage": "counting"}, HOST)
    parts.one("advantage").calls = 5
    other = rlx.build({"advantage": "counting"}, HOST)
    other.load_state_dict(parts.state_dict())
    assert other.one("advantage").calls == 5


def test_a_checkpoint_of_other_plugins_is_refused():
    parts = rlx.build({"clip": "ppo"}, HOST)
    saved = {**parts.state_dict(), "selector/0/nat_rpc": {}}
    with pytest.raises(rlx.ConfigError, match="written with other plug-ins.*nat_rpc"):
        parts.load_state_dict(saved)


def test_describe_writes_every_parameter_out():
    parts = rlx.build({"clip": "ppo"}, HOST)
    assert describe(parts)["clip"] == {"name": "ppo", "eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}
    assert {p.kind: p.params() for p in rlx.build(describe(parts), HOST)} == {p.kind: p.params() for p in parts}


def test_a_reward_shaper_beside_an_advantage_that_does_not_read_it_is_refused(add):
    add("reward", "totals", update_part(rlx.Reward))
    add("advantage", "parts", update_part(rlx.Advantage, credits="reward_components"))
    with pytest.raises(
        rlx.ConfigError, match="reward totals shapes rewards, but advantage parts reads reward_components"
    ):
        rlx.build({"reward": "totals", "advantage": "parts"}, HOST)
    assert rlx.build({"reward": "totals", "advantage": "grpo"}, HOST)["reward"]


def test_a_method_of_which_every_kind_is_named_by_itself_is_refused():
    with pytest.raises(ConfigError, match="method lead stands for reward and advantage.*would do nothing"):
        expand({"method": "lead", "reward": "alp", "advantage": "grpo"})
    assert expand({"method": "lead", "reward": "alp"})["advantage"]
