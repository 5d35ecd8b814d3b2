"""Columns of a generation batch that take a forward pass: of the policy, its average, a teacher or a value model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from ..signals import TOP, TOP_K, TOP_TOKENS
from ..value_model import value_columns
from .columns import LOG_PROBS, response_mask

if TYPE_CHECKING:
    from .trainer import RLXTrainer

MULTIMODAL = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids"
    " mm_token_type_ids image_position_ids"
).split()
"""Keys of TRL's dictionary that its log-prob method takes as arguments of the same name."""


def forward_columns(trainer: RLXTrainer, out: dict[str, Any]) -> dict[str, Tensor]:
    """Columns of this rank's rows: logp_old, entropy, logp_teacher, logp_prox, values [B,T], value_prior [B] and those
    of `likeliest`, where a part reads them and the parent has not computed them."""
    needs, columns = trainer.needs, dict[str, Tensor]()
    if trainer.teacher is not None and needs.logp_teacher:
        columns["logp_teacher"] = trainer.teacher.logp(out)
    if trainer.averaged is not None and needs.logp_prox:
        columns["logp_prox"] = trainer.averaged.logp(out)
    if trainer.value_model is not None and needs.values:
        values = value_columns(trainer.value_model, *tokens(out, trainer.response_lengths), response_mask(out))
        columns |= {name: values[name] for name in needs.values}
    if made_here := needs.likeliest - (TOP_TOKENS if trainer.reports_top_tokens else frozenset()):
        made = likeliest(trainer, out)
        columns |= {name: made[name] for name in made_here}
    missing_old = needs.logp_old and LOG_PROBS["logp_old"] not in out
    if not missing_old and not needs.entropy:
        return columns
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        logp, entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([out["prompt_ids"], out["completion_ids"]], 1),
            torch.cat([out["prompt_mask"], out["completion_mask"]], 1),
            out["completion_ids"].shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
            compute_entropy=needs.entropy,
            **{name: out[name] for name in MULTIMODAL if name in out},
        )
    if needs.entropy:
        columns["entropy"] = entropy
    if missing_old:
        columns["logp_old"] = out[LOG_PROBS["logp_old"]] = logp
    return columns


def tokens(out: Mapping[str, Tensor], lengths: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts and of the responses, without padding."""
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(out["prompt_ids"], out["prompt_mask"])]
    return prompts, [ids[:n].tolist() for ids, n in zip(out["completion_ids"], lengths)]


@torch.no_grad()
def likeliest(trainer: RLXTrainer, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`rollout_top_ids` and `rollout_top_logp` [B,T,K], the policy's K likeliest tokens at its sampling temperature and
    their log-probabilities, the engine's where it samples with the trainer's own weights; `confidence` [B,T], the
    probability of the first five together."""
    ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
    mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
    n, size = out["completion_ids"].shape[1], trainer.args.per_device_train_batch_size
    found = []
    with disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs):
        for rows in torch.arange(len(ids), device=ids.device).split(size):
            with trainer.accelerator.autocast():
                output = trainer.model(input_ids=ids[rows], attention_mask=mask[rows], logits_to_keep=n + 1)
            logits = output.logits[:, -n - 1 : -1].float() / trainer.temperature
            found.append(logits.log_softmax(-1).topk(min(TOP_K, logits.shape[-1])))
    logp, tokens = (torch.cat(parts) for parts in zip(*found))
    return {"rollout_top_logp": logp, "rollout_top_ids": tokens, "confidence": logp[..., :TOP].exp().sum(-1)}
