"""Operations of the rollout program, executed by verl's rollout servers, reward workers and training workers.

The program runs in verl's driver. Every running row has at most one request under way: to a rollout server for more
tokens, or to a reward worker for its reward. Requests run on an event loop in a thread of their own and put their
answers in a queue; rows change in the program's thread only, when `execute` takes answers out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import queue
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu

from ...core.errors import DataError
from ...core.operations import Abort, Forward, Generate, Operation
from ...core.randomness import hash_bits
from ...core.trajectory import Rollout, Segment
from .columns import nest
from .rows import SCORE
from .top_tokens import of_answer

BAN = -100.0
"""Logit bias of a banned token, the lowest vLLM takes."""


class Requests:
    """Coroutines on an event loop in a background thread; their answers come out of `answers` as they arrive."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="rlx rollout requests", daemon=True).start()
        self.answers: queue.SimpleQueue[tuple[Rollout, str, concurrent.futures.Future[Any]]] = queue.SimpleQueue()

    def send(self, rollout: Rollout, what: str, request: Coroutine[Any, Any, Any]) -> None:
        future = asyncio.run_coroutine_threadsafe(request, self.loop)
        future.add_done_callback(lambda done: self.answers.put((rollout, what, done)))


class Engine:
    """Executes a step's operations.

    client       verl's client of its rollout servers
    rewards      handles of verl's reward workers
    rows         prompt key -> the dataset's row, as verl's agent loops hand it to the reward function
    forward      training workers' log-probs and entropies of packed sequences (`policy_forward`)
    hidden       their last-layer states at the last token of sequences (`policy_hidden`)
    sampling     sampling parameters of every request; each adds its temperature and token bound
    version      weight updates the servers' policy has seen
    eos          token ids that end a response
    chunk        response tokens per request (None: unbounded)
    own_temperatures   rollouts say their temperature themselves (else `sampling`'s holds for all)
    component_names    entries of the reward function's dictionary that are components; None: all numbers but `score`
                       and those of `supplied`
    supplied     entries of it that go into the rows' extras
    seed         every request carries a seed of its own, made of this one; None: the engine's own randomness
    generated    tokens sampled so far
    """

    def __init__(
        self,
        client: Any,
        rewards: Sequence[Any],
        rows: Callable[[str], Mapping[str, Any]],
        forward: Callable[[list[tuple[list[int], list[int]]]], list[tuple[torch.Tensor, torch.Tensor]]],
        hidden: Callable[[list[list[int]]], list[torch.Tensor]],
        *,
        sampling: Mapping[str, Any],
        version: int,
        eos: Sequence[int],
        chunk: int | None = None,
        own_temperatures: bool = False,
        component_names: Sequence[str] | None = None,
        supplied: Sequence[str] = (),
        requests: Requests | None = None,
        seed: int | None = None,
    ):
        self.client, self.rewards, self.rows, self.forward, self.hidden = client, rewards, rows, forward, hidden
        self.sampling, self.version, self.eos, self.chunk = dict(sampling), version, frozenset(eos), chunk
        self.own_temperatures, self.component_names, self.supplied = own_temperatures, component_names, supplied
        self.requests, self.seed = requests or Requests(), seed
        self.under_way: set[int] = set()
        self.sent = self.generated = 0

    def execute(self, operation: Operation) -> Any:
        """Carry out one operation; what the hook that yielded it gets back."""
        if isinstance(operation, Generate):
            return self._generate(operation)
        if isinstance(operation, Abort):
            return self._abort(operation)
        return self._evaluate(operation)

    # ---- Generate, Abort
    def _generate(self, operation: Generate) -> None:
        rows = operation.rollouts
        for r in rows:
            if not self.own_temperatures:
                r.temperature = float(self.sampling["temperature"])
            if id(r) not in self.under_way:
                r.state = "running"
                self._go_on(r)
        while running := [r for r in rows if r.state == "running"]:
            busy = {r.group for r in running}
            if operation.until == "group" and any(r.group not in busy for r in rows):
                return
            if len(rows) - len(running) >= operation.enough:
                return
            self._take_answer()

    def _abort(self, operation: Abort) -> None:
        """Requests can't be recalled from verl's servers: each ends with its chunk, whose tokens the row keeps."""
        rows = {id(r) for r in operation.rollouts}
        while self.under_way & rows:
            self._take_answer(stopping=rows)
        for r in operation.rollouts:
            r.state, r.stop = "parked", "aborted"

    def _go_on(self, r: Rollout) -> None:
        """Finish, pause, or ask for more tokens."""
        length = len(r)
        last = r.segments[-1].tokens[-1:] if r.segments else []
        if last and last[0] in self.eos and r.segments[-1].from_model:
            self._finish(r, "eos")
        elif length >= r.max_tokens:
            self._finish(r, "length")
        elif r.pause_at is not None and length >= r.pause_at:
            r.state = "paused"
        else:
            stops = [r.max_tokens - length] + ([r.pause_at - length] if r.pause_at is not None else [])
            room = 1 if r.banned else min(stops) if self.chunk is None else min(*stops, self.chunk)
            self._send(r, "tokens", self._sample(r.prompt + r.context + r.tokens, self._parameters(r, room)))

    def _finish(self, r: Rollout, stop: Any) -> None:
        """The row stays "running" until its reward is there."""
        r.stop = stop
        self._send(r, "reward", self._score(r.prompt_key, list(r.prompt), r.tokens))

    def _send(self, r: Rollout, what: str, request: Coroutine[Any, Any, Any]) -> None:
        self.under_way.add(id(r))
        self.requests.send(r, what, request)

    def _take_answer(self, stopping: frozenset[int] | set[int] = frozenset()) -> None:
        """Wait for one answer and let its row go on (not those that are being stopped)."""
        r, what, done = self.requests.answers.get()
        self.under_way.discard(id(r))
        answer = done.result()
        if what == "tokens":
            self._append(r, answer)
            if id(r) not in stopping:
                if answer.token_ids:
                    self._go_on(r)
                else:
                    self._finish(r, "eos")
        else:
            r.reward, r.components, told = answer
            r.extras |= told
            r.finish(r.stop or "eos")

    def _append(self, r: Rollout, output: Any) -> None:
        tokens = list(output.token_ids)
        self.generated += len(tokens)
        if not tokens:
            return
        told = output.extra_fields.get("global_steps")
        version = self.version if told is None else int(told)
        logp = [float(x) for x in output.log_probs] if output.log_probs else None
        top = of_answer(output)
        if r.banned:  # the engine's numbers are those of what was left: as if nothing had been banned, unknown
            logp = top = None
            r.banned = []
        last = r.segments[-1] if r.segments else None
        if last is not None and (last.source, last.version, last.trained) == ("policy", version, True):
            last.extend(tokens, logp, top)
        else:
            turn = last.turn if last is not None else 0
            r.segments.append(Segment(tokens, "policy", logp, version, turn, top=top))

    def _parameters(self, r: Rollout, room: int) -> dict[str, Any]:
        """Sampling parameters of a request for up to `room` further tokens of a row."""
        own: dict[str, Any] = {"temperature": r.temperature, "max_tokens": room}
        if r.banned:
            own["logit_bias"] = dict.fromkeys(r.banned, BAN)
        if self.seed is not None:
            own["seed"] = hash_bits(self.seed, r.group, r.slot, len(r)) & (2**31 - 1)
        return {**self.sampling, **own}

    async def _sample(self, prompt: list[int], parameters: dict[str, Any]) -> Any:
        return await self.client.generate(uuid4().hex, prompt_ids=prompt, sampling_params=parameters)

    async def _score(
        self, key: str, prompt: list[int], tokens: list[int]
    ) -> tuple[float | None, dict[str, float], dict[str, Any]]:
        """The reward of verl's reward worker, its components, and the fields of it that parts read."""
        row = dict(self.rows(key))
        self.sent += 1
        worker = self.rewards[self.sent % len(self.rewards)]
        result = await worker.compute_score.remote(scored_row(row, prompt, tokens or [min(self.eos)]))
        reward, info = result["reward_score"], result["reward_extra_info"]
        told = {name: info[name] for name in self.supplied if name in info}
        return _number(reward), components(info, self.component_names, self.supplied), told

    # ---- Forward
    def _evaluate(self, operation: Forward) -> list[Any]:
        rows = operation.rollouts
        if not rows:
            return []
        if operation.want in ("logp", "entropy"):
            made = self.forward([(r.prompt + r.context, r.tokens) for r in rows])
            found = [pair[operation.want == "entropy"] for pair in made]
            return [x[len(r.prompt + r.context) - 1 :][: len(r)].tolist() for r, x in zip(rows, found)]
        if operation.want == "prompt_entropy":
            made = self.forward([(r.prompt, []) for r in rows])
            return [float(entropy.mean()) for _, entropy in made]
        if operation.want == "hidden":
            return self.hidden([r.prompt + r.context + r.tokens for r in rows])
        raise DataError(f"verl's training workers return no {operation.want!r}")


