"""A frozen value model: a function of the user's or a model with one value per token."""

from __future__ import annotations

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.hosts import value_model

transformers = pytest.importorskip("transformers")

PROMPTS, RESPONSES = [[5, 6, 7], [8], [9, 10]], [[11, 12], [13, 14, 15, 16], [17]]
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def counting(prompts, responses, masks):
    """The value before token j of a row: prompt tokens + policy tokens so far."""
    return [[len(p) + sum(mask[:j]) for j in range(len(tokens))] for p, tokens, mask in zip(prompts, responses, masks)]


def too_short(prompts, responses, masks):
    return [[0.0] * (len(tokens) - (i == 1)) for i, tokens in enumerate(responses)]


def one_row(prompts, responses, masks):
    return [[0.0]]


not_callable = 3


@pytest.fixture
def here(monkeypatch):
    """The functions of this file as `values_of_users:name`."""
    import sys
    import types

    module = types.ModuleType("values_of_users")
    module.__dict__.update({n: globals()[n] for n in ("counting", "too_short", "one_row", "not_callable")})
    monkeypatch.setitem(sys.modules, "values_of_users", module)


def load(name, **settings):
    value_model.check_value_model(name)
    return value_model.load_value_model(name, **{"vocabulary": 32, "device": "cpu", **settings})


def test_a_function_gives_the_value_before_every_response_token(here):
    made = value_model.value_columns(load("values_of_users:counting"), PROMPTS, RESPONSES, MASK)
    nan = float("nan")
    expected = torch.tensor([[3, 4, nan, nan], [1, 2, 3, 4], [2, nan, nan, nan]])
    torch.testing.assert_close(made["values"], expected, equal_nan=True)
    assert made["value_prior"].tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_short", r"shape \[3\] for row 1, whose response has 4 tokens"),
        ("one_row", "returned 1 rows for 3"),
    ],
)
def test_a_function_that_returns_another_number_of_values_is_told_which_row(here, name, message):
    with pytest.raises(rlx.DataError, match=message):
        value_model.value_columns(load(f"values_of_users:{name}"), PROMPTS, RESPONSES, MASK)


@pytest.mark.parametrize("head", ["TokenClassification", "SequenceClassification"])
def test_a_models_head_is_read_at_the_token_before(tmp_path, head):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, num_labels=1, num_key_value_heads=2, pad_token_id=0, **SIZES)
    model = getattr(transformers, f"LlamaFor{head}")(config).eval()
    model.save_pretrained(tmp_path)
    made = value_model.value_columns(load(str(tmp_path), batch_size=2), PROMPTS, RESPONSES, MASK)["values"]
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        hidden = model.model(torch.tensor([prompt + response])).last_hidden_state  # one row, no padding
        expected = model.score(hidden)[0, len(prompt) - 1 : -1, 0]
        torch.testing.assert_close(made[i, : len(response)], expected.detach())
        assert torch.isnan(made[i, len(response) :]).all()
    assert not made.requires_grad


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "expected a model's path or package.module:function"),
        ("values_of_users:gone", "has no 'gone'"),
        ("no_such_module:f", "can't be imported"),
        ("values_of_users:not_callable", "is no function"),
        ("/no/such/folder", "no model there"),
    ],
)
def test_what_is_no_value_model_is_refused(here, name, message):
    with pytest.raises(rlx.ConfigError, match=message):
        value_model.check_value_model(name)


def test_a_language_model_several_labels_or_another_vocabulary_are_refused(tmp_path):
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "lm")
    with pytest.raises(rlx.ConfigError, match="LlamaForCausalLM.*has no value head"):
        value_model.check_value_model(str(tmp_path / "lm"))
    config.num_labels = 2
    transformers.LlamaForTokenClassification(config).save_pretrained(tmp_path / "two")
    with pytest.raises(rlx.ConfigError, match="has 2 labels"):
        value_model.check_value_model(str(tmp_path / "two"))
    config.num_labels = 1
    transformers.LlamaForTokenClassification(config).save_pretrained(tmp_path / "one")
    with pytest.raises(rlx.ConfigError, match="knows 32 tokens, the policy 50"):
        load(str(tmp_path / "one"), vocabulary=50)
