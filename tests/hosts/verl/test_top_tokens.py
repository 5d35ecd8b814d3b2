"""The engine's likeliest tokens from verl's rollout servers to the loss in a training worker."""

from __future__ import annotations

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput
from verl_tensors import batch, parts, worker_data

import rlx_plugins as rlx
import rlx_plugins.hosts.verl
from rlx_plugins.core.config import build
from rlx_plugins.hosts.signals import TOP_K, TOP_TOKENS, top_tokens
from rlx_plugins.hosts.verl import columns
from rlx_plugins.hosts.verl.client import TopTokensClient, VersionedClient, client_class
from rlx_plugins.hosts.verl.generation import Engine
from rlx_plugins.hosts.verl.loss import ActorLoss
from rlx_plugins.hosts.verl.profile import ASYNC, SYNC, host_profile
from rlx_plugins.hosts.verl.seams import stock_config
from rlx_plugins.hosts.verl.top_tokens import TOP, asked_for, columns_of_rows, reported, without_arrays

EOS = 9


def report(tokens):
    """Two entries at each place: the token, and one of twice its id."""
    return reported([[t, 2 * t] for t in tokens], [[-0.1 * t, -1.0] for t in tokens])


def output(tokens, stop="completed", told=True, version=3):
    fields = {"global_steps": version} | ({TOP: report(tokens)} if told and tokens else {})
    return TokenOutput(token_ids=tokens, log_probs=[-0.1] * len(tokens), stop_reason=stop, extra_fields=fields)


@pytest.fixture
def served(monkeypatch):
    """`served(outputs)`: answers verl's plain client gets, in turn; the sampling parameters it sent."""
    sent = []

    def serve(*outputs):
        answers = iter(outputs)

        async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
            sent.append(dict(sampling_params))
            return next(answers)

        monkeypatch.setattr(LLMServerClient, "generate", generate)
        return sent

    return serve


def ask(client_cls):
    client = client_cls.__new__(client_cls)
    client.config = SimpleNamespace()
    return asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={"logprobs": True, "max_tokens": 9}))


# ---- servers and clients
def test_the_client_asks_for_them_and_says_which_tokens_they_belong_to(served):
    sent = served(output([4, 5]))
    ids, logp, tokens = ask(client_class(versioned=False, top_tokens=True)).extra_fields[TOP]
    assert sent == [{"logprobs": TOP_K, "max_tokens": 9}] and tokens.tolist() == [4, 5]
    assert ids[:, :3].tolist() == [[4, 8, -1], [5, 10, -1]] and logp[1, 0] == pytest.approx(-0.5)
    assert client_class(versioned=False, top_tokens=False) is LLMServerClient


def test_requests_that_a_response_took_are_joined_with_their_versions(served):
    async def at_once(seconds):
        return None

    first, none, rest = output([4], "aborted", version=2), output([], "aborted", version=3), output([5, 6], version=3)
    sent = served(first, none, rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", at_once)
        made = ask(client_class(versioned=True, top_tokens=True))
    assert made.token_ids == [4, 5, 6] and made.extra_fields["rlx_versions"] == [[1, 2], [0, 3], [2, 3]]
    ids, logp, tokens = made.extra_fields[TOP]
    assert ids[:, 0].tolist() == tokens.tolist() == [4, 5, 6] and logp.shape == (3, TOP_K)
    assert [params["logprobs"] for params in sent] == [TOP_K] * 3
    served(output([5], told=False))
    assert TOP not in ask(client_class(versioned=True, top_tokens=False)).extra_fields


def test_a_server_that_does_not_report_them_is_an_error(served):
    served(output([4], told=False))
    with pytest.raises(rlx.DataError, match="reported no likeliest tokens"):
        ask(TopTokensClient)
    served(output([], "aborted"))
    assert [len(x) for x in ask(TopTokensClient).extra_fields[TOP]] == [0, 0, 0]


def test_only_a_number_asks_for_more_than_the_sampled_token():
    assert [asked_for({"logprobs": x}) for x in (True, False, None, 0, 20)] == [0, 0, 0, 0, 20] and asked_for({}) == 0


@pytest.fixture
def vllm_server(monkeypatch):
    """Our server on a stand-in for verl's, which can't be imported without vLLM."""

    class Server:
        async def run_server(self, args):
            self.engine = args

        async def generate(self, prompt_ids, sampling_params, request_id, image_data=None):
            wants = 0 if sampling_params.pop("logprobs", False) else None
            params = SimpleNamespace(logprobs=wants)
            async for answer in self.engine.generate(prompt=prompt_ids, sampling_params=params, request_id=request_id):
                final = answer
            tokens = final.outputs[0].token_ids
            return TokenOutput(token_ids=tokens, stop_reason="completed", extra_fields={"global_steps": 1})

    class Replica:
        def __init__(self, rank):
            self.server_class = rank

    package = "verl.workers.rollout.vllm_rollout"
    module = ModuleType(f"{package}.vllm_async_server")
    module.vLLMHttpServer, module.vLLMReplica = Server, Replica
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield importlib.import_module("rlx_plugins.hosts.verl.vllm_server")
    del sys.modules["rlx_plugins.hosts.verl.vllm_server"], rlx_plugins.hosts.verl.vllm_server


class AsyncLLM:
    """Answers twice, as vLLM streams; the log-probs of a token are those of its neighbours."""

    def __init__(self):
        self.asked, self.state = [], "awake"

    async def generate(self, prompt, sampling_params, request_id):
        self.asked.append(sampling_params.logprobs)
        k = sampling_params.logprobs
        for n in (1, 2):
            await asyncio.sleep(0.001 * prompt[0])  # requests take turns
            tokens = [prompt[0] + i for i in range(n)]
            places = [
                {t: entry(t, -9.0, 7)} | {t + j: entry(t + j, -0.1 * j, j) for j in range(1, (k or 0) + 1)}
                for t in tokens
            ]
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=places)])