def components(info: Mapping[str, Any], names: Sequence[str] | None, supplied: Sequence[str] = ()) -> dict[str, float]:
    """Reward components of one row; the names are chosen ones or all numbers but the score and what is `supplied`."""
    if names is None:
        others = {SCORE, *supplied}
        names = [k for k, v in info.items() if k not in others and isinstance(v, (bool, int, float))]
    for name in names:
        if name not in info:
            raise DataError(
                f"rlx.reward_components names {name!r}, but the reward function returned"
                f" {', '.join(sorted(info)) or 'a plain number'}"
            )
    return {name: math.nan if info[name] is None else float(info[name]) for name in names}


def _number(reward: Any) -> float | None:
    return None if reward is None or math.isnan(float(reward)) else float(reward)


def scored_row(row: Mapping[str, Any], prompt: list[int], tokens: list[int]) -> DataProto:
    """One finished row in the form verl's reward workers take."""
    prompts, responses = torch.tensor([prompt]), torch.tensor([tokens])
    ids = torch.cat([prompts, responses], 1)
    mask = torch.ones_like(ids)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": mask.cumsum(1) - 1,
    }
    others = {name: np.array([value]) for name, value in row.items() if not isinstance(value, torch.Tensor)}
    others |= {
        "__num_turns__": np.array([2]),
        "tool_extra_fields": np.array([{}], dtype=object),
        "prompt_len": np.array([len(prompt)]),
        "response_len": np.array([len(tokens)]),
    }
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=others)


