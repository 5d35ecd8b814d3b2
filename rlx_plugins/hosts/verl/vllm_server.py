"""verl's vLLM servers, which report the likeliest tokens of every request that asks for more than one log-prob.

verl asks vLLM for the sampled token's log-prob only and drops the rest of vLLM's answer. The server here is verl's; the
engine it holds is asked for more, and what it adds is kept until the server has made its answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from .top_tokens import TOP, asked_for, reported

ENGINE = "vllm"


@dataclass
class Asked:
    """A request under way: how many log-probs per token it asks for, and the engine's last answer."""

    k: int
    answer: Any = None


_asked: ContextVar[Asked | None] = ContextVar("rlx_asked_top_tokens", default=None)


class TopTokensEngine:
    """vLLM's `AsyncLLM`, whose `generate` asks for as many log-probs as the request at hand does."""

    def __init__(self, engine: Any):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params: Any, **request: Any) -> AsyncIterator[Any]:
        """As the engine's."""
        asked = _asked.get()
        if asked is not None:
            sampling_params.logprobs = asked.k
        async for answer in self._engine.generate(sampling_params=sampling_params, **request):
            if asked is not None:
                asked.answer = answer
            yield answer


class TopTokensServer(vLLMHttpServer):
    """verl's server; a request with `logprobs=K` gets the K likeliest tokens in its extra fields."""

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.engine = TopTokensEngine(self.engine)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        k = asked_for(sampling_params)
        if not k:
            return await super().generate(prompt_ids, sampling_params, request_id, **others)
        token = _asked.set(asked := Asked(k))
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **others)
        finally:
            _asked.reset(token)
        if output.token_ids:
            output.extra_fields[TOP] = of_vllm(asked.answer.outputs[0].logprobs)
        return output


def of_vllm(logprobs: list[dict[int, Any]]) -> Any:
    """What travels, from vLLM's log-probs: per token, those of the likeliest ones and of the sampled one."""
    ranked = [sorted(place.items(), key=lambda entry: entry[1].rank) for place in logprobs]
    ids = [[token for token, _ in place] for place in ranked]
    return reported(ids, [[entry.logprob for _, entry in place] for place in ranked])


class TopTokensReplica(vLLMReplica):
    """verl's replica of vLLM with the servers above."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(TopTokensServer)


def register() -> None:
    """Have this process start its vLLM servers as those above."""
    RolloutReplicaRegistry.register(ENGINE, lambda: TopTokensReplica)
