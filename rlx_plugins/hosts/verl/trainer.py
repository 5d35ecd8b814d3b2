"""The trainer modes `rlx_sync` and `rlx_colocate_async`: verl's trainers with plug-ins of every kind.

Imported by verl's driver process only (or everywhere, with VERL_USE_EXTERNAL_MODULES=rlx_plugins.hosts.verl.trainer).
"""

from __future__ import annotations

import os
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics

from ...core.batch import RolloutBatch
from ...core.config import Parts
from ...core.context import Context
from ...core.errors import ConfigError
from ...core.preparation import prepare
from ...core.state import state_fields
from ..checkpoint import load_parts, save_parts
from ..measures import batch_measures, prompts_hash, update_tokens
from ..signals import TOP_TOKENS, VALUES, per_token
from ..value_model import ValueFunction, load_value_model
from . import averaged
from .budget import TokenBudget
from .client import client_class
from .columns import CUT, RUN, as_list, cut_rows, fields_dict, lengths, nest, padded
from .forward import signal_columns
from .handover import hand_over, needs_entropy
from .loss import LOSS_KINDS, ActorLoss, HostTerms, worker_state
from .profile import ASYNC, MODES, SYNC, options
from .program import RolloutSource
from .rows import FIELDS, PROMPT_KEY, Step, signal_table
from .settings import make_parts, needs_program, plain, read_plugins, without_critic
from .snapshots import Versions
from .top_tokens import without_arrays