def entry(token, logprob, rank):
    return SimpleNamespace(logprob=logprob, rank=rank)


def test_vllms_servers_are_asked_per_request_and_keep_requests_apart(vllm_server):
    async def serve():
        server, engine = vllm_server.TopTokensServer(), AsyncLLM()
        await server.run_server(engine)
        wants = [3, True, 2, None]
        asked = [server.generate([10 * i], {"logprobs": k}, request_id="r") for i, k in enumerate(wants, 1)]
        return server, engine, await asyncio.gather(*asked)

    server, engine, (three, plain, two, none) = asyncio.run(serve())
    assert engine.asked == [3, 0, 2, None] and server.engine.state == "awake"
    ids, logp = three.extra_fields[TOP]
    assert ids[:, :4].tolist() == [[11, 12, 13, 10], [12, 13, 14, 11]] and logp[0, 0] == pytest.approx(-0.1)
    assert two.extra_fields[TOP][0][:, :3].tolist() == [[31, 32, 30], [32, 33, 31]]
    assert TOP not in plain.extra_fields and TOP not in none.extra_fields


def test_replicas_of_the_process_have_our_servers_once_they_are_registered(vllm_server, monkeypatch):
    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", dict(RolloutReplicaRegistry._registry))
    vllm_server.register()
    replica = RolloutReplicaRegistry.get("vllm")(0)
    assert replica.server_class.__ray_metadata__.class_name == "TopTokensServer"


# ---- rows
def test_the_programs_rows_carry_them_from_chunk_to_chunk():
    answers = iter([output([4, 5, 6]), output([7, EOS])])

    async def generate(request_id, *, prompt_ids, sampling_params):
        return next(answers)

    async def score(data):
        return {"reward_score": 1.0, "reward_extra_info": {}}

    worker = SimpleNamespace(compute_score=SimpleNamespace(remote=score))
    engine = Engine(
        SimpleNamespace(generate=generate),
        [worker],
        lambda key: {"raw_prompt": []},
        None,
        None,
        sampling={"temperature": 1.0},
        version=3,
        eos=[EOS],
        chunk=3,
    )
    group = rlx.Group("g", "p", [1], 8)
    engine.execute(rlx.Generate(group.start(1), until="all"))
    packed = rlx.pack([group])
    assert packed.rollout_top_ids[0, :, 0].tolist() == packed.response_ids[0].tolist() == [4, 5, 6, 7, EOS]
    assert packed.rollout_top_logp[0, 3, 0] == pytest.approx(-0.7) and packed.rollout_top_ids.shape == (1, 5, TOP_K)


def where(i):
    return f"row {i}"


def test_rows_of_agent_loops_have_them_as_far_as_they_were_sampled():
    extra = [{TOP: [*report(t), np.array(t)], "turn_scores": []} for t in ([4, 5], [6, 7, 8])]
    responses = torch.tensor([[4, 5, 3], [6, 7, 0]])  # a token that closes the turn; a response cut to its bound
    made = columns_of_rows(extra, responses, [3, 2], where)
    assert made["rollout_top_ids"][..., 0].tolist() == [[4, 5, -1], [6, 7, -1]]
    assert torch.isnan(made["rollout_top_logp"][:, 2]).all()
    assert without_arrays(extra) == [{"turn_scores": []}] * 2
    with pytest.raises(rlx.DataError, match="row 1: its response is not what one request sampled"):
        columns_of_rows(extra, torch.tensor([[4, 5, 3], [6, 0, 7]]), [3, 3], where)
    with pytest.raises(rlx.DataError, match="row 0 has no likeliest tokens"):
        columns_of_rows([{}, extra[1]], responses, [3, 2], where)


