"""The tiny lane's model: a character-level Llama, warmed up on noisy demonstrations and kept in a cache folder.

``tiny_model_path()`` builds it once (under a minute on one thread) and from then on returns the same folder, loadable
with ``AutoModelForCausalLM`` and ``AutoTokenizer``. The warm-up is imperfect on purpose: the model has learned to work
a sum off step by step, but mostly blurts out an answer, and slips; reinforcement has room to show itself.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlx_plugins.testing import tiny_tasks
from rlx_plugins.testing.tiny_tasks import demonstration, problems

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "WarmUp",
    "build_tiny_model",
    "build_tiny_tokenizer",
    "cached_folder",
    "default_cache_dir",
    "source_digest",
    "tiny_model_path",
    "warm_up",
]

_PAD, _EOS, _UNKNOWN = "<|pad|>", "<|eos|>", "<|unk|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|eos|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_LABEL_IGNORED = -100


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer: printable ASCII and the line feed, one token each, with left padding.

    Special tokens are padding, end of sequence, unknown and one per chat role; the chat template writes the role token
    before each turn and closes assistant turns with the end-of-sequence token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [_PAD, _EOS, _UNKNOWN, *_ROLES, "\n", *map(chr, range(32, 127))]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=_UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=_PAD,
        eos_token=_EOS,
        unk_token=_UNKNOWN,
        additional_special_tokens=list(_ROLES),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        chat_template=_CHAT_TEMPLATE,
    )


def build_tiny_model(
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int = 192,
    layers: int = 4,
    intermediate_size: int = 512,
    heads: int = 6,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A freshly initialised Llama in float32 on the CPU (1.8 million parameters), the same one for the same seed.

    The initial scale, 0.06, is three times Llama's: at this width the model learns to copy in a quarter of the steps.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=tokenizer.model_max_length,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class WarmUp:
    """Settings of the supervised warm-up.

    The first ``clean`` share of the steps shows faultless workings and teaches the skill; the rest shows demonstrations
    that skip the working with probability ``direct`` and slip at each step with probability ``slip``.
    """

    steps: int = 700
    batch_size: int = 32
    learning_rate: float = 2e-3
    pool: int = 4000
    clean: float = 0.7
    slip: float = 0.1
    direct: float = 0.7


def _batch(
    tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], demonstrations: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels [B, L], right-padded; only the demonstration and its end-of-sequence token are labelled."""
    shown = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(demonstrations)["input_ids"]]
    ids = [torch.tensor(prompt + tail) for prompt, tail in zip(prompts, shown, strict=True)]
    labels = [torch.tensor([_LABEL_IGNORED] * len(prompt) + tail) for prompt, tail in zip(prompts, shown, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, True, tokenizer.pad_token_id), pad(labels, True, _LABEL_IGNORED)


def warm_up(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: str = "chain_sum",
    settings: WarmUp = WarmUp(),
    seed: int = 0,
) -> None:
    """Trains ``model`` in place on noisy demonstrations of training problems; held-out ones are never shown.

    Runs on one thread, so that the result does not depend on the number of cores, and leaves the global random state
    as it was. The learning rate rises over 30 steps and falls linearly to a fiftieth.
    """
    rng = random.Random(seed)
    pool = problems(task, "train", settings.pool)
    chats = [[{"role": "user", "content": problem.prompt}] for problem in pool]
    prompts = tokenizer(tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False))["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * max(0.02, 1 - (step + 1) / settings.steps)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model.train()
    try:
        for step in range(settings.steps):
            noisy = step >= settings.clean * settings.steps
            slip, direct = (settings.slip, settings.direct) if noisy else (0.0, 0.0)
            drawn = rng.choices(range(len(pool)), k=settings.batch_size)
            shown = [demonstration(pool[i], rng, slip, direct) for i in drawn]
            ids, labels = _batch(tokenizer, [prompts[i] for i in drawn], shown)
            model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    finally:
        torch.set_num_threads(threads)
        model.eval()


def default_cache_dir() -> Path:
    """``$RLX_CACHE`` if set, else ``~/.cache/rlx_plugins``."""
    return Path(os.environ.get("RLX_CACHE") or Path.home() / ".cache" / "rlx_plugins")


def source_digest(*objects: Any) -> str:
    """A hash of the source text of functions, classes or modules: the code's part of a cache key."""
    return hashlib.sha256("\n".join(map(inspect.getsource, objects)).encode()).hexdigest()


def cached_folder(
    name: str, settings: Mapping[str, Any], build: Callable[[Path], None], cache_dir: Path | str | None = None
) -> Path:
    """The folder that ``build(folder)`` fills, made once for each ``name`` and ``settings`` and then reused.

    ``build`` writes into a temporary folder beside the final one, which is renamed when it is complete: a killed or
    failed build leaves nothing under the final name. A second process that asks meanwhile waits and reuses the result.
    """
    from filelock import FileLock

    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    final = root / f"{name}-{key}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{final.name}.lock"):
        if final.is_dir():
            return final
        for abandoned in root.glob(f".{final.name}.building-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.building-", dir=root))
        try:
            build(scratch)
            scratch.chmod(0o755)
            scratch.rename(final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return final


def tiny_model_path(
    task: str = "chain_sum",
    seed: int = 0,
    settings: WarmUp = WarmUp(),
    shape: Mapping[str, int] | None = None,
    cache_dir: Path | str | None = None,
) -> Path:
    """The ``save_pretrained`` folder of the warmed-up model and its tokenizer, built on first use.

    ``shape`` overrides sizes of ``build_tiny_model``. The folder's key covers every argument, the code that makes the
    model, and the versions of torch, transformers and reasoning_gym.
    """
    from importlib.metadata import version

    shape = dict(shape or {})

    def build(folder: Path) -> None:
        tokenizer = build_tiny_tokenizer()
        model = build_tiny_model(tokenizer, seed=seed, **shape)
        warm_up(model, tokenizer, task, settings, seed)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    key = {"task": task, "seed": seed, "settings": asdict(settings), "shape": shape}
    key |= {package: version(package) for package in ("torch", "transformers", "reasoning-gym")}
    key |= {"code": source_digest(tiny_tasks, sys.modules[__name__])}
    return cached_folder(f"tiny-{task}", key, build, cache_dir)
