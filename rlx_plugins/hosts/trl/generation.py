"""Operations of the rollout program, executed by all ranks in lock step with TRL's own generation and reward code.

Rank 0 holds the program; every operation becomes a message to all ranks, each works on its share of the rows, and the
results are gathered. A message is a plain dictionary: {"do": "sample" | "score" | "forward" | "end" | "fail", ...}.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from ...core.errors import RLXError
from ...core.operations import Abort, Forward, Generate, Operation, Steps
from ...core.rollout import drive
from ...core.trajectory import Rollout, Segment, Top

if TYPE_CHECKING:
    from .trainer import RLXTrainer

Message = dict[str, Any]


class LockStep:
    """Executes a rollout program on all ranks.

    trainer  the host: its `_generate_single_turn`, `_calculate_rewards` and model do the work
    version  weight updates the sampling policy has seen
    chunk    response tokens per call of the engine (None: unbounded)
    own_temperatures  rollouts say their temperature themselves (else the trainer's holds for all)
    report_logp  sampled tokens need log-probs: where the engine (transformers) gives none, the trainer's own forward
                 does, right after sampling and under the sampling context
    """

    def __init__(
        self, trainer: RLXTrainer, version: int, *, chunk: int | None, own_temperatures: bool, report_logp: bool
    ):
        self.trainer, self.version, self.chunk = trainer, version, chunk
        self.own_temperatures, self.report_logp = own_temperatures, report_logp
        self.accelerator = trainer.accelerator
        self.serving = False
        self.logged: dict[tuple[str, int], dict[str, Any]] = {}

    def run(self, program: Steps | None, finish: Callable[[Any], Any]) -> Any:
        """Drive the program on rank 0 (None elsewhere) and return `finish(its result)` on every rank."""
        if not self.accelerator.is_main_process:
            return self._follow()
        assert program is not None
        try:
            result = finish(drive(program, self.execute))
        except Exception as error:
            if not self.serving:  # the other ranks wait for a message, not inside a collective
                self._broadcast({"do": "fail", "why": f"{type(error).__name__}: {error}"})
            raise
        self._broadcast({"do": "end", "result": result})
        return result

    def _follow(self) -> Any:
        while True:
            message = self._broadcast(None)
            if message["do"] == "end":
                return message["result"]
            if message["do"] == "fail":
                raise RLXError(f"the rollout program failed on rank 0: {message['why']}")
            self._serve(message)

    def _broadcast(self, message: Message | None) -> Message:
        if self.accelerator.num_processes == 1:
            assert message is not None
            return message
        return broadcast_object_list([message], from_process=0)[0]

    def _all(self, message: Message) -> Any:
        """Have all ranks serve a message; rank 0 gets the results of all rows, in order."""
        self._broadcast(message)
        self.serving = True
        result = self._serve(message)
        self.serving = False
        return result

    # ---- rank 0: operations on rollouts
    def execute(self, operation: Operation) -> Any:
        """Carry out one operation; what the hook that yielded it gets back."""
        if isinstance(operation, Generate):
            return self._generate(operation)
        if isinstance(operation, Forward):
            return self._forward(operation)
        assert isinstance(operation, Abort)
        for r in operation.rollouts:
            r.state, r.stop = "parked", "aborted"
        return None

    def _generate(self, operation: Generate) -> None:
        running = list(operation.rollouts)
        for r in running:
            r.state = "running"
            if not self.own_temperatures:
                r.temperature = self.trainer.temperature
        while True:
            ended = [r for r in running if self._ends(r)]
            running = [r for r in running if r.state == "running"]
            self._score([r for r in ended if r.state == "finished"])
            if not running or len(operation.rollouts) - len(running) >= operation.enough:
                return
            if operation.until == "group" and self.chunk and self._any_settled(operation.rollouts):
                return
            self._extend(running)

    def _ends(self, r: Rollout) -> bool:
        """Whether the rollout is over or stands at its pause; sets its state."""
        if r.state != "running":
            return True
        length = len(r)
        last = r.segments[-1].tokens[-1:] if r.segments else []
        if last and last[0] in self.trainer.eos_token_ids and r.segments[-1].from_model:
            r.finish("eos")
        elif length >= r.max_tokens:
            r.finish("length")
        elif r.pause_at is not None and length >= r.pause_at:
            r.state = "paused"
        return r.state != "running"

    def _any_settled(self, rollouts: Sequence[Rollout]) -> bool:
        busy = {r.group for r in rollouts if r.state == "running"}
        return any(r.group not in busy for r in rollouts)

    def _extend(self, running: list[Rollout]) -> None:
        """One call of the engine for each way of sampling; new tokens become a segment or lengthen the last one."""
        for temperature, banned in sorted({_way(r) for r in running}):
            rows = [r for r in running if _way(r) == (temperature, banned)]
            room = [self._room(r) for r in rows]
            sampled = self._all(
                {
                    "do": "sample",
                    "rows": [r.prompt + r.context + r.tokens for r in rows],
                    "temperature": temperature,
                    "banned": banned,
                    "max_new": max(room),
                }
            )
            new = [tokens[:n] for n, (tokens, *_) in zip(room, sampled)]
            logps = [None if logp is None else logp[:n] for n, (_, logp, _) in zip(room, sampled)]
            tops = [None if top is None else (top[0][:n], top[1][:n]) for n, (*_, top) in zip(room, sampled)]
            if self.report_logp and all(logp is None for logp in logps):
                seen = [(r.prompt + r.context + r.tokens, tokens) for r, tokens in zip(rows, new)]
                logps = self._all({"do": "forward", "want": "logp", "rows": seen})
            for r, tokens, logp, top in zip(rows, new, logps, tops):
                self._append(r, tokens, logp, top)
                r.banned = []

    def _room(self, r: Rollout) -> int:
        stops = [r.max_tokens] + ([r.pause_at] if r.pause_at is not None else [])
        room = min(stops) - len(r)
        return room if self.chunk is None else min(room, self.chunk)

    def _append(self, r: Rollout, tokens: list[int], logp: list[float] | None, top: Top | None) -> None:
        if not tokens:  # the engine stopped without a token
            r.finish("eos")
            return
        last = r.segments[-1] if r.segments else None
        if last is not None and last.source == "policy" and last.version == self.version and last.trained:
            last.extend(tokens, logp, top)
        else:
            turn = last.turn if last is not None else 0
            r.segments.append(Segment(tokens, "policy", logp, self.version, turn, top=top))

    def _score(self, finished: list[Rollout]) -> None:
        """Rewards of finished rows, by TRL's own reward code."""
        if not finished:
            return
        rows = [(r.prompt_key, r.tokens) for r in finished]
        rewards, logged = self._all({"do": "score", "rows": rows})
        weights = self.trainer.reward_weights.tolist()
        for i, (r, row) in enumerate(zip(finished, rewards)):
            r.components = dict(zip(self.trainer.component_names, row))
            known = [w * x for w, x in zip(weights, row) if x == x]
            r.reward = sum(known) if known else None
            told = {name: values[i] for name, values in logged.items()}
            self.logged[r.group, r.slot] = told
            r.extras |= {name: told[name] for name in self.trainer.needs.supplied if name in told}  # replays keep them

    def _forward(self, operation: Forward) -> list[Any]:
        if not operation.rollouts:
            return []
        asks_for_prompt = operation.want == "prompt_entropy"
        rows = [(r.prompt, []) if asks_for_prompt else (r.prompt + r.context, r.tokens) for r in operation.rollouts]
        return self._all({"do": "forward", "want": operation.want, "rows": rows})

    # ---- every rank: its share
    def _serve(self, message: Message) -> Any:
        rows = message["rows"]
        size = -(-len(rows) // self.accelerator.num_processes)
        start = self.accelerator.process_index * size
        share = rows[start : start + size]
        share = share + rows[:1] * (size - len(share))  # every rank works on equally many
        if message["do"] == "score":
            return self._serve_score(share, len(rows))
        if message["do"] == "sample":
            own = self._sample(share, message["temperature"], message["max_new"], message["banned"])
        else:
            own = self._evaluate(share, message["want"])
        return gather_object(own)[: len(rows)]

    def _sample(
        self, rows: list[list[int]], temperature: float, max_new: int, banned: tuple[int, ...]
    ) -> list[tuple[list[int], Any, Top | None]]:
        with sampling(self.trainer, temperature, max_new, banned):
            tokens, logp = self.trainer._generate_single_turn(rows, None, {}, 1)
        unknown = [[float("nan") if x is None else x for x in row] for row in logp] if logp is not None else None
        top = self.trainer.top_tokens if self.trainer.reports_top_tokens else [None] * len(rows)
        return list(zip(map(list, tokens), unknown or [None] * len(rows), top))

    def _serve_score(self, rows: list[tuple[str, list[int]]], n: int) -> tuple[list[list[float]], dict[str, list[Any]]]:
        trainer = self.trainer
        inputs = [dict(trainer.dataset_row(key)) for key, _ in rows]
        prompts = [row["prompt"] for row in inputs]
        tokens = [ids for _, ids in rows]
        rewards = trainer.score_completions(inputs, prompts, trainer.decode(prompts, tokens), tokens)
        logged = {}
        for name in sorted(set(gather_object(list(trainer._pending_extra_logs)))):
            values = trainer._pending_extra_logs.get(name, [None] * len(rows))
            logged[name] = gather_object(list(values))[:n]
        trainer._pending_extra_logs.clear()
        return rewards[:n].tolist(), logged

    @torch.no_grad()
    def _evaluate(self, rows: list[tuple[list[int], list[int]]], want: str) -> list[Any]:
        args = self.trainer.args
        out: list[Any] = []
        with disable_gradient_checkpointing(self.trainer.model, args.gradient_checkpointing_kwargs):
            for i in range(0, len(rows), args.per_device_train_batch_size):
                part = rows[i : i + args.per_device_train_batch_size]
                out += {
                    "logp": self._logp,
                    "entropy": self._entropy,
                    "hidden": self._hidden,
                    "prompt_entropy": self._prompt_entropy,
                }[want](part)
        return out

    def _logp(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        return self._per_token(rows, entropy=False)

    def _entropy(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        return self._per_token(rows, entropy=True)

    def _per_token(self, rows: list[tuple[list[int], list[int]]], *, entropy: bool) -> list[list[float]]:
        """Log-probability of every response token, or the entropy of the distribution it was drawn from."""
        width = max(len(tokens) for _, tokens in rows)
        if width == 0:
            return [[] for _ in rows]
        left, left_mask = self._padded([prompt for prompt, _ in rows], "left")
        right, right_mask = self._padded([tokens for _, tokens in rows], "right")
        ids, mask = torch.cat([left, right], 1), torch.cat([left_mask, right_mask], 1)
        made = self.trainer._get_per_token_logps_and_entropies(
            self.trainer.model, ids, mask, width, compute_entropy=entropy
        )
        values = made[1 if entropy else 0].float()
        return [row[: len(tokens)].tolist() for row, (_, tokens) in zip(values, rows)]

    def _hidden(self, rows: list[tuple[list[int], list[int]]]) -> list[Tensor]:
        ids, mask = self._padded([prompt + tokens for prompt, tokens in rows], "left")
        output = self.trainer.model(input_ids=ids, attention_mask=mask, output_hidden_states=True, logits_to_keep=1)
        return list(output.hidden_states[-1][:, -1].float().cpu())

    def _prompt_entropy(self, rows: list[tuple[list[int], list[int]]]) -> list[float]:
        ids, mask = self._padded([prompt for prompt, _ in rows], "left")
        logits = self.trainer.model(input_ids=ids, attention_mask=mask).logits.float() / self.trainer.temperature
        logp = logits.log_softmax(-1)
        predicts = mask.bool()
        predicts[mask.sum(1) > 1, -1] = False  # what follows the prompt's last token is no prompt token
        entropy = torch.where(predicts, -(logp.exp() * logp).sum(-1), 0)
        return (entropy.sum(1) / predicts.sum(1)).tolist()

    def _padded(self, rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
        tensors = [torch.tensor(ids, dtype=torch.int64) for ids in rows]
        device = self.accelerator.device
        ids = pad(tensors, padding_value=self.trainer._tokenizer.pad_token_id, padding_side=side)
        mask = pad([torch.ones_like(t) for t in tensors], padding_value=0, padding_side=side)
        return ids.to(device), mask.to(device)


def _way(r: Rollout) -> tuple[float, tuple[int, ...]]:
    """What a row's next call of the engine depends on beside its tokens."""
    return r.temperature, tuple(r.banned)


@contextlib.contextmanager
def sampling(
    trainer: RLXTrainer, temperature: float, max_new_tokens: int, banned: tuple[int, ...] = ()
) -> Iterator[None]:
    """The engine with another temperature and response bound, for the calls inside.

    banned  tokens that can't be the first of a call's new ones (transformers' own generate only)
    """
    wanted: dict[str, Any] = {"temperature": temperature}
    if trainer.use_vllm:
        engine, bound = trainer.vllm_generation, "max_completion_length"
    else:
        engine, bound = trainer.generation_config, "max_new_tokens"
        if banned:
            wanted["begin_suppress_tokens"] = [*(engine.begin_suppress_tokens or ()), *banned]
    wanted[bound] = max_new_tokens
    before = {name: getattr(engine, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(engine, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(engine, name, value)
