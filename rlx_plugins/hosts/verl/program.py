"""The rollout side of a step: run the program, and hand its rows to verl as if a replay buffer had sampled them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from ...core.batch import RolloutBatch, pack
from ...core.config import Parts
from ...core.context import Context
from ...core.errors import DataError
from ...core.randomness import hash_bits
from ...core.rollout import drive, rollout_program
from ..signals import PRIOR, TOP_TOKENS, add_supplied, per_token, row_column, row_name, top_columns
from ..value_model import Priors
from .columns import log_probs, logp_behavior
from .generation import Engine, Requests, policy_forward
from .hidden import policy_hidden
from .rows import PROMPT_KEY, missing_field, prompt_key
from .settings import plain

if TYPE_CHECKING:
    from .trainer import RLXTrainer

INTERNAL = frozenset("raw_prompt dummy_tensor tools_kwargs interaction_kwargs uid index prompt extra_info".split())
"""Fields of a dataset row that are verl's own, not columns a part reads."""


class RolloutSource:
    """In the place of verl's replay buffer: `sample` runs one step of the rollout program; validation is the buffer's.

    trainer  verl's trainer; parts  the plug-ins; buffer  verl's own replay buffer
    """

    def __init__(self, trainer: RLXTrainer, parts: Parts, buffer: Any):
        self.trainer, self.parts, self.buffer = trainer, parts, buffer
        self.prompts = Prompts(trainer)
        self.token_columns = frozenset().union(*(getattr(p, "token_columns", ()) for p in parts))
        self.supplied = parts.requires & set(trainer.rlx["rollout_signals"] or ())
        self.requests = Requests()
        self.batch: RolloutBatch | None = None
        self.keys: list[str] = []

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """A training batch made by the program, in TransferQueue under keys of its own."""
        if partition_id != "train":
            return self.buffer.sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        ctx = self._context(global_steps, batch_size)
        self.trainer._context = ctx
        engine = self._engine(ctx)
        groups = drive(rollout_program(self.parts, ctx), engine.execute)
        ctx.log("generated_tokens", engine.generated)
        self.batch = pack(groups, version=ctx.version, step=ctx.step, total_steps=ctx.total_steps, seed=ctx.seed)
        self.keys, fields, tags = self._records(self.batch, global_steps)
        tq.kv_batch_put(keys=self.keys, partition_id=partition_id, fields=fields, tags=tags)
        self.prompts.forget_offered()
        return KVBatchMeta(partition_id=partition_id, keys=list(self.keys), tags=tags), {}

    def table(self, data: TensorDict, keys: list[str]) -> tuple[RolloutBatch, Tensor]:
        """The packed rows with the log-probs verl has computed since, and the place [B] of each among `keys`."""
        assert self.batch is not None
        batch, where = self.batch, {key: i for i, key in enumerate(keys)}
        place = torch.tensor([where[key] for key in self.keys])
        width = batch.response_mask.shape[1]
        made: dict[str, Any] = {n: c[place] for n, c in log_probs(data, width).items() if n != "logp_rollout"}
        recorded = batch.logp_behavior if batch.has("logp_behavior") else None
        made["logp_behavior"] = logp_behavior({**batch, **made}, recorded)
        made["correct"] = batch.rewards > float(self.trainer.rlx["success_threshold"])
        if self.trainer.reports_top_tokens and not TOP_TOKENS <= set(batch):  # no row was sampled in this step
            made |= top_columns([None] * batch.size, width)
        for name in sorted(self.parts.requires - set(batch) - set(made)):
            values = [self.columns(key).get(name) for key in batch.prompt_key]
            if any(v is not None for v in values):
                made[name] = row_column(values)
        columns = {**batch, **made}
        fields = {name: self._supplied(batch, name) for name in sorted(self.supplied)}
        add_supplied(columns, fields, [len(r) for r in batch.rollout], per_token(self.parts))
        return batch.with_columns(**columns), place

    def _supplied(self, batch: RolloutBatch, name: str) -> list[Any]:
        """A field of the reward function's dictionary, for every row."""
        for i, r in enumerate(batch.rollout):
            if name not in r.extras:
                raise DataError(missing_field(name, row_name(batch.prompt_key, i), [*r.components, *r.extras]))
        return [r.extras[name] for r in batch.rollout]

    def columns(self, key: str) -> dict[str, Any]:
        """What parts are told about a prompt: its row, with the text columns they want as tokens tokenised."""
        row = self.prompts.row(key)
        told = {**(row.get("extra_info") or {}), **{n: v for n, v in row.items() if n not in INTERNAL}}
        for name in self.token_columns:
            if isinstance(told.get(name), str):
                told[name] = self.trainer.tokenizer(told[name], add_special_tokens=False)["input_ids"]
        if self._priors is not None and told.get(PRIOR) is None:
            told[PRIOR] = self._priors.of(key, self.prompts[key])
        return told

    @cached_property
    def _priors(self) -> Priors | None:
        return Priors.wanted(self.parts, self.trainer.value_model, self.trainer.eos[0])

    def _context(self, global_steps: int, groups: int) -> Context:
        config = self.trainer.config
        return Context(
            step=global_steps - 1,
            total_steps=self.trainer.total_training_steps,
            groups=groups,
            group_size=config.actor_rollout_ref.rollout.n,
            max_tokens=config.data.max_response_length,
            prompts=self.prompts,
            offered=self.prompts.offered(),  # type: ignore[arg-type]
            columns=self.columns,
            version=global_steps - 1,
            seed=int(self.trainer.rlx["seed"]),
        )

    @cached_property
    def _client(self) -> Any:
        return self.trainer.get_llm_client()

    def _engine(self, ctx: Context) -> Engine:
        trainer, rollout = self.trainer, self.trainer.config.actor_rollout_ref.rollout
        ranks = trainer._ranks()
        micro = 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu
        group, multiple = trainer.actor_rollout_wg, ranks * micro
        return Engine(
            self._client,
            trainer.get_reward_handles(),
            self.prompts.row,
            lambda rows: policy_forward(group, rows, temperature=float(rollout.temperature), multiple=multiple),
            lambda rows: policy_hidden(group, rows, multiple=multiple),
            sampling={
                "temperature": rollout.temperature,
                "top_p": rollout.top_p,
                "top_k": rollout.top_k,
                "repetition_penalty": 1.0,
                "logprobs": rollout.calculate_log_probs,
            },
            version=ctx.version,
            eos=trainer.eos,
            chunk=trainer.rlx["generation_chunk"],
            own_temperatures=bool(self.parts["temperature"]),
            component_names=plain(trainer.rlx["reward_components"]),
            supplied=plain(trainer.rlx["rollout_signals"]) or (),
            requests=self.requests,
            seed=int(trainer.rlx["seed"]) if trainer.rlx["request_seeds"] else None,
        )

    def _records(self, batch: RolloutBatch, global_steps: int) -> tuple[list[str], TensorDict, list[dict[str, Any]]]:
        """Keys, fields and tags of the rows, as verl's agent loops would have written them."""
        keys, fields, tags = [], [], []
        for i, r in enumerate(batch.rollout):
            uid = f"{hash_bits(r.group, global_steps) & (2**64 - 1):016x}"
            n = len(r)
            response = batch.response_ids[i, :n] if n else torch.tensor([self.trainer.eos[0]])
            mask = batch.response_mask[i, :n].long() if n else torch.tensor([0])
            prompt = torch.tensor(r.prompt)
            ids = torch.cat([prompt, response])
            scores = torch.zeros(len(response))
            scores[-1] = math.nan if r.reward is None else r.reward
            logp = batch.logp_rollout[i, :n].float().nan_to_num() if n else torch.zeros(1)
            row = self.prompts.row(r.prompt_key)
            keys.append(f"{uid}_{r.slot}_0")
            fields.append(
                {
                    "prompts": prompt,
                    "responses": response,
                    "response_mask": mask,
                    "loss_mask": mask,
                    "input_ids": ids,
                    "position_ids": torch.arange(len(ids)),
                    "rm_scores": scores,
                    "rollout_log_probs": logp,
                    "uid": uid,
                    "session_id": r.slot,
                    "num_turns": 2,
                    "multi_modal_inputs": {},
                    "extra_fields": {"reward_extra_info": dict(r.components)},
                    **{n: row[n] for n in ("raw_prompt", "data_source", "reward_model", "extra_info") if n in row},
                }
            )
            versions = [s.version for s in r.segments if s.from_model and s.version >= 0] or [global_steps - 1]
            tags.append(
                {
                    "status": "success",
                    "prompt_len": len(prompt),
                    "response_len": len(response),
                    "seq_len": len(ids),
                    "global_steps": global_steps,
                    "min_global_steps": min(versions),
                    "max_global_steps": max(versions),
                }
            )
        return keys, list_of_dict_to_tensordict(fields), tags