# ---- training workers
def with_top(table, k=3):
    """The batch with k likeliest tokens at each place, NaN and -1 where the mask is off."""
    g = torch.Generator().manual_seed(4)
    shape = (*table.response_mask.shape, k)
    hole = ~table.response_mask[..., None].expand(shape)
    ids = torch.randint(0, 11, shape, generator=g, dtype=torch.int32).masked_fill(hole, -1)
    logp = -torch.rand(shape, generator=g).masked_fill(hole, torch.nan)
    return table.with_columns(rollout_top_ids=ids, rollout_top_logp=logp)


@pytest.mark.parametrize("cut", [False, True], ids=["whole rows", "cut rows"])
def test_workers_get_them_for_real_tokens_only_and_as_indices(cut, registered):
    read = []

    @registered("clip", "test_reads_top")
    class Reads(rlx.Clip):
        requires = TOP_TOKENS
        capabilities = frozenset({"logits"})

        def from_logits(self, logits, columns):
            read.append({name: columns[name] for name in (*TOP_TOKENS, "response_ids")})
            return {"none": columns["response_ids"] * 0.0}

        def __call__(self, terms):
            return -terms.ratio * terms.advantages

    profile = rlx.HostProfile(
        "verl", parts().requires | TOP_TOKENS | {"logp_rollout"}, frozenset({"logits", "cut_rows"})
    )
    chosen = build({"clip": "test_reads_top", **({"selector": "nat_rpc"} if cut else {})}, profile)
    prepared = rlx.prepare(chosen, with_top(batch()))
    data = worker_data(chosen, prepared, padding=2, cut=cut)
    lengths = columns.lengths(data["responses"])
    field = data["rlx/rollout_top_ids"]
    assert field.dtype == torch.int32 and field.values().shape == (int(lengths.sum()), 3)
    for rows, part in zip(torch.arange(10).chunk(2), tu.chunk_tensordict(data, 2)):
        table = columns.micro_batch(part)
        width = int(lengths[rows].max())
        assert table.rollout_top_ids.shape == (5, width, 3) and table.rollout_top_ids.dtype == torch.int64
        for i, row in enumerate(rows.tolist()):
            if row < prepared.batch.size:
                n = int(lengths[row])
                assert torch.equal(table.rollout_top_ids[i, :n].int(), prepared.batch.rollout_top_ids[row, :n])
                torch.testing.assert_close(
                    table.rollout_top_logp[i, :n], prepared.batch.rollout_top_logp[row, :n], equal_nan=True
                )
        packed = torch.zeros(1, int((columns.lengths(part["prompts"]) + lengths[rows]).sum()), 11)
        ActorLoss(chosen)(student_logits=packed, data=part)
        assert len(read[-1]["response_ids"]) == len(read[-1]["rollout_top_logp"]) == int(lengths[rows].sum())


def test_they_stay_on_the_driver_where_no_part_of_the_loss_reads_them():
    prepared = rlx.prepare(parts(), with_top(batch()))
    sent = worker_data(parts(), prepared).keys()
    assert not [name for name in sent if "rollout_top" in name]


# ---- which engines
@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize(
    ("option", "value", "supplied"),
    [
        ("name", "vllm", True),
        ("name", "rlx_hf", True),
        ("name", "sglang", False),
        ("name", "trtllm", False),
        ("logprobs_mode", "raw_logprobs", False),
        ("disaggregation.enabled", True, False),
        ("agent.default_agent_loop", "tool_agent", False),
    ],
)
def test_engines_that_can_report_them(mode, option, value, supplied):
    from omegaconf import OmegaConf

    config = stock_config()
    OmegaConf.update(config, f"actor_rollout_ref.rollout.{option}", value)
    profile = host_profile(config, mode)
    assert (profile.signals >= TOP_TOKENS) == supplied
    if not supplied:
        with pytest.raises(rlx.ConfigError, match="'rollout_top_ids'.*rollout.name=vllm.*rlx.rollout_signals"):
            build({"clip": "pdm"}, profile)


def test_an_empty_report_has_the_shape_of_one():
    assert [tuple(x.shape) for x in top_tokens([], [])] == [(0, TOP_K)] * 2
    assert issubclass(client_class(versioned=True, top_tokens=True), VersionedClient)
