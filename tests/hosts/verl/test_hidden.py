"""Hidden states from verl's training workers are those of the model's own forward pass, row by row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from training_worker import ROWS, language_model, on_the_cpu, own_states, shard, worker_of

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import hidden


def stays(worker, loss_fn):
    """Nothing is left of a pass: no hook in the model, and the worker's own loss function."""
    training = worker.worker_dict["actor_rollout"].actor
    return training.loss_fn is loss_fn and not training.engine.module.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("batches", [{"rows": 1}, {"rows": 4}, {"tokens": 12}], ids=str)
def test_they_are_the_models_own(group, monkeypatch, packed, batches):
    on_the_cpu(monkeypatch)
    model, own = language_model(), object()
    expected = own_states(model, ROWS)
    worker = worker_of(shard(model, group), packed=packed, loss_fn=own, **batches)
    found = hidden.last_states(worker, ROWS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found[:, None] - found).norm(dim=-1).fill_diagonal_(1).min() > 0.1  # rows that could be told from another
    assert stays(worker, own)


def test_a_model_in_half_precision_answers_in_single(group, monkeypatch):
    on_the_cpu(monkeypatch)
    model = language_model().to(torch.bfloat16)
    expected = own_states(model, ROWS)
    found = hidden.last_states(worker_of(model, packed=False), ROWS)
    assert found.dtype == torch.float32 and expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.float(), atol=0, rtol=0)


def test_an_adapter_counts_even_on_the_head(group, monkeypatch):
    peft = pytest.importorskip("peft")
    on_the_cpu(monkeypatch)
    model = language_model()
    without = own_states(model, ROWS)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).eval()
    expected = own_states(model, ROWS)
    assert (expected - without).abs().max() > 0.01
    torch.testing.assert_close(hidden.last_states(worker_of(model, rows=2), ROWS), expected, atol=1e-5, rtol=0)


def test_nothing_stays_behind_a_pass_that_fails(group, monkeypatch):
    on_the_cpu(monkeypatch)
    own = object()
    worker = worker_of(language_model(), rows=2, loss_fn=own)
    with pytest.raises(IndexError):
        hidden.last_states(worker, [[1, 2], [99]])
    assert stays(worker, own)


def test_a_model_without_a_head_is_refused(group, monkeypatch):
    on_the_cpu(monkeypatch)
    for module in (torch.nn.Linear(2, 2), language_model().model):
        with pytest.raises(rlx.ConfigError, match=f"can't be read from {type(module).__name__}: its get_output_emb"):
            hidden.last_states(worker_of(module), ROWS)


def test_a_model_that_never_calls_its_head_is_refused(group, monkeypatch):
    on_the_cpu(monkeypatch)
    model = language_model()
    head = model.lm_head.weight
    monkeypatch.setattr(
        model, "forward", lambda input_ids, **_: SimpleNamespace(logits=model.model(input_ids=input_ids)[0] @ head.T)
    )
    worker = worker_of(model)
    with pytest.raises(rlx.ConfigError, match="output head was called 0 times in a forward pass"):
        hidden.last_states(worker, ROWS)
    assert stays(worker, None)


def test_every_worker_has_an_equal_share_and_padding_is_cut_off(monkeypatch):
    monkeypatch.setattr(hidden.ray, "get", lambda answers: answers)
    shares = []

    def remote(function, rows):
        assert function is hidden.last_states
        shares.append(rows)
        return torch.tensor([[float(row[-1])] for row in rows])

    workers = [SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote)) for _ in range(2)]
    found = hidden.policy_hidden(SimpleNamespace(workers=workers), ROWS[:5], multiple=4)
    assert [h.tolist() for h in found] == [[5.0], [1.0], [4.0], [5.0], [7.0]]
    assert shares == [ROWS[:4], [ROWS[4]] + [ROWS[0]] * 3]
