"""A dataset as a recipe's task: which of its columns are prompt and answer, in the form each host takes.

task: {dataset: openai/gsm8k, config: main, prompt: question, answer: answer, eval: test, instruction: "..."}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..core.errors import ConfigError, close_matches
from .answers import reference_answer

REWARDS = ("accuracy", "format")
"""Rewards of such a task (answers.py): the boxed answer is the reference's; there is a boxed answer."""

FILES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


class DataTask(BaseModel):
    """Prompts with reference answers, from the hub or a file.

    dataset      a hub name, or the path of a .parquet, .jsonl or .csv file
    config       the hub dataset's configuration
    split, eval  split to train on; split that verl validates on (None: no validation)
    prompt       column of the question: text, or chat messages
    answer       column of the reference answer; of a worked solution, what stands in its last \\boxed{} or after ####
    instruction  put behind a question that is text, after an empty line
    columns      further columns by the name the plug-ins read: {domain: source, solution: solution}
    """

    model_config = ConfigDict(extra="forbid")

    dataset: str
    config: str | None = None
    split: str = "train"
    eval: str | None = None
    prompt: str = "prompt"
    answer: str = "answer"
    instruction: str = ""
    columns: dict[str, str] = Field(default_factory=dict)

    def rows(self, split: str) -> Any:
        """A split as a `datasets.Dataset` with the columns prompt (messages), answer and those of `columns`."""
        data = self._load(split)
        wanted = {"prompt": self.prompt, "answer": self.answer, **self.columns}
        for name, column in wanted.items():
            if column not in data.column_names:
                raise ConfigError(
                    f"task {self.dataset}: no column {column!r} for {name}{close_matches(column, data.column_names)}"
                    f" (it has {', '.join(data.column_names)})"
                )
        return data.map(lambda row: self._row(row, wanted), remove_columns=data.column_names)

    def _row(self, row: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, Any]:
        out = {name: row[column] for name, column in wanted.items()}
        if isinstance(out["prompt"], str):
            text = f"{out['prompt']}\n\n{self.instruction}" if self.instruction else out["prompt"]
            out["prompt"] = [{"role": "user", "content": text}]
        return out | {"answer": reference_answer(str(out["answer"]))}

    def _load(self, split: str) -> Any:
        from datasets import load_dataset

        kind = FILES.get(Path(self.dataset).suffix)
        try:
            if kind is not None:
                return load_dataset(kind, data_files={split: self.dataset}, split=split)
            return load_dataset(self.dataset, self.config, split=split)
        except Exception as error:  # the hub's client raises many kinds
            raise ConfigError(f"task: the dataset {self.dataset!r} can't be loaded: {error}") from error

    def verl_files(self, folder: Path) -> tuple[Path, Path | None]:
        """Training and validation data as parquet files in verl's format, written to `folder`."""
        train = self._parquet(self.split, folder / "train.parquet")
        return train, self._parquet(self.eval, folder / "eval.parquet") if self.eval else None

    def _parquet(self, split: str, path: Path) -> Path:
        rows = self.rows(split)

        def in_verls_form(row: dict[str, Any], index: int) -> dict[str, Any]:
            info = {"index": index, "split": split}
            answer = {"style": "rule", "ground_truth": row["answer"]}
            return {"data_source": self.dataset, "reward_model": answer, "extra_info": info}

        path.parent.mkdir(parents=True, exist_ok=True)
        rows.map(in_verls_form, with_indices=True).to_parquet(str(path))
        return path
