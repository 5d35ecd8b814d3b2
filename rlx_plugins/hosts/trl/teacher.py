"""A teacher beside the policy: log-probabilities and logits of the same responses under another model or prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, pad

if TYPE_CHECKING:
    from .trainer import RLXTrainer

POLICY = "policy"
"""The `teacher_model` that is the policy itself."""

PROMPT_IDS, PROMPT_MASK = "teacher_prompt_ids", "teacher_prompt_mask"
"""Keys of TRL's dictionary for prompts that only the teacher sees."""


class Teacher:
    """Scores responses with `teacher_model`, without gradient.

    It sees the prompt followed by the rollout's `teacher_context`, and its logits are divided by the trainer's
    temperature like the policy's.
    """

    def __init__(self, trainer: RLXTrainer, path: str):
        self.trainer = trainer
        self.model: Any = None
        if path != POLICY:
            model = create_model_from_path(path, dtype=trainer.model.dtype)
            add_fused_lm_head(model, temperature=trainer.temperature)
            self.model = trainer.accelerator.prepare_model(model, evaluation_mode=True).eval()

    def add_prompts(self, out: dict[str, Any], contexts: Sequence[Sequence[int]]) -> None:
        """Put the teacher's prompts into TRL's dictionary where any differs from the training prompt."""
        if not any(contexts):
            return
        rows = []
        for ids, mask, context in zip(out["prompt_ids"], out["prompt_mask"].bool(), contexts):
            rows.append(torch.cat([ids[mask], torch.tensor(list(context), dtype=ids.dtype, device=ids.device)]))
        filler = self.trainer._tokenizer.pad_token_id
        out[PROMPT_IDS] = pad(rows, padding_value=filler, padding_side="left")
        out[PROMPT_MASK] = pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side="left")

    def _inputs(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        prompt = inputs.get(PROMPT_IDS, inputs["prompt_ids"]), inputs.get(PROMPT_MASK, inputs["prompt_mask"])
        ids = torch.cat([prompt[0], inputs["completion_ids"]], 1)
        return ids, torch.cat([prompt[1], inputs["completion_mask"]], 1)

    @torch.no_grad()
    def logp(self, inputs: Mapping[str, Any]) -> Tensor:
        """[B,T] log-probabilities of the response tokens."""
        trainer, args = self.trainer, self.trainer.args
        ids, mask = self._inputs(inputs)
        model = trainer.model if self.model is None else self.model
        with disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs):
            logp, _, _ = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].shape[1], batch_size=args.per_device_train_batch_size
            )
        return logp

    @torch.no_grad()
    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """[B,T,V] logits of the response tokens."""
        ids, mask = self._inputs(inputs)
        n = inputs["completion_ids"].shape[1]
        model = self.trainer.model if self.model is None else self.model
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=n + 1).logits[:, -n - 1 : -1]
        return logits.float() / self.trainer.temperature
