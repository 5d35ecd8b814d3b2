"""Every kind of plug-in on one page: what it is asked, when, what it gets and what it returns.

Someone writing a plug-in reads this page and one neighbour file. Shapes: B rows, T response tokens, K reward
components, V vocabulary. The life of a rollout, and the kinds in the order they meet it:

    generate   sampler -> allocator, hint -> temperature, replay -> (engine, drafter) -> pruner      `RolloutPart`
    batch      reward -> advantage -> correction -> aggregate -> selector          whole scored batch, no gradient
    loss       ratio -> clip -> distill, auxiliary                                 one micro-batch, with gradient
    model      quant                                                               wraps the trained model

A plug-in is a dataclass: fields declared plainly or with `param()` are hyper-parameters, fields declared with
`state()` are saved with the host's checkpoint. Hooks may be added only where the kind is asked for them (`may`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from . import params, state
from .batch import RolloutBatch
from .context import Context
from .errors import ConfigError
from .terms import PolicyTerms
from .trajectory import Group, Rollout

Columns = dict[str, Any]


class Plugin:
    """Base of every plug-in: a dataclass whose parameters are checked on construction and stay what they were.

    requires      signals (columns) it reads beyond those every batch carries; may be a property of the parameters
    token_signals  those that hold one entry per response token, beyond TOKEN_SIGNALS of core/host.py: a host refuses a
                  user's list of another length
    provides      columns it makes for others
    capabilities  what the host must be able to do (hosts/<host> lists its own)
    fixes         kinds this part decides: {"ratio": "token"} wants that plug-in, {"aggregate": None} wants none named
    idle_hooks    hooks of its own that its parameters leave without work: a host need not be able to call them
    paper         "Title, arXiv id", shown by `rlx show`
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    requires: Any = frozenset()
    token_signals: Any = frozenset()
    provides: Any = frozenset()
    capabilities: Any = frozenset()
    fixes: ClassVar[Mapping[str, str | None]] = {}
    idle_hooks: Any = frozenset()
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        label = f"{self.kind} {self.name}"
        for name, value in params.checked(label, self).items():
            object.__setattr__(self, name, value)
        self.check()
        object.__setattr__(self, "_parameters_fixed", True)

    def check(self) -> None:
        """Raise `ConfigError` where parameters do not go together; called once, after each was checked by itself."""

    def check_beside(self, parts: Any) -> None:
        """Raise `ConfigError` where the run's other parts (`parts[kind]` lists them) leave this one without work."""

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_parameters_fixed", False) and name in params.param_fields(self):
            raise ConfigError(f"{self.kind} {self.name}.{name}: parameters do not change; use .replace({name}=...)")
        object.__setattr__(self, name, value)

    def params(self) -> dict[str, Any]:
        """The hyper-parameters by name."""
        return {name: getattr(self, name) for name in params.param_fields(self)}

    def replace(self, **changes: Any) -> Any:
        """A new plug-in of the same class with other hyper-parameters and fresh state."""
        params.check_names(f"{self.kind} {self.name}", type(self), {**self.params(), **changes})
        return type(self)(**{**self.params(), **changes})

    def state_dict(self) -> dict[str, Any]:
        return state.state_dict(self)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        state.load_state_dict(self, saved)


# ---- the rollout side: parts of the rollout program (core/rollout.py) ---------------------------------------------


