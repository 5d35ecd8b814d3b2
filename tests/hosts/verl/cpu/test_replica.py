"""The transformers server without Ray: what it draws, and how requests live beside each other."""

from __future__ import annotations

import asyncio

import pytest
import torch

pytest.importorskip("verl")

from rlx_plugins.hosts.verl.cpu.replica import TransformersServer, draw
from rlx_plugins.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tiny_tokenizer()
    build_tiny_model(tokenizer, hidden_size=32, layers=2, intermediate_size=64, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def server(path):
    return TransformersServer(path, prompt_length=16, response_length=12, max_model_len=256, seed=0)


async def ask(server, prompt, request_id="r", **params):
    return await server.generate(request_id, prompt_ids=prompt, sampling_params=params, image_data=None)


async def ask_all(server, prompts, **params):
    return await asyncio.gather(*(ask(server, prompt, f"r{i}", **params) for i, prompt in enumerate(prompts)))


def log_probs(server, prompt, tokens, temperature=1.0):
    """Of ``tokens`` after ``prompt``, from one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = server.model(input_ids=torch.tensor([prompt + tokens])).logits[0, :, : server.vocabulary]
    given = (logits / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
    return given.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def test_log_probs_are_those_of_the_tokens_whoever_shares_the_batch(server):
    prompts = [[10, 11], [12], [13, 14, 15, 16, 17], [18, 19, 20]]

    async def staggered():
        first = asyncio.create_task(ask_all(server, prompts[:2], **LONG))
        while not server.running or len(server.running[0].tokens) < 3:
            await asyncio.sleep(0.001)
        return await first + await ask_all(server, prompts[2:], temperature=0.5)

    outputs = asyncio.run(staggered())
    for prompt, output, temperature in zip(prompts, outputs, [1.0, 1.0, 0.5, 0.5]):
        expected = log_probs(server, prompt, output.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=2e-5, rtol=0)


def test_the_likeliest_tokens_are_those_of_the_policy_at_the_temperature(server):
    async def both():
        return await asyncio.gather(
            *(ask(server, [10 + i], temperature=0.7, logprobs=3, **LONG) for i in range(3)),
            ask(server, [10, 11, 12], logprobs=True, max_tokens=4),
        )

    *asked, plain = asyncio.run(both())
    assert "rlx_top_tokens" not in plain.extra_fields
    among = 0
    for prompt, output in zip(([10], [11], [12]), asked):
        ids, logp = (torch.tensor(array) for array in output.extra_fields["rlx_top_tokens"])
        with torch.no_grad():
            logits = server.model(input_ids=torch.tensor([prompt + output.token_ids])).logits[0, :-1]
        policy = (logits[:, : server.vocabulary] / 0.7).log_softmax(-1)
        torch.testing.assert_close(logp[:, :3], policy.topk(3).values, atol=1e-5, rtol=0)
        torch.testing.assert_close(policy.gather(-1, ids[:, :3].long()), logp[:, :3], atol=1e-5, rtol=0)
        assert (ids[:, 3:] == -1).all() and torch.isnan(logp[:, 3:]).all()
        sampled = torch.tensor(output.token_ids)[:, None]
        own = torch.tensor(output.log_probs)[:, None].expand(-1, 3)[ids[:, :3] == sampled]
        torch.testing.assert_close(logp[:, :3][ids[:, :3] == sampled], own)
        among += len(own)
    assert 0 < among < 600


def test_a_biased_token_is_not_drawn_and_the_others_share_its_probability(server):
    async def both():
        free = await ask(server, [10], seed=3, max_tokens=1)
        (first,) = free.token_ids
        biased = [ask(server, [10], seed=i, max_tokens=1, logit_bias={first: -100.0}) for i in range(30)]
        return first, await asyncio.gather(*biased)

    first, outputs = asyncio.run(both())
    with torch.no_grad():
        logits = server.model(input_ids=torch.tensor([[10]])).logits[0, -1, : server.vocabulary].clone()
    logits[first] = -torch.inf
    drawn = [output.token_ids[0] for output in outputs]
    assert first not in drawn and len(set(drawn)) > 1
    logp = torch.tensor([output.log_probs[0] for output in outputs])
    torch.testing.assert_close(logp, logits.log_softmax(-1)[drawn], atol=1e-5, rtol=0)


def test_a_response_ends_with_the_end_of_sequence_or_at_its_limit(server):
    outputs = asyncio.run(ask_all(server, [[10]] * 40, temperature=3.0))
    eos = next(iter(server.eos))
    assert {output.stop_reason for output in outputs} == {"completed"}
    assert all(eos not in output.token_ids[:-1] for output in outputs)
    assert all(len(o.token_ids) == 12 or o.token_ids[-1] == eos for o in outputs)
    assert {len(output.token_ids) == 12 for output in outputs} == {True, False}


def test_each_request_has_its_own_limit_and_stop_tokens(server):
    async def both():
        return await asyncio.gather(
            ask(server, [10], max_tokens=3, ignore_eos=True),
            ask(server, [10], max_tokens=7, stop_token_ids=list(range(server.vocabulary))),
            ask(server, [10, 11, 12, 13] * 62, max_tokens=50, ignore_eos=True),
        )

    assert [len(output.token_ids) for output in asyncio.run(both())] == [3, 1, 8]


def test_what_is_drawn_does_not_depend_on_the_order_of_requests(server, path):
    prompts = [[10, 11], [12], [10, 11], [13, 14, 15], [12], [12]]
    forward = asyncio.run(ask_all(server, prompts))
    other = TransformersServer(path, prompt_length=16, response_length=12, max_model_len=256, seed=0)
    backward = asyncio.run(ask_all(other, prompts[::-1]))[::-1]

    def drawn(outputs):
        return sorted((prompt, output.token_ids) for prompt, output in zip(prompts, outputs))

    assert drawn(forward) == drawn(backward)
    assert len({tuple(output.token_ids) for output in forward}) == len(prompts)


def test_a_request_with_a_seed_repeats_itself(server):
    first, second, other = asyncio.run(ask_all(server, [[10]] * 3, seed=5))[:2] + asyncio.run(ask_all(server, [[10]]))
    assert first.token_ids == second.token_ids != other.token_ids


def test_an_aborted_request_returns_what_it_has_and_the_others_go_on(server):
    async def abort_one():
        tasks = [asyncio.create_task(ask(server, [10 + i], f"r{i}", **LONG)) for i in range(3)]
        while not server.running or len(server.running[0].tokens) < 4:
            await asyncio.sleep(0.001)
        answers = [await server.abort_request("r1"), await server.abort_request("unknown")]
        return answers, await asyncio.gather(*tasks)

    answers, outputs = asyncio.run(abort_one())
    assert [answer["aborted"] for answer in answers] == [True, False]
    assert [output.stop_reason for output in outputs] == ["completed", "aborted", "completed"]
    assert 4 <= len(outputs[1].token_ids) < 200
    assert len(outputs[1].log_probs) == len(outputs[1].token_ids)
    assert [len(outputs[i].token_ids) for i in (0, 2)] == [200, 200]


def test_requests_wait_after_all_were_aborted(server):
    async def pause():
        running = asyncio.create_task(ask(server, [10], **LONG))
        while not server.running:
            await asyncio.sleep(0.001)
        stopped = await server.abort_all_requests()
        late = asyncio.create_task(ask(server, [11], "late"))
        await asyncio.sleep(0.05)
        waited = not late.done()
        await server.resume_generation()
        return stopped["aborted_count"], (await running).stop_reason, waited, (await late).stop_reason

    assert asyncio.run(pause()) == (1, "aborted", True, "completed")


def test_new_weights_are_used_and_their_version_is_reported(server):
    weights = {name: torch.zeros_like(value) for name, value in server.model.state_dict().items()}
    asyncio.run(server.load_weights(weights, 7))
    output = asyncio.run(ask(server, [10], temperature=1.0))
    assert output.extra_fields["global_steps"] == 7
    uniform = -torch.log(torch.tensor(float(server.vocabulary)))
    torch.testing.assert_close(torch.tensor(output.log_probs), uniform.expand(len(output.token_ids)))


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_that_do_not_fit_are_refused(server, change):
    weights = dict(server.model.state_dict())
    if change == "missing":
        del weights["model.layers.0.mlp.up_proj.weight"]
    else:
        weights["model.layers.9.weight"] = torch.zeros(1)
    with pytest.raises(ValueError, match=change):
        asyncio.run(server.load_weights(weights, 1))


def test_a_teacher_scores_the_next_token_at_each_position(server):
    prompt = [10, 11, 12, 13]
    own = asyncio.run(ask(server, prompt, max_tokens=1, prompt_logprobs=0)).extra_fields
    assert own["prompt_ids"] == [[11], [12], [13], [0]]
    expected = log_probs(server, prompt[:1], prompt[1:])
    torch.testing.assert_close(torch.tensor(own["prompt_logprobs"])[:-1, 0], expected, atol=1e-5, rtol=0)
    best = asyncio.run(ask(server, prompt, max_tokens=1, prompt_logprobs=3)).extra_fields
    assert [len(row) for row in best["prompt_ids"]] == [3, 3, 3, 3]
    assert all(row == sorted(row, reverse=True) for row in best["prompt_logprobs"][:-1])


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.2}, {"guided_json": "{}"}])
def test_parameters_the_server_does_not_have_are_refused(server, params):
    with pytest.raises(ValueError, match=next(iter(params))):
        asyncio.run(ask(server, [10], **params))


def test_an_error_while_generating_reaches_every_request(server):
    with pytest.raises(IndexError):
        asyncio.run(ask_all(server, [[10], [100_000]]))
    assert asyncio.run(ask(server, [10])).stop_reason == "completed"


def column(*values):
    return torch.tensor(values)[:, None]


def test_drawing_inverts_the_cumulative_distribution():
    p = torch.tensor([[0.1, 0.6, 0.0, 0.3]]).repeat(4, 1)
    uniform = column(0.0, 0.59, 0.61, 0.95)
    tokens, log_prob, *_ = draw(p.log(), torch.ones(4, 1), torch.full((4, 1), 4), torch.ones(4, 1), uniform)
    assert tokens.tolist() == [1, 1, 3, 0]
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.6, 0.6, 0.3, 0.1]))


def test_top_k_and_top_p_cut_the_tail_and_rescale():
    p = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).repeat(3, 1)
    top_k, top_p = torch.tensor([[2], [4], [4]]), column(1.0, 0.7, 0.3)
    tokens, log_prob, *_ = draw(p.log(), torch.ones(3, 1), top_k, top_p, torch.full((3, 1), 0.999999))
    assert tokens.tolist() == [3, 3, 1]
    torch.testing.assert_close(log_prob.exp(), torch.tensor([1 / 3, 1 / 3, 1.0]))


def test_without_top_p_the_tail_of_a_peaked_distribution_stays():
    logits = torch.tensor([[0.0, 40.0, 1.0, 2.0]])
    *_, tokens, log_probs = draw(logits, torch.ones(1, 1), torch.tensor([[4]]), torch.ones(1, 1), column(0.5))
    assert tokens.tolist() == [[1, 3, 2, 0]]
    torch.testing.assert_close(log_probs, torch.tensor([[0.0, -38.0, -39.0, -40.0]]))


def test_temperature_zero_takes_the_likeliest_token():
    p = torch.tensor([[0.2, 0.7, 0.1]])
    end = torch.tensor([[0.999]])
    tokens, log_prob, *_ = draw(p.log(), torch.zeros(1, 1), torch.tensor([[3]]), torch.ones(1, 1), end)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(log_prob.exp(), torch.tensor([0.7]))