class Prompts(Mapping[str, list[int]]):
    """Token ids of the dataset's prompts by key, built by verl's own prompt builder when asked for.

    Prompts that verl's data loader offers are known as they come; the whole dataset is read through only when a part
    asks for a prompt that was not offered.
    """

    def __init__(self, trainer: RLXTrainer):
        self.trainer = trainer
        self.seen: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, list[int]] = {}

    def offered(self) -> Offered:
        """Keys of the prompts of verl's data loader, fetched one by one as they are taken."""
        return Offered(self._fetch)

    def _fetch(self) -> str:
        batch = self.trainer._fetch_one_gen_batch()
        row = {name: tu.get(batch, name)[0] for name in batch.keys()}
        key = prompt_key(row)
        self.seen[key] = row
        return key

    def forget_offered(self) -> None:
        """Rows and their tokens are kept for one step."""
        self.seen, self.tokens = {}, {}

    @cached_property
    def _index(self) -> dict[str, int]:
        """Prompt key -> number of its first row, in the order of the dataset."""
        dataset = self.trainer.train_dataset
        table = dataset.dataframe
        if PROMPT_KEY in table.column_names:
            keys = [str(key) for key in table[PROMPT_KEY]]
        else:
            keys = [prompt_key(dataset[i]) for i in range(len(dataset))]
        index: dict[str, int] = {}
        for i, key in enumerate(keys):
            index.setdefault(key, i)
        return index

    def row(self, key: str) -> dict[str, Any]:
        """The dataset's row of a prompt, as verl's agent loops get it."""
        if key not in self.seen:
            collated = collate_fn([self.trainer.train_dataset[self._index[key]]])
            self.seen[key] = {name: value[0] for name, value in collated.items()}
        return self.seen[key]

    @cached_property
    def _build(self) -> Callable[[Any], list[int]]:
        trainer = self.trainer
        builder = create_continuous_token_builder(
            trainer.tokenizer,
            hf_model_type=trainer.model_type,
            chat_template_kwargs=trainer.config.data.get("apply_chat_template_kwargs", {}),
            mm_processor_kwargs={},
            processor=None,
        )
        return builder.build_initial_tokens

    def __getitem__(self, key: str) -> list[int]:
        if key not in self.tokens:
            bound = self.trainer.config.data.max_prompt_length
            self.tokens[key] = list(self._build(list(self.row(key)["raw_prompt"])))[-bound:]
        return self.tokens[key]

    def __contains__(self, key: object) -> bool:
        return key in self.seen or key in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


class Offered:
    """An endless iterable of prompt keys."""

    def __init__(self, fetch: Callable[[], str]):
        self.fetch = fetch

    def __iter__(self) -> Iterator[str]:
        while True:
            yield self.fetch()