class RolloutPart(Plugin):
    """The hooks of the rollout program; each kind is asked for those its `must` and `may` name.

    Hooks marked [ops] may be generators that yield `Generate`, `Abort` or `Forward`.
    `scope="batch"`: its decision ranks all groups of the step, so the program waits for every row before `more`.
    """

    must: ClassVar[tuple[str, ...]] = ()
    may: ClassVar[tuple[str, ...]] = ()
    chains: ClassVar[bool] = False
    scope: ClassVar[str] = "group"

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        """Replay, pruner, allocator: groups brought along, and how many prompts still to start."""
        return [], need

    def draw(self, n: int, ctx: Context) -> Any:
        """Sampler [ops]: keys of the prompts to start; may return fewer than `n`, or more where it over-draws."""
        return []

    def reserve(self, ctx: Context) -> int:
        """Hint: rollouts of a group it starts itself, in `more`; a group without an allocator begins with the rest."""
        return 0

    def more(self, idle: list[Group], ctx: Context) -> Any:
        """Allocator, then hint [ops]: further rollouts for groups whose rollouts have all ended; [] = complete."""
        return []

    def prepare(self, new: list[Rollout], groups: dict[str, Group], ctx: Context) -> Any:
        """Hint, temperature, replay [ops]: set prefix, context, temperature or reuse of rollouts about to start."""

    def pause(self, ctx: Context) -> Any:
        """Pruner: response lengths (tokens) to look at: an int, an ascending list of ints, or None."""
        return None

    def look(self, groups: list[Group], ctx: Context) -> Any:
        """Pruner [ops]: at a pause, set rollouts to "pruned" or "parked", or fork; the rest goes on."""

    def enough(self, ready: list[Group], ctx: Context) -> bool:
        """Pruner: end generation now?"""
        return False

    def complete(self, group: Group, ctx: Context) -> None:
        """Replay, allocator: edit the rows of a complete group before it is accepted."""

    def accept(self, group: Group, ctx: Context) -> bool:
        """Sampler: does the group go into the batch?"""
        return True

    def close(self, left: list[Group], ctx: Context) -> Any:
        """Pruner [ops]: groups unfinished or in surplus when generation ended."""

    def annotate(self, groups: list[Group], ctx: Context) -> Any:
        """[ops] Fill `rollout.extras` of the groups that go into the batch; scalars become columns."""

    def observe(self, groups: list[Group], ctx: Context) -> None:
        """Learn from the step's fresh groups, rejected ones too, with raw rewards."""

    def feedback(self, batch: RolloutBatch, ctx: Context) -> None:
        """Learn from the trained batch after the update: log-probs, advantages."""


class Sampler(RolloutPart):
    """Which prompts to start. `refills=True`: asked again in the same step for groups that `accept` refused."""

    must = ("draw",)
    may = ("accept", "observe", "feedback")
    refills: ClassVar[bool] = False


class Allocator(RolloutPart):
    """How many rollouts a prompt gets, and when. `exact_size=True`: the training group has exactly group_size rows.

    `refills=True`: while groups are missing, its `intake` is asked again in the same step, and prompts are drawn again.
    `finish_share`: share of the rollouts under way after which a wave is over; the late ones are stopped and lost.
    """

    must = ("more",)
    may = ("intake", "complete", "observe", "feedback")
    refills: ClassVar[bool] = False
    finish_share: Any = 1.0


class Hint(RolloutPart):
    """Help in the context or as a prefix of the answer."""

    must = ("prepare",)
    may = ("reserve", "more", "annotate", "observe", "feedback")


class Temperature(RolloutPart):
    """Sampling temperature per rollout."""

    must = ("prepare",)
    may = ("observe", "feedback")


class Replay(RolloutPart):
    """Rows or tokens of earlier steps used again."""

    may = ("intake", "prepare", "complete", "observe", "feedback")
    chains = True


class Pruner(RolloutPart):
    """Stop, park or drop rollouts. `ends_generation=True`: its `enough` may end the phase before all rows finish."""

    may = ("intake", "pause", "look", "enough", "close", "observe", "feedback")
    chains = True
    ends_generation: ClassVar[bool] = False


# ---- the update side -----------------------------------------------------------------------------------------------


