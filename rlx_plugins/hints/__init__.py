"""Hints: help in the sampling context or as the beginning of the answer.

Plug-ins know no tokenizer. A hint that reads text from the dataset names the columns in `token_columns` (a frozenset,
usually a property of the parameter `column`); before the program starts the host tokenises these columns, without
special tokens, so that `ctx.columns(key)` and thereby `group.extras` hold lists of token ids. None, "" or an empty list
means that this prompt has none; a column the dataset does not have is a ConfigError that names it.
"""
