"""verl's client of the rollout engine that remembers which policy version sampled which tokens."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from .rows import VERSIONS

_runs: ContextVar[list[list[Any]] | None] = ContextVar("rlx_version_runs", default=None)


class _Recording(LLMServerClient):
    """Notes tokens and version of every single request; below the client that resumes aborted ones."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await super().generate(*args, **kwargs)
        runs = _runs.get()
        if runs is not None:
            runs.append([len(output.token_ids), output.extra_fields.get("global_steps")])
        return output


class VersionedClient(FullyAsyncLLMServerClient, _Recording):
    """`FullyAsyncLLMServerClient` whose output says [tokens, version] of every request it took."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        runs: list[list[Any]] = []
        token = _runs.set(runs)
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            _runs.reset(token)
        output.extra_fields[VERSIONS] = runs
        return output