class RLXTrainer:
    """Runs the plug-ins under `rlx.plugins` in a verl trainer; without any, every override hands on to the parent.

    What changes with respect to the parent when plug-ins are named:
    - `get_llm_client`: clients that note the policy version of every token, or ask for the engine's likeliest tokens
    - training batch: rollout-side parts run as the rollout program, in the place of the replay buffer's `sample`
    - `_compute_advantage`: the batch phase on the whole batch, with every signal; a critic gets the advantage's returns
    - `_update_actor`: prepared columns go to the workers, whose loss is `ActorLoss` (set with `set_loss_fn`); rows that
      a selector cut are shortened for the update
    - `_save_checkpoint`, `_load_checkpoint`: the state of the parts goes with verl's
    - `on_step_end`, `on_train_end`: a token budget ends the run early, with verl's last checkpoint and validation
    """

    parts: Parts | None = None
    value_model: ValueFunction | None = None
    reports_top_tokens = False
    versioned = False

    def __init__(self, config: Any):
        if read_plugins(config):
            self.parts = make_parts(config)
            without_critic(config)
        self._program = self.parts is not None and needs_program(self.parts)
        with open_dict(config):
            config.trainer.v1.trainer_mode = MODES[config.trainer.v1.trainer_mode]
            if self._program:
                config.data.gen_batch_size = 1  # prompts are taken one by one
        self._context: Context | None = None
        self._prepared: RolloutBatch | None = None
        self._place = torch.empty(0, dtype=torch.int64)
        self._resumed: str | None = None
        self.rlx = options(config)
        self._budget = TokenBudget.of(self.rlx, plugins=self.parts is not None)
        if self.parts is not None:
            self.reports_top_tokens = bool(TOP_TOKENS & self.parts.requires - set(self.rlx["rollout_signals"] or ()))
        super().__init__(config)  # type: ignore[call-arg]
        self._averages = self.parts is not None and self.rlx["prox_decay"] is not None
        keep = self.rlx["keep_versions"] if self.parts is not None else None
        self._versions = None if keep is None else Versions(keep)
        self._told: dict[str, float] = {}

    # ---- set-up
    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.parts is not None and self.processor is not None:
            refuse_multimodal(self.parts)

    def _setup(self) -> None:
        if self.reports_top_tokens and self.config.actor_rollout_ref.rollout.name == "vllm":
            from . import vllm_server

            vllm_server.register()
        super()._setup()
        if self.parts is not None and self._program:
            self.replay_buffer = RolloutSource(self, self.parts, self.replay_buffer)

    def on_init_end(self) -> None:
        if self.parts is not None:
            actor = self.config.actor_rollout_ref.actor
            terms = HostTerms(
                kl_coef=float(actor.kl_loss_coef) if actor.use_kl_loss else 0.0,
                kl_type=str(actor.kl_loss_type),
                entropy_coef=float(actor.entropy_coeff),
            )
            self.actor_rollout_wg.set_loss_fn(ActorLoss(self.parts, terms))
            model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
            self.eos = eos_tokens(self.tokenizer, model.generation_config)
            self.model_type = getattr(model.hf_config, "model_type", None)
            self._load_value_model(self.parts)
        if self._averages:
            averaged.everywhere(self.actor_rollout_wg, averaged.start, float(self.rlx["prox_decay"]))
            if self._resumed is not None:
                averaged.everywhere(self.actor_rollout_wg, averaged.load, self._resumed)
        super().on_init_end()

    def get_llm_client(self) -> Any:
        if self.parts is None:
            return super().get_llm_client()  # type: ignore[misc]
        client = client_class(versioned=self.versioned, top_tokens=self.reports_top_tokens)
        return self.llm_server_manager.get_client(client_cls=client)

    def _load_value_model(self, parts: Parts) -> None:
        if self.rlx["value_model"] is not None and VALUES & parts.requires:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            vocabulary = len(self.tokenizer)
            self.value_model = load_value_model(self.rlx["value_model"], vocabulary=vocabulary, device=device)

    def prepare_step(self) -> dict[str, Any]:
        return {} if self._program else super().prepare_step()

    # ---- batch phase
    def _step(self) -> Step:
        return Step(self.global_steps - 1, self.total_training_steps, int(self.rlx["seed"]), self.global_steps - 1)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.parts is None:
            return super()._compute_advantage(batch, metrics)
        table = self._table(batch)
        prepared = prepare(self.parts, table)
        self._prepared = prepared.batch
        self._place = self._place[prepared.batch.row]
        reported = {"generated_tokens": float(table.response_mask.sum())} | prepared.metrics
        reported |= self._context.metrics if self._context is not None else {}
        reported |= self._told | batch_metrics(prepared.batch)
        passes = int(self.config.actor_rollout_ref.actor.ppo_epochs)
        reported["update_tokens"] = float(passes * update_tokens(prepared.batch))
        self._budget.count(generated=reported["generated_tokens"], update=reported["update_tokens"])
        metrics |= {f"rlx/{name}": value for name, value in reported.items()}
        names = ["responses", *(["values"] if self.use_critic else [])]
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=names)
        rows = lengths(data["responses"])
        advantages = prepared.batch.advantages.new_zeros(len(rows), prepared.batch.response_mask.shape[1])
        advantages[self._place] = prepared.batch.advantages
        returns = advantages if not self.use_critic else critic_targets(data["values"], prepared.batch, self._place)
        fields = {"advantages": nest(advantages, rows), "returns": nest(returns, rows)}  # verl logs both
        return tq.kv_batch_put(batch.keys, batch.partition_id, fields=fields_dict(fields, len(rows)))

    def _table(self, batch: Any) -> RolloutBatch:
        """The signal table of the batch's real rows; `_place` says where each is in the batch."""
        table = self._rollout_columns(batch)
        table = table.with_columns(**signal_columns(self, batch, table, self._place))
        if self._versions is None:
            return table
        behavior, self._told = self._versions.behavior(self, batch, table, self._place, self._step().version)
        return table.with_columns(logp_behavior=behavior)

    def _rollout_columns(self, batch: Any) -> RolloutBatch:
        assert self.parts is not None
        teacher = ["teacher_logprobs", "prompts"] if "logp_teacher" in self.parts.requires else []
        names = [*FIELDS, PROMPT_KEY, *teacher, *sorted(self.parts.requires)]
        data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=list(dict.fromkeys(names)))
        if self._program:
            table, self._place = self.replay_buffer.table(data, batch.keys)
            return table
        table, self._place = signal_table(
            data,
            batch.keys,
            batch.tags,
            self._step(),
            eos=self.eos,
            temperature=float(self.config.actor_rollout_ref.rollout.temperature),
            success_threshold=float(self.rlx["success_threshold"]),
            component_names=plain(self.rlx["reward_components"]),
            wanted=self.parts.requires,
            supplied=plain(self.rlx["rollout_signals"]) or (),
            token_signals=per_token(self.parts),
            top_tokens=self.reports_top_tokens,
        )
        if self.reports_top_tokens:
            rest = without_arrays(as_list(data["extra_fields"]))
            tq.kv_batch_put(batch.keys, batch.partition_id, fields=fields_dict({"extra_fields": rest}, len(rest)))
        return table

    # ---- update
    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.parts is None:
            return super()._update_actor(batch, metrics)
        assert self._prepared is not None
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        rows_per_step = actor.ppo_mini_batch_size * rollout.n
        whole, rows = self._cut(batch)
        fields, run = hand_over(
            self.parts, self._prepared, self._place, rows, ranks=self._ranks(), rows_per_step=rows_per_step
        )
        batch = tq.kv_batch_put(batch.keys, batch.partition_id, fields=fields_dict(fields, len(rows)))
        batch.extra_info.update(
            {
                RUN: run,
                "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0 or needs_entropy(self.parts),
                "distillation_use_topk": bool(self.parts.with_hook("from_logits")),  # calls the loss with logits
                "distillation_only": False,
                "global_batch_size": rows_per_step,
                "mini_batch_size": rows_per_step,
                "epochs": actor.ppo_epochs,
                "seed": actor.data_loader_seed,
                "dataloader_kwargs": {"shuffle": False},
                "temperature": rollout.temperature,
            }
        )
        output = self.actor_rollout_wg.update_actor(batch)
        if whole is not None:
            batch = tq.kv_batch_put(batch.keys, batch.partition_id, fields=whole)
        metrics |= named(reduce_metrics(output["metrics"]))
        if self._averages and any(getattr(part, "reset_proximal", False) for part in self.parts["correction"]):
            averaged.everywhere(self.actor_rollout_wg, averaged.start_anew)
        if self._context is not None:
            for part in self.parts.rollout:
                part.feedback(self._prepared, self._context)
        self._prepared = self._context = None
        return batch

    def _cut(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """Shorten the rows to what a selector kept; returns the whole fields, to be put back, and the row lengths."""
        assert self._prepared is not None
        if not self._prepared.has("kept_length"):
            data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["responses"])
            return None, lengths(data["responses"])
        names = [*CUT, "input_ids", "position_ids", "prompts"]
        whole = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=names)
        kept = torch.ones(len(batch.keys), dtype=torch.int64)
        kept[self._place] = self._prepared.kept_length
        short = cut_rows(whole, kept)
        tq.kv_batch_put(batch.keys, batch.partition_id, fields=fields_dict(short, len(kept)))
        return whole.select(*short), lengths(short["responses"])

    def _ranks(self) -> int:
        """Data-parallel ranks of the actor."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return int(max(group._dispatch_info["actor"])) + 1

    # ---- the end of a token budget
    def on_step_end(self) -> None:
        super().on_step_end()
        if self._budget.is_spent and self.global_steps < self.total_training_steps:
            self.total_training_steps = self.global_steps  # verl's loop makes no further step

    def on_train_end(self) -> None:
        """verl comes here when its loop ends before the last step it had planned; its last step does the same there."""
        super().on_train_end()
        if not self._budget.is_spent:
            return
        self.global_steps -= 1  # verl has counted one on
        trainer = self.config.trainer
        if trainer.save_freq > 0 and self.global_steps % trainer.save_freq != 0:
            self._save_checkpoint()
        if trainer.test_freq > 0 and self.global_steps % trainer.test_freq != 0:
            self.on_validate_begin()
            metrics = self._validate()
            self.on_validate_end()
            self.logger.log(data=metrics, step=self.global_steps)

    # ---- checkpoints
    def _save_checkpoint(self) -> None:
        if self.parts is not None:
            folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            self._fetch_worker_state(self.parts)
            save_parts(self.parts, folder)
            self._budget.save(folder)
            if self._averages:
                averaged.everywhere(self.actor_rollout_wg, averaged.save, os.path.abspath(folder))
        super()._save_checkpoint()

    def _fetch_worker_state(self, parts: Parts) -> None:
        """Bring the state of the loss-phase parts from the first training worker."""
        if not any(state_fields(p) for kind in LOSS_KINDS for p in parts[kind]):
            return
        state = ray.get(self.actor_rollout_wg.workers[0].__ray_call__.remote(worker_state))
        if state is not None:
            parts.load_state_dict(parts.state_dict() | state)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.parts is None or self.global_steps == 0:
            return
        trainer = self.config.trainer
        folder = os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
        folder = trainer.resume_from_path if trainer.resume_mode == "resume_path" else folder
        load_parts(self.parts, folder)
        self._budget.load(folder)
        if self._budget.is_spent:
            self.total_training_steps = self.global_steps
        self._resumed = os.path.abspath(folder)


@register_trainer(SYNC)
class RLXTrainerSync(RLXTrainer, PPOTrainerSync):
    """verl's `sync` with plug-ins of every kind."""


