"""An agent loop of the user's own, whose extra fields are a function of the tokens; `agent.yaml` names it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

TOOL = [40, 41, 42]
"""Tokens of the tool's answer between the two turns."""
FIRST_TURN = 4
"""Most tokens of the first turn."""


def confidence(token: int) -> float:
    return (token % 10) / 10


class TwoTurns(AgentLoopBase):
    """Two generations with a tool's answer between them."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(row["raw_prompt"]))
        room = self.rollout_config.response_length - FIRST_TURN - len(TOOL)
        first = await self._turn(prompt, sampling_params, FIRST_TURN)
        second = await self._turn([*prompt, *first.token_ids, *TOOL], sampling_params, room)
        response = [*first.token_ids, *TOOL, *second.token_ids]
        mask = [1] * len(first.token_ids) + [0] * len(TOOL) + [1] * len(second.token_ids)
        known = [*first.log_probs, *[0.0] * len(TOOL), *second.log_probs]
        fields = {
            **second.extra_fields,
            "confidence": [confidence(token) for token in response],
            "turn_ids": [7] * len(first.token_ids) + [8] * (len(response) - len(first.token_ids)),
            "predicted": float(len(response)),
        }
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=mask,
            response_logprobs=known,
            num_turns=4,
            metrics={},
            extra_fields=fields,
        )

    async def _turn(self, tokens: list[int], sampling_params: dict[str, Any], room: int) -> Any:
        parameters = {**sampling_params, "max_tokens": room}
        return await self.server_manager.generate(uuid4().hex, prompt_ids=tokens, sampling_params=parameters)
