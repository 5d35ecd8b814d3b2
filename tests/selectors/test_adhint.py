"""ADHint's selector: weights of hint tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate

TOKEN = st.tuples(st.sampled_from(["hint", "own", "masked"]), st.one_of(st.just(0.0), st.floats(0.01, 5)))


def weights(tokens, advantage=1.0, **params):
    inputs = {
        "hint_mask": [[int(kind == "hint") for kind, _ in tokens]],
        "response_mask": [[int(kind != "masked") for kind, _ in tokens]],
        "entropy": [[None if kind == "masked" else h for kind, h in tokens]],
        "advantages": [advantage],
    }
    return evaluate("selector", "adhint", inputs, params)["weights"][0].tolist()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(TOKEN, min_size=1, max_size=8),
    st.sampled_from([-1.0, 0.0, 1.0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 1e9]),
)
def test_weights_are_what_the_equations_say(tokens, advantage, modulate, preserve, tau):
    got = weights(tokens, advantage, modulate=modulate, preserve=preserve, tau=tau)
    own = [h for kind, h in tokens if kind == "own"]
    for (kind, h), w in zip(tokens, got, strict=True):
        want = float(kind != "masked")
        if kind == "hint":
            if modulate:
                mu = sum(own) / len(own) if own else 0.0
                want = math.exp(-abs(h - mu) / (tau * (mu + 1e-8))) if own else 0.0
            if preserve and advantage < 0:
                want = 0.0
        assert w == pytest.approx(want, abs=1e-9)


def test_where_the_policy_is_certain_only_certain_hint_tokens_count():
    assert weights([("hint", 0.0), ("hint", 0.1), ("own", 0.0)]) == [1, 0, 1]


def test_the_scale_of_the_entropies_does_not_matter():
    tokens = [("hint", 0.4), ("own", 1.0), ("own", 0.6)]
    assert weights(tokens) == pytest.approx(weights([(kind, 3 * h) for kind, h in tokens]))


def test_tokens_of_negative_advantage_are_preserved_one_by_one():
    batch = rlx.RolloutBatch(
        {
            "group": torch.tensor([0]),
            "rewards": torch.tensor([1.0]),
            "response_mask": torch.tensor([[True, True, True, True]]),
            "hint_mask": torch.tensor([[True, True, False, False]]),
            "entropy": torch.ones(1, 4),
            "advantages": torch.tensor([[-1.0, 1.0, -1.0, 1.0]]),
        }
    )
    columns = rlx.create("selector", "adhint")(batch)
    assert columns["weight"].tolist() == [[0, 1, 1, 1]]
    assert int(columns["hint_tokens"]) == 2 and float(columns["hint_weight"]) == 0.5


def test_weights_multiply_the_loss_and_leave_its_denominator():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "entropy", "hint_mask"}))
    parts = rlx.build({"advantage": "dr_grpo", "selector": "adhint"}, host)
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
            "group": torch.tensor([0, 0]),
            "keep": torch.ones(2, dtype=torch.bool),
            "response_mask": torch.ones(2, 2, dtype=torch.bool),
            "hint_mask": torch.tensor([[True, False]] * 2),
            "entropy": torch.tensor([[2.0, 1.0]] * 2, dtype=torch.float64),
            "logp_old": torch.zeros(2, 2, dtype=torch.float64),
        }
    )
    prepared = rlx.prepare(parts, batch)
    logp_new = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    loss, _ = rlx.policy_loss(parts, prepared.batch, logp_new, totals={"policy": prepared.batch.loss_count.sum()})
    (gradient,) = torch.autograd.grad(loss, logp_new)
    assert gradient[0].tolist() == pytest.approx([-0.5 * math.exp(-1) / 4, -0.5 / 4])
    assert gradient[1].tolist() == pytest.approx([0, 0.5 / 4])
    assert prepared.metrics["selector/adhint/hint_tokens"] == 2


def test_hints_outside_the_response_mask_change_nothing():
    assert weights([("masked", 1.0), ("own", 1.0)], -1.0) == [0, 1]
