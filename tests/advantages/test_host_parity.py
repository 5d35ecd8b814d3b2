"""Each baseline against the host's own function: verl's estimators, and the lines inside TRL's trainers."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlx_plugins import RolloutBatch, create

GROUP = torch.tensor([4, 4, 1, 1, 1, 7, 4, 4, 1, 9, 9])  # 7 has one rollout
LENGTHS = torch.tensor([3, 1, 4, 2, 4, 3, 0, 2, 1, 4, 3])
MASK = torch.arange(4) < LENGTHS[:, None]
REWARDS = torch.tensor([1.0, 0.25, 0.5, 0.0, 1.5, 0.75, -0.5, 1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
COMPONENTS = torch.stack([REWARDS, torch.arange(11).double().remainder(4) / 8], 1)


def batch(rewards=REWARDS, group=GROUP, mask=MASK, **columns):
    return RolloutBatch({"rewards": rewards, "group": group, "response_mask": mask, **columns})


def advantages(name, of=None, **params):
    return create("advantage", name, **params)(batch() if of is None else of)["advantages"]


def assert_same(got, want, atol=1e-9):
    torch.testing.assert_close(got, want.to(got.dtype), rtol=0, atol=atol)


@contextlib.contextmanager
def double():
    """Both hosts make some of their constants in torch's default dtype; here it is float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# ---- verl ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl():
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")

    def estimate(name, *args, **kwargs):
        with double():
            return getattr(core_algos, f"compute_{name}_outcome_advantage")(*args, **kwargs)

    return estimate


def verl_inputs(rewards=REWARDS):
    """The reward on the last token; verl's estimators read the row's sum. Rows without tokens keep theirs, masked."""
    token_rewards = torch.zeros(MASK.shape, dtype=torch.float64)
    token_rewards[torch.arange(len(rewards)), (LENGTHS - 1).clamp(min=0)] = rewards
    uid = np.array([f"prompt-{g}" for g in GROUP.tolist()], dtype=object)
    return {"token_level_rewards": token_rewards, "response_mask": MASK.double(), "index": uid}


@pytest.mark.parametrize(("by_std", "name"), [(True, "grpo"), (False, "dr_grpo")])
def test_grpo_and_dr_grpo_equal_verls_grpo(verl, by_std, name):
    want, _ = verl("grpo", **verl_inputs(), norm_adv_by_std_in_grpo=by_std)
    assert_same(advantages(name, host="verl"), want)


def test_grpo_equals_verls_vectorised_grpo(verl):
    want, _ = verl("grpo_vectorized", **verl_inputs())
    assert_same(advantages("grpo", host="verl"), want, atol=1e-5)  # verl computes it in float32


def test_rloo_equals_verls(verl):
    assert_same(advantages("rloo", host="verl"), verl("rloo", **verl_inputs())[0])


def test_rloo_with_a_zero_for_a_group_of_one_equals_verls_vectorised(verl):
    assert_same(advantages("rloo"), verl("rloo_vectorized", **verl_inputs())[0])


def test_reinforce_pp_with_baseline_equals_verls(verl):
    want, _ = verl("reinforce_plus_plus_baseline", **verl_inputs())
    assert_same(advantages("reinforce_pp", baseline="group", host="verl"), want)


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_reinforce_pp_equals_verls_from_row_rewards_and_from_token_rewards(verl, discount):
    given = verl_inputs()
    del given["index"]
    want, returns = verl("reinforce_plus_plus", **given, config=SimpleNamespace(gamma=discount))
    live = LENGTHS > 0  # a reward on a row without tokens is lost
    for columns in ({}, {"token_rewards": given["token_level_rewards"]}):
        got = create("advantage", "reinforce_pp", discount=discount)(batch(**columns))
        assert_same(got["advantages"], want)
        assert_same(got["returns"][live], returns[live])


def test_reinforce_pp_passes_over_tool_tokens_as_verl_does(verl):
    torch.manual_seed(0)
    mask = torch.rand(11, 9) < 0.6
    token_rewards = torch.randn(11, 9, dtype=torch.float64)
    want, returns = verl("reinforce_plus_plus", token_rewards, mask.double(), config=SimpleNamespace(gamma=0.8))
    part = create("advantage", "reinforce_pp", discount=0.8)
    got = part(batch(mask=mask, token_rewards=token_rewards))
    assert_same(got["advantages"], want)
    assert_same(torch.where(mask, got["returns"], 0.0), torch.where(mask, returns, 0.0))