@register_trainer(ASYNC)
class RLXTrainerColocateAsync(RLXTrainer, PPOTrainerColocateAsync):
    """verl's `colocate_async` with update-side plug-ins; rows know the policy version of each of their tokens."""

    versioned = True


def critic_targets(values: torch.Tensor, batch: RolloutBatch, place: torch.Tensor) -> torch.Tensor:
    """[N,T] what verl's critic is trained on: the advantage's `returns`, else the value it already gives.

    values  the critic's, nested, of all N rows; place [B] the row of each of the prepared `batch`. Rows that were
    dropped, could not be scored, or are verl's padding teach nothing.
    """
    targets = padded(values, batch.response_mask.shape[1]).clone()
    learns = batch.response_mask & torch.isfinite(batch.rewards)[:, None]
    targets[place] = torch.where(learns, batch.returns.to(targets.dtype), targets[place])
    return targets


def refuse_multimodal(parts: Parts) -> None:
    """Refuse what works on text only, for a model with a multimodal processor."""
    cutters = [f"selector {p.name} cuts rows, which works" for p in parts["selector"] if p.cuts_rows]
    for what in ["rollout-side plug-ins work"] * needs_program(parts) + cutters:
        raise ConfigError(f"{what} on text only; this model has a multimodal processor")


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rows that are trained, the numbers of hosts/measures.py, and a hash of the prompts."""
    prompts = prompts_hash(key.encode() for key in batch.prompt_key)
    return {"rows": float(batch.size), "prompts": float(prompts), **batch_measures(batch)}


def named(metrics: dict[str, Any]) -> dict[str, Any]:
    """verl's metrics of an update under its names, ours as they are."""
    out = {name if name.startswith(("rlx/", "actor/")) else f"actor/{name}": v for name, v in metrics.items()}
    if "actor/mfu" in out:
        out["perf/mfu/actor"] = out.pop("actor/mfu")
    return out


def eos_tokens(tokenizer: Any, generation: Any) -> list[int]:
    """Token ids that end a response: the tokenizer's, and those of the model's generation configuration."""
    ids = getattr(generation, "eos_token_id", None)
    listed = ids if isinstance(ids, (list, tuple)) else [ids]
    return sorted({i for i in (tokenizer.eos_token_id, *listed) if i is not None})