class UpdatePart(Plugin):
    """Tensor mathematics over the signal table of a batch; masked positions may hold garbage, NaN included.

    Numbers among the returned columns describe the whole batch and are also logged, as rlx/<kind>/<name>/<key>.
    State changes in `__call__`, which every rank runs on the same whole batch (in the loss phase: on its micro-batch).
    `scope`: whose statistics it uses: "row", "group", "batch", or "micro" (those of one micro-batch, with at most one
    fixed-size `terms.all_reduce` per call).
    """

    must: ClassVar[tuple[str, ...]] = ("__call__",)
    may: ClassVar[tuple[str, ...]] = ("annotate",)
    chains: ClassVar[bool] = False
    scope: ClassVar[str] = "row"

    def annotate(self, groups: list[Group], ctx: Context) -> Any:
        """[ops] Fill `rollout.extras` of the groups that go into the batch; scalars become columns."""

    def from_logits(self, logits: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per-token columns [...] from logits [..., V], where logits exist; may carry gradient.

        `columns` are the batch's [B,T] columns cut to the same tokens (response_ids, logp_old ...), in the same shape.
        """
        return {}


class Reward(UpdatePart):
    """Shape rewards over the whole group or batch. Returns {"rewards" [B]} and/or {"reward_components" [B,K], ...}.

    `shapes`: which of the two it changes; an advantage that reads only the other is refused beside it.
    """

    chains = True
    shapes: Any = frozenset({"rewards"})

    def __call__(self, batch: RolloutBatch) -> Columns:
        raise TypeError("a reward shaper defines __call__")


class Advantage(UpdatePart):
    """Credit. Returns {"advantages" [B,T]} (0 where masked or unscorable) and further columns, all detached.

    `in_loss(terms) -> [B,T]` (optional): advantages that depend on the current policy, asked before the ratio.
    `credits`: the column it is made from, "rewards" or "reward_components".
    """

    may = ("annotate", "in_loss")
    scope = "group"
    credits: ClassVar[str] = "rewards"

    def __call__(self, batch: RolloutBatch) -> Columns:
        raise TypeError("an advantage defines __call__")

    def in_loss(self, terms: PolicyTerms) -> Tensor:
        return terms.advantages


class Correction(UpdatePart):
    """Repair for the mismatch between sampling and training policy. Returns {"weight" [B,T]}; weight 0 drops a token.

    `corrects`: the pair of log-probability signals whose ratio the weights estimate; `masks_only`: weights are 0 or 1.
    """

    chains = True
    corrects: ClassVar[tuple[str, str]] = ("logp_old", "logp_rollout")
    masks_only: Any = False

    def __call__(self, batch: RolloutBatch) -> Columns:
        raise TypeError("a correction defines __call__")


class Aggregate(UpdatePart):
    """How token losses become one number: loss = sum(weight * token_loss) / total(count) over the optimizer step.

    Returns {"weight" [B,T], "count" [B]} for the tokens of `mask`; called once per loss term.
    """

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        raise TypeError("an aggregate defines __call__")


class Selector(UpdatePart):
    """Which tokens carry the update. Returns {"weight" [B,T]} (multiplies the aggregate's weight, never its count).

    `cuts_rows=True`: also returns {"kept_length" [B]}, the response length (tokens) the training forward needs.
    """

    chains = True
    cuts_rows: ClassVar[bool] = False

    def __call__(self, batch: RolloutBatch) -> Columns:
        raise TypeError("a selector defines __call__")


class Ratio(UpdatePart):
    """The importance ratio [B,T] of the current policy over `denominator`; its gradient is the estimator's.

    `needs_full_rows=True`: its statistics run over whole rows, so a selector that cuts rows is refused.
    """

    denominator: Any = "logp_old"
    needs_full_rows: ClassVar[bool] = False

    def __call__(self, terms: PolicyTerms) -> Tensor:
        raise TypeError("a ratio defines __call__")


class Clip(UpdatePart):
    """The token loss [B,T] from ratio and advantages, or (loss, metrics) with a dict of detached scalar tensors.

    `denominator`: the signal it divides by where it makes its own ratio; None: it uses `terms.ratio`.
    """

    may = ("annotate", "from_logits")
    denominator: Any = None
    needs_full_rows: ClassVar[bool] = False

    def __call__(self, terms: PolicyTerms) -> Any:
        raise TypeError("a clip defines __call__")


class Distill(UpdatePart):
    """The first of the chain makes the divergence [B,T] (`loss` is None), each further one reweights it."""

    may = ("annotate", "from_logits")
    chains = True

    def __call__(self, terms: PolicyTerms, loss: Tensor | None) -> Tensor:
        raise TypeError("a distillation defines __call__")


class Auxiliary(UpdatePart):
    """A loss term of its own with coefficient `coef` on its own mask (say, hint tokens)."""

    may = ("annotate", "from_logits", "mask", "aggregate")
    chains = True
    coef: Any = 1.0

    def mask(self, batch: RolloutBatch) -> Tensor:
        """The tokens [B,T] of this term."""
        return batch.response_mask

    def aggregate(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        """As `Aggregate.__call__`, for this term: the mean over the tokens of `mask`, unless overridden."""
        weight = mask.to(batch.dtype)
        return {"weight": weight, "count": weight.sum(1)}

    def __call__(self, terms: PolicyTerms, loss: Tensor | None) -> Tensor:
        raise TypeError("an auxiliary loss defines __call__")


# ---- outside the trainer's step ------------------------------------------------------------------------------------


class Drafter(Plugin):
    """Speculative drafts for the rollout, in the engine's own process."""

    must: ClassVar[tuple[str, ...]] = ("draft",)
    may: ClassVar[tuple[str, ...]] = ("observe", "end_rollout")
    chains: ClassVar[bool] = False

    def observe(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Finished rows of earlier steps: {"row_key", "prompt", "tokens", "logp"}."""

    def draft(self, row_key: str, tokens: Sequence[int], prompt_len: int, k: int) -> list[int]:
        """Up to `k` tokens proposed after `tokens` (prompt and response so far)."""
        return []

    def end_rollout(self) -> None:
        """The step's rollouts are over."""


class Quant(Plugin):
    """Numbers of the rollout engine's quantised model in the training forward."""

    must: ClassVar[tuple[str, ...]] = ("wrap",)
    may: ClassVar[tuple[str, ...]] = ("observe",)
    chains: ClassVar[bool] = False

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model to train, before the optimizer is built."""
        return model

    def observe(self, batch: RolloutBatch) -> None:
        """The scored batch of the step, for calibration."""


class Method(Plugin):
    """A paper that is several parts: one name that expands to kinds. An explicit key in the configuration wins."""

    must: ClassVar[tuple[str, ...]] = ("expand",)
    may: ClassVar[tuple[str, ...]] = ()
    chains: ClassVar[bool] = False

    def expand(self) -> dict[str, Any]:
        """{kind: spec} in the grammar of the configuration."""
        return {}


KINDS: dict[str, type[Plugin]] = {
    "sampler": Sampler,
    "allocator": Allocator,
    "hint": Hint,
    "temperature": Temperature,
    "replay": Replay,
    "pruner": Pruner,
    "reward": Reward,
    "advantage": Advantage,
    "correction": Correction,
    "aggregate": Aggregate,
    "selector": Selector,
    "ratio": Ratio,
    "clip": Clip,
    "distill": Distill,
    "auxiliary": Auxiliary,
    "drafter": Drafter,
    "quant": Quant,
    "method": Method,
}
"""Kind -> its protocol, in the order the kinds meet a rollout."""

ALIASES = {"distill_aggregate": "aggregate"}
"""Configuration keys that name a second plug-in of a kind: the aggregate of the distillation term."""

FOLDERS = {
    "sampler": "sampling",
    "allocator": "allocation",
    "hint": "hints",
    "temperature": "temperature",
    "replay": "replay",
    "pruner": "pruning",
    "reward": "rewards",
    "advantage": "advantages",
    "correction": "corrections",
    "aggregate": "aggregation",
    "selector": "selectors",
    "ratio": "ratios",
    "clip": "clipping",
    "distill": "distill",
    "auxiliary": "auxiliary",
    "drafter": "drafting",
    "quant": "quant",
    "method": "methods",
}
"""Kind -> the sub-package of its built-in methods: `rlx_plugins/<folder>/<name>.py` registers <name>."""

ROLLOUT_KINDS = ("sampler", "allocator", "hint", "temperature", "replay", "pruner")
"""The parts of the rollout program, in the order each hook visits them."""

DEFAULTS = {"advantage": "grpo", "aggregate": "token_mean", "ratio": "token", "clip": "ppo"}
"""What an update runs when a kind is not named and some other kind is."""


def is_dataclass_plugin(cls: type) -> bool:
    """Whether `cls` itself was decorated with @dataclass (not only a base of it)."""
    return "__dataclass_fields__" in cls.__dict__ and dataclasses.is_dataclass(cls)