def test_gdpo_equals_verls(verl):
    live = LENGTHS > 0  # verl would put the reward of a row without tokens on the last column
    rows = batch(reward_components=COMPONENTS).rows(live)
    given = verl_inputs()
    want, _ = verl(
        "gdpo",
        given["token_level_rewards"][live],
        MASK[live].float(),
        given["index"][live.numpy()],
        config={"gdpo_reward_keys": ["accuracy", "format"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"accuracy": COMPONENTS[live, 0].numpy(), "format": COMPONENTS[live, 1].numpy()},
        batch={
            "prompts": torch.zeros(int(live.sum()), 2),
            "attention_mask": torch.cat([torch.ones(10, 2), MASK[live]], 1).long(),
        },
    )
    got = advantages("gdpo", rows, host="verl", weights=[1.0, 0.5])
    assert_same(got, want, atol=1e-5)  # verl takes components in float32


# ---- TRL: real trainers on a model of three tokens; only the rewards are given to them -------------------------------

NAN = torch.nan
TRL_GROUP = torch.arange(12) // 4
TRL_COMPONENTS = torch.tensor(
    [[1, 0.25], [0, 0.5], [1, 0.75], [0, 0.0]]
    + [[0.5, 0.5], [NAN, NAN], [0.25, NAN], [1, 0.5]]  # an unscorable row, and one that only one function scored
    + [[1, 0.3], [1, 0.3], [1, 0.3], [1, 0.3]],  # no spread
    dtype=torch.float64,
)
TRL_WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)


def trl_rewards(components=TRL_COMPONENTS):
    scored = ~components.isnan().all(1)
    return torch.where(scored, (components * TRL_WEIGHTS).nansum(1), NAN)


def trl_batch(components=TRL_COMPONENTS):
    return batch(trl_rewards(components), TRL_GROUP, torch.ones(12, 1, dtype=torch.bool), reward_components=components)


def trl_trainer(kind, folder):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    shape = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    args = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=12,
        num_generations=4,
        max_completion_length=3,
        beta=0.0,
        report_to="none",
    )

    def accuracy(completions, **columns):
        return [0.0] * len(completions)

    def form(completions, **columns):
        return [0.0] * len(completions)

    return getattr(trl, f"{kind}Trainer")(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=3, **shape)),
        reward_funcs=[accuracy, form],
        args=args,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 12}),
    )


@pytest.fixture(scope="module")
def grpo_trainer(tmp_path_factory):
    return trl_trainer("GRPO", tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def rloo_trainer(tmp_path_factory):
    return trl_trainer("RLOO", tmp_path_factory.mktemp("rloo"))


def trl_output(monkeypatch, trainer, components=TRL_COMPONENTS, **settings):
    """What the trainer's own step makes of these rewards [12, 2], in float64."""
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *args: components.clone())
    monkeypatch.setattr(trainer, "reward_weights", TRL_WEIGHTS)
    for name, value in settings.items():
        monkeypatch.setattr(trainer, name, value)
    with double():
        return trainer._generate_and_score_completions([{"prompt": "a"} for _ in range(12)])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_equals_trls(monkeypatch, grpo_trainer, scale):
    want = trl_output(monkeypatch, grpo_trainer, scale_rewards=scale)["advantages"]
    assert_same(advantages("grpo", trl_batch(), scale=scale, host="trl")[:, 0], want)


def test_dr_grpo_equals_trls_unscaled_rewards(monkeypatch, grpo_trainer):
    want = trl_output(monkeypatch, grpo_trainer, scale_rewards="none")["advantages"]
    assert_same(advantages("dr_grpo", trl_batch(), host="trl")[:, 0], want)


def test_gdpo_equals_trls_normalize_then_sum(monkeypatch, grpo_trainer):
    want = trl_output(monkeypatch, grpo_trainer, multi_objective_aggregation="normalize_then_sum")["advantages"]
    assert_same(advantages("gdpo", trl_batch(), host="trl", weights=[1.0, 0.5])[:, 0], want)


LONE = torch.where(((TRL_GROUP != 1) | (torch.arange(12) == 4))[:, None], TRL_COMPONENTS, NAN)


@pytest.mark.parametrize("components", [TRL_COMPONENTS, LONE], ids=["mixed", "one scorable row in a group"])
@pytest.mark.parametrize("clip", [None, (0.2, 1.2)])
@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_equals_trls(monkeypatch, rloo_trainer, normalize, clip, components):
    settings = {"normalize_advantages": normalize, "reward_clip_range": clip}
    want = trl_output(monkeypatch, rloo_trainer, components, **settings)["advantages"]
    got = advantages("rloo", trl_batch(components), normalize=normalize, reward_clip=clip, host="trl")
    assert_same(got[:, 0], want)


def test_rloo_with_kl_in_the_reward_equals_trls(monkeypatch, rloo_trainer):
    reference, seen = object(), {}

    def logps(model, ids, attention_mask, logits_to_keep, *args, **kwargs):
        values = -torch.rand(len(ids), logits_to_keep, dtype=torch.float64)
        seen["ref" if model is reference else "old"] = values
        return values, None, None

    settings = {"beta": 0.3, "ref_model": reference, "_get_per_token_logps_and_entropies": logps}
    out = trl_output(monkeypatch, rloo_trainer, **settings)
    mask = out["completion_mask"].bool()
    rows = batch(trl_rewards(), TRL_GROUP, mask, logp_old=seen["old"], logp_ref=seen["ref"])
    got = create("advantage", "rloo", kl_coef=0.3, host="trl")(rows)["advantages"]
    assert_same(got, torch.where(mask, out["advantages"][:, None], 0.0))