def policy_forward(
    workers: Any, rows: list[tuple[list[int], list[int]]], *, temperature: float, multiple: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs and entropies under the trainer's policy, no gradient: per row two tensors over [prompt | tokens].

    Entry i of a row belongs to the prediction of its token i + 1. `multiple`: rows are padded to a multiple of it.
    """
    padding = -len(rows) % multiple
    full = rows + rows[:1] * padding
    ids = [prompt + (tokens or [prompt[-1]]) for prompt, tokens in full]
    sizes = torch.tensor([len(x) for x in ids])
    width = int(sizes.max())
    flat = torch.tensor([x + [0] * (width - len(x)) for x in ids])
    place = torch.arange(width).expand_as(flat)
    responses = [tokens or [prompt[-1]] for prompt, tokens in full]
    data = TensorDict(
        {
            "input_ids": nest(flat, sizes),
            "position_ids": nest(place, sizes),
            "prompts": torch.nested.as_nested_tensor([torch.tensor(p) for p, _ in full], layout=torch.jagged),
            "responses": torch.nested.as_nested_tensor([torch.tensor(r) for r in responses], layout=torch.jagged),
            "loss_mask": torch.nested.as_nested_tensor([torch.ones(len(r)) for r in responses], layout=torch.jagged),
        },
        batch_size=len(full),
    )
    tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=temperature)
    output = workers.compute_log_prob(data)
    made = zip(output["log_probs"].unbind(), output["entropy"].unbind())
    out = []
    for (prompt, tokens), (logp, entropy) in zip(rows, made):
        out.append((logp[: len(prompt) + len(tokens)].float(), entropy[: len(prompt) + len(tokens)].float()))
    return out
