"""vLLM asked for its likeliest tokens, of which TRL keeps the sampled token's log-prob only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, DataError
from ...core.trajectory import Top
from ..signals import TOP_K, top_tokens

if TYPE_CHECKING:
    from .trainer import RLXTrainer


class TopTokens:
    """TRL's `VLLMGeneration`, whose `generate` asks for TOP_K tokens at each place and keeps them in `reported`.

    TRL takes the first log-prob at a place for the sampled token's, which it is only where no others were asked for:
    `generate` therefore returns the sampled token's alone.
    """

    def __init__(self, engine: Any):
        self._engine = engine
        self.reported: list[Top] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        """As the engine's, with one log-prob per token; `reported` holds the likeliest tokens of each completion."""
        before, self._engine.logprobs = self._engine.logprobs, TOP_K
        try:
            prompts, completions, logprobs, ids = self._engine.generate(*args, **kwargs)
        finally:
            self._engine.logprobs = before
        if logprobs is None or ids is None:
            raise DataError(
                "the vLLM server reports no likeliest tokens; TRL's client needs a server of its own version"
            )
        self.reported = [top_tokens(row, values) for row, values in zip(ids, logprobs)]
        sampled = [_of_sampled(*row) for row in zip(completions, ids, logprobs)]
        return prompts, completions, sampled, [[[token] for token in row] for row in completions]


def _of_sampled(
    tokens: Sequence[int], ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float | None]]
) -> list[list[float | None]]:
    """Log-probs of one completion's own tokens; vLLM always reports the sampled token beside the likeliest."""
    return [[values[listed.index(token)]] for token, listed, values in zip(tokens, ids, logprobs)]


@contextlib.contextmanager
def top_tokens_asked(trainer: RLXTrainer) -> Iterator[TopTokens]:
    """The trainer's vLLM asked for its likeliest tokens, for the calls inside."""
    engine = trainer.vllm_generation
    trainer.vllm_generation = asked = TopTokens(engine)
    try:
        yield asked
    finally:
        trainer.vllm_generation = engine


def check_server(trainer: RLXTrainer) -> None:
    """ConfigError where the server the user started reports too few log-probs, or not those it samples from."""
    if trainer.vllm_mode != "server" or not trainer.accelerator.is_main_process:
        return
    model = trainer.vllm_generation.vllm_client.get_server_info()["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        raise ConfigError(
            f"the vLLM server runs with --logprobs-mode {model['logprobs_mode']}, and its likeliest tokens are read at"
            " the temperature of sampling: restart it with --logprobs-mode processed_logprobs"
        )
    if 0 <= model["max_logprobs"] < TOP_K:
        raise ConfigError(
            f"the vLLM server reports {model['max_logprobs']} log-probs per token, and {TOP_K} are read: restart it"
            f" with --max-logprobs {TOP_K}"
        )
