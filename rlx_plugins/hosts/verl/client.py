"""verl's clients of the rollout engine: one that remembers policy versions, one that asks for the likeliest tokens."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from ..signals import TOP_K
from .rows import VERSIONS
from .top_tokens import TOP, joined, of_request

_answers: ContextVar[list[Any] | None] = ContextVar("rlx_answers", default=None)


class _Recording(LLMServerClient):
    """Notes the answer to every single request; below the client that resumes aborted ones."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().generate(*args, **kwargs)
        answers = _answers.get()
        if answers is not None:
            answers.append(output)
        return output


class VersionedClient(FullyAsyncLLMServerClient, _Recording):
    """`FullyAsyncLLMServerClient` whose output says [tokens, version] of every request it took.

    It also keeps the likeliest tokens those requests reported, if they did.
    """

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        answers: list[Any] = []
        token = _answers.set(answers)
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            _answers.reset(token)
        output.extra_fields[VERSIONS] = [[len(a.token_ids), a.extra_fields.get("global_steps")] for a in answers]
        if tops := [a.extra_fields[TOP] for a in answers if TOP in a.extra_fields]:
            output.extra_fields[TOP] = joined(tops)
        return output


class TopTokensClient(LLMServerClient):
    """verl's client; every request asks for the engine's likeliest tokens, which stand in the output's extra fields."""

    async def generate(self, *args: Any, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        asked = {**sampling_params, "logprobs": TOP_K}
        output = await super().generate(*args, sampling_params=asked, **kwargs)
        output.extra_fields[TOP] = of_request(output)
        return output


class VersionedTopTokensClient(VersionedClient, TopTokensClient):
    """Both."""


def client_class(*, versioned: bool, top_tokens: bool) -> type[LLMServerClient]:
    """The client that notes what is asked of it."""
    if versioned:
        return VersionedTopTokensClient if top_tokens else VersionedClient
    return TopTokensClient if top_tokens else LLMServerClient
