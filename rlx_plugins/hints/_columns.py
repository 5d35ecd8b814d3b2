"""Token ids that a hint reads from the dataset."""

from __future__ import annotations

from ..core.errors import ConfigError
from ..core.kinds import Plugin
from ..core.trajectory import Group


def column_tokens(part: Plugin, group: Group, column: str) -> list[int]:
    """The token ids in `column` of the group's prompt, [] where it has none.

    Raises ConfigError if the dataset lacks the column, or if the host left it as text.
    """
    who = f"{part.kind} {part.name}"
    if column not in group.extras:
        raise ConfigError(
            f"{who} reads the dataset column {column!r}, which prompt {group.prompt_key!r} does not have;"
            f" add the column or name another with {part.kind}.column=NAME"
        )
    tokens = group.extras[column]
    if isinstance(tokens, str) and tokens:
        raise ConfigError(
            f"{who}: column {column!r} of prompt {group.prompt_key!r} is text; the host must replace the columns in"
            " token_columns by token ids"
        )
    return list(tokens or ())
