"""A rollout server for verl on transformers: ``actor_rollout_ref.rollout.name=rlx_hf``.

It takes vLLM's place where starting vLLM costs more than the run. Requests join and leave a running batch between
tokens; each has its own sampling parameters, can be aborted alone and then returns the tokens it has, and can be a
teacher's (``prompt_logprobs``). What it draws depends on the seed, the version of the weights, the prompt and how many
requests had that prompt before, never on the order of arrival: a run repeats itself up to rounding.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from ..top_tokens import TOP, asked_for, reported

__all__ = ["TransformersAdapter", "TransformersReplica", "TransformersServer"]

_NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "n": 1}
_IGNORED = {"extra_args", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"}


@dataclass
class Request:
    """One generation under way; ``tokens`` grows, ``uniforms`` [max_tokens] decides what is drawn.

    ``bias`` is added to the logits of single tokens. The ``top`` likeliest tokens are reported at each place, which
    vLLM's ``logprobs`` asks for.
    """

    id: str
    prompt: list[int]
    uniforms: torch.Tensor
    stop: frozenset[int]
    temperature: float
    top_k: int
    top_p: float
    done: asyncio.Future[TokenOutput]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    top: int = 0
    top_ids: list[list[int]] = field(default_factory=list)
    top_log_probs: list[list[float]] = field(default_factory=list)
    aborted: bool = False

    @property
    def finished(self) -> bool:
        last = self.tokens[-1] if self.tokens else None
        return self.aborted or last in self.stop or len(self.tokens) == len(self.uniforms)


class TransformersServer:
    """The Ray actor behind a replica: the model, its running batch, and the methods verl calls on a rollout server."""

    def __init__(self, path: str, prompt_length: int, response_length: int, max_model_len: int | None, seed: int):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.vocabulary = len(tokenizer)
        eos = self.model.generation_config.eos_token_id or tokenizer.eos_token_id
        self.eos = frozenset(eos if isinstance(eos, list) else [eos])
        self.prompt_length, self.response_length = prompt_length, response_length
        self.max_model_len = max_model_len or self.model.config.max_position_embeddings
        self.seed = seed
        self.version: int | None = None
        self.asked: Counter[bytes] = Counter()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loop: asyncio.Task[None] | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.rejecting = False
        self.between_tokens = asyncio.Lock()

    async def generate(
        self, request_id: str, *, prompt_ids: Iterable[int], sampling_params: dict[str, Any], **media: Any
    ) -> TokenOutput:
        """Tokens and log-probabilities that follow ``prompt_ids``, or the prompt's own with ``prompt_logprobs``."""
        given = {name: value for name, value in media.items() if value is not None and name != "priority"}
        if given:
            raise ValueError(f"rlx_hf generates from text only, got {', '.join(given)}")
        prompt, params = [int(token) for token in prompt_ids], dict(sampling_params)
        while not self.open.is_set():
            if self.rejecting:
                return self._output([], [], "aborted")
            await self.open.wait()
        if params.get("prompt_logprobs") is not None:
            async with self.between_tokens:
                return await asyncio.to_thread(self._score, prompt, int(params["prompt_logprobs"]))
        request = self._request(request_id, prompt, params)
        self.waiting.append(request)
        if self.loop is None or self.loop.done():
            self.loop = asyncio.create_task(self._generate_all())
        return await request.done

    def _request(self, request_id: str, prompt: list[int], params: dict[str, Any]) -> Request:
        left = self.max_model_len - len(prompt)
        if left < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in max_model_len={self.max_model_len}")
        top = asked_for(params)
        params.pop("logprobs", None)
        limit = params.pop("max_tokens", params.pop("max_new_tokens", None))
        if limit is None:
            limit = min(self.response_length, self.prompt_length + self.response_length - len(prompt))
        limit = max(1, min(int(limit), left))
        stop = frozenset() if params.pop("ignore_eos", False) else self.eos
        stop |= frozenset(params.pop("stop_token_ids", None) or ())
        temperature, top_p = float(params.pop("temperature", 1.0)), float(params.pop("top_p", 1.0))
        top_k, seed = int(params.pop("top_k", -1)), params.pop("seed", None)
        bias = {int(token): float(value) for token, value in (params.pop("logit_bias", None) or {}).items()}
        unknown = {k: v for k, v in params.items() if k not in _IGNORED and v is not None and v != _NEUTRAL.get(k)}
        if unknown:
            raise ValueError(f"rlx_hf has no sampling parameter {', '.join(f'{k}={v}' for k, v in unknown.items())}")
        return Request(
            id=request_id,
            prompt=prompt,
            uniforms=self._uniforms(prompt, limit, seed),
            stop=stop,
            temperature=temperature,
            top_k=top_k if top_k > 0 else self.vocabulary,
            top_p=top_p,
            done=asyncio.get_running_loop().create_future(),
            bias=bias,
            top=top,
        )

    def _uniforms(self, prompt: list[int], count: int, seed: int | None) -> torch.Tensor:
        key = hashlib.sha256(f"{seed if seed is not None else self.seed}/{self.version}/{prompt}".encode()).digest()
        if seed is None:
            self.asked[key] += 1
            key = hashlib.sha256(key + self.asked[key].to_bytes(8, "big")).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big", signed=True))
        return torch.rand(count, generator=generator, dtype=torch.float64)

    async def _generate_all(self) -> None:
        try:
            while self.waiting or self.running:
                async with self.between_tokens:
                    await self._generate_batch()
        except Exception as error:
            for request in self.waiting + self.running:
                if not request.done.done():
                    request.done.set_exception(error)
            self.waiting, self.running = [], []

    async def _generate_batch(self) -> None:
        """Generates token by token until the batch changes: someone waits, is aborted, or half of it has finished."""
        self.running += self.waiting
        self.waiting = []
        rows = self.running
        tokens = self._token_by_token(rows)
        while True:
            self._let_go()
            if self.waiting or len(self.running) <= len(rows) // 2:
                return
            await asyncio.to_thread(next, tokens)

    def _let_go(self) -> None:
        for request in self.running:
            if request.finished and not request.done.done():
                stop_reason = "aborted" if request.aborted else "completed"
                output = self._output(request.tokens, request.log_probs, stop_reason)
                if request.top:
                    output.extra_fields[TOP] = reported(request.top_ids, request.top_log_probs)
                request.done.set_result(output)
        self.running = [request for request in self.running if not request.finished]

    def _token_by_token(self, rows: list[Request]) -> Iterator[None]:
        """Appends a token to every unfinished row each time it is resumed; starts with the rows' tokens so far."""
        known = [row.prompt + row.tokens for row in rows]
        longest = max(map(len, known))
        ids = torch.tensor([[0] * (longest - len(k)) + k for k in known])
        mask = torch.tensor([[0] * (longest - len(k)) + [1] * len(k) for k in known])
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        temperature = torch.tensor([row.temperature for row in rows])[:, None]
        top_k = torch.tensor([min(row.top_k, self.vocabulary) for row in rows])[:, None]
        top_p = torch.tensor([row.top_p for row in rows])[:, None]
        most = max(row.top for row in rows)
        cache = None
        while True:
            with torch.no_grad():
                output = self.model(
                    input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
                )
            cache = output.past_key_values
            uniform = torch.tensor([0.0 if row.finished else float(row.uniforms[len(row.tokens)]) for row in rows])
            logits = output.logits[:, -1, : self.vocabulary].float()
            for i, row in enumerate(rows):
                for biased, value in row.bias.items():
                    logits[i, biased] += value
            token, log_prob, likeliest, values = draw(logits, temperature, top_k, top_p, uniform[:, None])
            top = zip(likeliest[:, :most].tolist(), values[:, :most].tolist())
            for row, drawn, lp, (ids, known) in zip(rows, token.tolist(), log_prob.tolist(), top, strict=True):
                if not row.finished:
                    row.tokens.append(drawn)
                    row.log_probs.append(lp)
                    if row.top:
                        row.top_ids.append(ids[: row.top])
                        row.top_log_probs.append(known[: row.top])
            yield
            ids, position = token[:, None], position[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)

    @torch.no_grad()
    def _score(self, prompt: list[int], k: int) -> TokenOutput:
        """Entry t is about token t + 1, the last one padding: the ``k`` likeliest tokens, or the prompt's own for 0."""
        ids = torch.tensor([prompt])
        log_probs = self.model(input_ids=ids).logits[0, :-1, : self.vocabulary].float().log_softmax(-1)
        if k > 0:
            values, tokens = log_probs.topk(k, dim=-1)
        else:
            tokens = ids[0, 1:, None]
            values = log_probs.gather(-1, tokens)
        padding = max(k, 1)
        output = self._output(prompt[-1:], None, "completed")
        output.extra_fields["prompt_ids"] = tokens.tolist() + [[0] * padding]
        output.extra_fields["prompt_logprobs"] = values.tolist() + [[0.0] * padding]
        return output

    def _output(self, tokens: list[int], log_probs: list[float] | None, stop_reason: str) -> TokenOutput:
        fields = {"global_steps": self.version}
        return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason=stop_reason, extra_fields=fields)

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Replaces the weights between two tokens; an unknown name or a missing one is an error."""
        async with self.between_tokens:
            missing, unexpected = self.model.load_state_dict(weights, strict=False)
            self.model.tie_weights()
            tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
            if unexpected or set(missing) - tied:
                raise ValueError(f"weights don't fit: missing {sorted(set(missing) - tied)}, unexpected {unexpected}")
            self.version = global_steps
            self.asked.clear()

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Ends one request after the token under way; its caller gets the tokens so far."""
        found = [r for r in self.waiting + self.running if r.id == request_id]
        for request in found:
            request.aborted = True
        return {"aborted": bool(found), "request_id": request_id}

    async def abort_all_requests(self, reject_request: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Ends all requests and holds (or, with ``reject_request``, refuses) new ones until ``resume_generation``."""
        self.rejecting = reject_request
        self.open.clear()
        active = [*self.waiting, *self.running]
        for request in active:
            request.aborted = True
        if active:
            await asyncio.wait([request.done for request in active])
        return {"aborted_count": len(active), "request_ids": [request.id for request in active]}

    async def resume_generation(self) -> None:
        self.rejecting = False
        self.open.set()

    async def nothing(self, *args: Any, **kwargs: Any) -> None:
        """For what verl asks of a server on an accelerator."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row by inversion of the distribution's sum, and its log-probability there: both [B]; then all
    tokens, likeliest first, and theirs [B, V].

    ``logits`` [B, V], everything else [B, 1]; ``uniform`` in [0, 1). Temperature 0 takes the likeliest token and
    reports log-probabilities at temperature 1.
    """
    greedy = temperature <= 0
    log_probs = (logits / torch.where(greedy, 1.0, temperature)).log_softmax(-1)
    ordered, tokens = log_probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    rank = torch.arange(logits.shape[-1])
    behind = (before >= top_p) & (top_p < 1)  # a sum of float32 is 1 long before the last token
    out = ((rank >= top_k) | behind) & ~greedy & (rank > 0)
    ordered = ordered.masked_fill(out, -torch.inf).log_softmax(-1)
    reached = ordered.double().exp().cumsum(-1)
    choice = (reached <= uniform.double() * reached[:, -1:]).sum(-1, keepdim=True)
    last = (~out).sum(-1, keepdim=True) - 1
    choice = torch.where(greedy, 0, torch.minimum(choice, last))
    return tokens.gather(-1, choice)[:, 0], ordered.gather(-1, choice)[:, 0], tokens, ordered


class TransformersReplica(RolloutReplica):
    """One server actor per replica."""

    async def launch_servers(self) -> None:
        name = f"{_server_name(self.replica_rank, self.is_teacher_model)}{self.name_suffix}"
        server = ray.remote(TransformersServer).options(name=name, max_concurrency=self.max_concurrency, num_cpus=0)
        handle = server.remote(
            path=self.model_config.path,
            prompt_length=self.config.prompt_length,
            response_length=self.config.response_length,
            max_model_len=self.config.max_model_len,
            seed=self.config.seed + self.replica_rank,
        )
        await handle.wake_up.remote()
        self.servers.append(handle)
        self._server_handle, self._server_address = handle, f"actor://{name}"


def _server_name(rank: int, teacher: bool) -> str:
    return f"rlx_hf_{'teacher_' if teacher else ''}server_{rank}"


class TransformersAdapter(BaseRollout):
    """In the training process: sends the weights to the server of the same rank through Ray's object store."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **kwargs: Any):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"rlx_hf takes whole tensors, not {wire_format}: use the checkpoint engine 'naive'")
        whole = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in weights}
        server = ray.get_actor(_server_name(self.replica_rank, teacher=False))
        await server.load_weights.remote(whole, global_steps)

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The server keeps its memory."""
