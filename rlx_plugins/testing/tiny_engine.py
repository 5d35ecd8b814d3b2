"""Engines for TRL on the tiny task, in the form of its ``rollout_func``: one in FP8, one that mixes in solutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .tiny_tasks import solution_of

__all__ = ["TinyPolicy", "expression_of", "fp8_engine", "mixed_sources"]

TOP = 20


def fp8_engine(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Samples from the policy with its weight matrices rounded to FP8 (e4m3, one scale each) and reports the log-probs.

    Trainer and engine so disagree as they do with a quantised engine, which is what corrections are for. Signals:
    ``rollout_top_ids`` and ``rollout_top_logp``, the engine's ``TOP`` most likely tokens at each place.
    """
    policy = TinyPolicy(rounded_to_fp8(unwrapped(trainer)), trainer)
    asked = policy.asked(prompts)
    sampled = policy.sample(asked, trainer.max_completion_length)
    top = policy.top([row + s[0] for row, s in zip(asked, sampled, strict=True)], [len(s[0]) for s in sampled])
    return {
        "prompt_ids": asked,
        "completion_ids": [s[0] for s in sampled],
        "logprobs": [s[1] for s in sampled],
        "rollout_top_ids": [ids for ids, _ in top],
        "rollout_top_logp": [logp for _, logp in top],
    }


def mixed_sources(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Every prompt's last rollout is its reference solution, with the signal ``external`` True; the engine gives no
    log-probs for it, and the trainer's own stand in.
    """
    policy = TinyPolicy(unwrapped(trainer), trainer)
    asked = policy.asked(prompts)
    completions = [tokens for tokens, _ in policy.sample(asked, trainer.max_completion_length)]
    external = [(i + 1) % trainer.num_generations == 0 for i in range(len(prompts))]
    for i, prompt in enumerate(prompts):
        if external[i]:
            completions[i] = policy.tokens(solution_of(expression_of(prompt))) + [policy.end]
    return {"prompt_ids": asked, "completion_ids": completions, "logprobs": None, "external": external}


def rounded_to_fp8(model: Any) -> Any:
    """A copy of the model with its weight matrices as float8_e4m3fn represents them."""
    rounded = type(model)(model.config).to(model.device, model.dtype).eval()  # trainers replace `forward` of theirs
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in rounded.parameters():
            if weight.ndim == 2:
                scale = weight.abs().max().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
                weight.copy_((weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale)
    return rounded


class TinyPolicy:
    """A model with TRL's settings of sampling."""

    def __init__(self, model: Any, trainer: Any):
        self.model, self.temperature = model, trainer.temperature
        self.tokenizer = trainer.processing_class
        self.end: int = self.tokenizer.eos_token_id

    def asked(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of conversational prompts, up to where the answer begins."""
        texts = self.tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    @torch.no_grad()
    def sample(self, rows: Sequence[list[int]], max_new: int) -> list[tuple[list[int], list[float]]]:
        """New tokens of each row, up to its end of sequence, with their log-probs."""
        ids, mask = self._padded(rows)
        made = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new,
            do_sample=True,
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.end,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = made.sequences[:, ids.shape[1] :]
        logp = (torch.stack(made.logits, 1).float() / self.temperature).log_softmax(-1)
        logp = logp.gather(-1, new[..., None])[..., 0]
        ends = [row.index(self.end) + 1 if self.end in row else len(row) for row in new.tolist()]
        return [(row[:n], lp[:n]) for n, row, lp in zip(ends, new.tolist(), logp.tolist(), strict=True)]

    @torch.no_grad()
    def chances(self, rows: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
        """exp of the mean log-prob of each answer's tokens behind its row."""
        ids, mask = self._padded([row + answer for row, answer in zip(rows, answers, strict=True)])
        logp = self.model(input_ids=ids, attention_mask=mask).logits.float().log_softmax(-1)
        logp = logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return [float(row[-len(answer) :].mean().exp()) for row, answer in zip(logp, answers, strict=True)]

    @torch.no_grad()
    def top(self, rows: Sequence[list[int]], lengths: Sequence[int]) -> list[tuple[list[list[int]], list[list[float]]]]:
        """Ids and log-probs [n, TOP] of the most likely tokens at each of the last n places of a row."""
        ids, mask = self._padded(rows)
        logp = (self.model(input_ids=ids, attention_mask=mask).logits.float() / self.temperature).log_softmax(-1)
        best = logp[:, :-1].topk(TOP, dim=-1)
        return [
            (names[-n:].tolist(), values[-n:].tolist())
            for names, values, n in zip(best.indices, best.values, lengths, strict=True)
        ]

    def _padded(self, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        encoded = self.tokenizer.pad({"input_ids": list(rows)}, padding_side="left", return_tensors="pt")
        device = self.model.device
        return encoded["input_ids"].to(device), encoded["attention_mask"].to(device)


def unwrapped(trainer: Any) -> Any:
    """The model without what accelerate puts around it."""
    return trainer.accelerator.unwrap_model(trainer.model)


def expression_of(prompt: Sequence[dict[str, str]]) -> str:
    """The sum a conversational prompt asks for."""
    return prompt[-1]["content"].rstrip("=")
