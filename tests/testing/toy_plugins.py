"""Plug-ins for tests of the conformance suite: sound ones, and ones that are broken in one way each."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

import rlx_plugins as rlx

BROKEN = []
"""(check, kind, class): the class must fail this check and no other."""


def broken(check, kind):
    """Class decorator: add the class to `BROKEN`."""

    def keep(cls):
        cls.paper = "a toy"
        BROKEN.append((check, kind, cls))
        return cls

    return keep


SOUND = []
"""(kind, class, further arguments of check_plugin): of kinds and hooks that no built-in may have."""


def sound(kind, **given):
    """Class decorator: add the class to `SOUND`."""

    def keep(cls):
        cls.paper = "a toy"
        SOUND.append((kind, cls, given))
        return cls

    return keep


@sound("distill")
@dataclass
class SquaredGap(rlx.Distill):
    """The squared distance of the log-probs from the teacher's."""

    requires = frozenset({"logp_teacher"})

    def __call__(self, terms, loss):
        return rlx.masked(terms.logp_new - terms.batch.logp_teacher, terms.mask).square()


@sound("distill")
@dataclass
class FullKL(rlx.Distill):
    """The KL divergence from the teacher over the vocabulary."""

    capabilities = frozenset({"logits", "teacher_logits"})

    def __call__(self, terms, loss):
        return rlx.masked(terms.logits["toy_kl"], terms.mask)

    def from_logits(self, logits, columns):
        logp, teacher = logits.log_softmax(-1), columns["teacher_logits"].log_softmax(-1)
        return {"toy_kl": (teacher.exp() * (teacher - logp)).sum(-1)}


@sound("distill", beside={"distill": "first"})
@dataclass
class Halved(rlx.Distill):
    """Half of the divergence that the one before it in the chain makes."""

    def __call__(self, terms, loss):
        return loss / 2


@sound("auxiliary")
@dataclass
class ImitateSuccess(rlx.Auxiliary):
    """Raises the log-probs of rows with a positive advantage."""

    coef: float = rlx.param(0.1, ge=0, doc="weight of the term; ours")

    def mask(self, batch):
        return batch.response_mask & (batch.advantages > 0)

    def __call__(self, terms, loss):
        return -rlx.masked(terms.logp_new, self.mask(terms.batch))


@sound("auxiliary", beside={"hint": "adaprefix"})
@dataclass
class ImitateHints(rlx.Auxiliary):
    """Raises the log-probs of hint tokens, every row counting once."""

    requires = frozenset({"hint_mask"})

    def mask(self, batch):
        return batch.hint_mask

    def aggregate(self, batch, mask):
        weight = mask.to(batch.dtype) / mask.sum(1, keepdim=True).clamp(min=1)
        return {"weight": weight, "count": mask.any(1).to(batch.dtype)}

    def __call__(self, terms, loss):
        return -rlx.masked(terms.logp_new, terms.batch.hint_mask)


@sound("temperature")
@dataclass
class Warmer(rlx.Temperature):
    """Samples every second rollout of a group a little warmer."""

    capabilities = frozenset({"row_temperature"})

    def prepare(self, new, groups, ctx):
        for r in new:
            r.temperature = 1.0 + 0.2 * (r.slot % 2)


@sound("drafter")
@dataclass
class RepeatsRows(rlx.Drafter):
    """Proposes what followed the last token in an earlier row."""

    rows: list = rlx.state(factory=list)

    def observe(self, rows):
        self.rows = [list(row["tokens"]) for row in rows]

    def draft(self, row_key, tokens, prompt_len, k):
        for row in self.rows:
            if tokens[-1] in row:
                at = row.index(tokens[-1]) + 1
                return row[at : at + k]
        return []


@sound("quant")
@dataclass
class StraightThrough(rlx.Quant):
    """Rounds the outputs, with the gradient of the identity."""

    def wrap(self, model):
        model.register_forward_hook(lambda module, given, out: out + ((out * 16).round() / 16 - out).detach())
        return model


class Even(rlx.Selector):
    """All tokens alike, for toys to change."""

    def weight(self, batch):
        return batch.response_mask.to(batch.dtype)


@broken("documented", "selector")
@dataclass
class Unexplained(Even):
    """Halves all weights."""

    factor: float = 0.5

    def __call__(self, batch):
        return {"weight": self.factor * self.weight(batch)}


@broken("shapes", "advantage")
@dataclass
class OnePerRow(rlx.Advantage):
    """Returns a number per row."""

    def __call__(self, batch):
        return {"advantages": batch.rewards}


@broken("trains", "sampler")
@dataclass
class NoSuchPrompt(rlx.Sampler):
    """Names prompts that do not exist."""

    capabilities = frozenset({"choose_prompts"})

    def draw(self, n, ctx):
        return ["nowhere"] * n


@broken("parameters_fixed", "selector")
@dataclass
class CountsInAParameter(Even):
    """Counts its calls in a parameter."""

    counts: dict = rlx.param(factory=dict, doc="ours")

    def __call__(self, batch):
        self.counts["calls"] = self.counts.get("calls", 0) + 1
        return {"weight": self.weight(batch)}


@broken("declared", "selector")
@dataclass
class ReadsMoreThanItSays(Even):
    """Drops the first turn, and does not say that it reads turns."""

    def __call__(self, batch):
        return {"weight": self.weight(batch) * (batch.turn_ids > 0)}


@broken("declared", "selector")
@dataclass
class ProvidesNothing(Even):
    """Says that it makes a column, and does not."""

    provides = frozenset({"kept"})

    def __call__(self, batch):
        return {"weight": self.weight(batch)}


@broken("inputs_untouched", "reward")
@dataclass
class ShiftsInPlace(rlx.Reward):
    """Shifts the rewards in place."""

    def __call__(self, batch):
        return {"rewards": batch.rewards.sub_(0.5)}


@broken("repeatable", "selector")
@dataclass
class GlobalDraw(Even):
    """Scales all weights by a draw of the global generator."""

    def __call__(self, batch):
        return {"weight": self.weight(batch) * (1 + torch.rand(()))}


@broken("row_permutation", "selector")
@dataclass
class LaterRowsCountMore(Even):
    """Weighs rows by their position."""

    def __call__(self, batch):
        place = torch.arange(batch.size, dtype=batch.dtype, device=batch.device)
        return {"weight": self.weight(batch) * place[:, None]}


@broken("padding", "aggregate")
@dataclass
class MeanOverTheWidth(rlx.Aggregate):
    """Divides by the width of the batch."""

    def __call__(self, batch, mask):
        return {"weight": mask.to(batch.dtype) / mask.shape[1], "count": mask.any(1).to(batch.dtype)}


@broken("masked_garbage", "selector")
@dataclass
class MultipliesByTheMask(Even):
    """Sums the row's entropy with a product where it should select."""

    requires = frozenset({"entropy"})

    def __call__(self, batch):
        total = (batch.entropy * batch.response_mask).sum(1, keepdim=True)
        return {"weight": self.weight(batch) * total.to(batch.dtype)}


@broken("masked_garbage", "correction")
@dataclass
class LeavesWhatIsMasked(rlx.Correction):
    """Leaves whatever stands on masked tokens in the weights."""

    requires = frozenset({"entropy"})

    def __call__(self, batch):
        return {"weight": torch.where(batch.response_mask, 1.0, batch.entropy)}


@broken("precision", "selector")
@dataclass
class AlwaysDouble(Even):
    """Returns float64 whatever comes in."""

    def __call__(self, batch):
        return {"weight": batch.response_mask.double()}


@broken("precision", "clip")
@dataclass
class Cancels(rlx.Clip):
    """Loses its digits in a large sum."""

    def __call__(self, terms):
        return -terms.advantages * ((terms.ratio + 1e4) - 1e4)


@broken("device", "selector")
@dataclass
class MadeOnTheCPU(Even):
    """Makes a tensor without saying where."""

    def __call__(self, batch):
        return {"weight": self.weight(batch) * torch.ones(batch.size, 1, dtype=batch.dtype)}


@broken("device", "clip")
@dataclass
class MadeOnTheCPUInTheLoss(rlx.Clip):
    """Makes a tensor without saying where, in the loss."""

    def __call__(self, terms):
        return -terms.advantages * terms.ratio * torch.ones(terms.mask.shape, dtype=terms.ratio.dtype)


@broken("group_of_one", "advantage")
@dataclass
class LeaveOneOut(rlx.Advantage):
    """Divides by the other rollouts of the group, of which there may be none."""

    def __call__(self, batch):
        groups = batch.groups
        others = groups.count(batch.rewards) - 1
        mean = groups.spread(groups.sum(batch.rewards) / others) - batch.rewards / groups.spread(others)
        advantages = rlx.masked(batch.rewards - mean, batch.rewards.isfinite())
        return {"advantages": rlx.masked(advantages[:, None], batch.response_mask)}


@broken("equal_rewards", "advantage")
@dataclass
class WhitensWithoutEps(rlx.Advantage):
    """Divides by the spread of all rewards."""

    scope = "batch"

    def __call__(self, batch):
        known = batch.rewards[batch.rewards.isfinite()]
        scores = rlx.masked((batch.rewards - known.mean()) / known.std(), batch.rewards.isfinite())
        return {"advantages": rlx.masked(scores[:, None], batch.response_mask)}


@broken("unscorable_rewards", "advantage")
@dataclass
class MeanOfAll(rlx.Advantage):
    """Compares with the mean of all rewards, NaN among them."""

    def __call__(self, batch):
        return {"advantages": batch.spread(batch.rewards - batch.rewards.mean())}


@broken("no_host_sync", "clip")
@dataclass
class LooksAtTheRatio(rlx.Clip):
    """Asks whether any ratio is large."""

    def __call__(self, terms):
        ratio = terms.ratio.clamp(max=5.0) if bool((terms.ratio > 5).any()) else terms.ratio
        return -terms.advantages * ratio


@broken("constants_detached", "clip")
@dataclass
class MetricWithGradient(rlx.Clip):
    """Reports a metric that carries gradient."""

    def __call__(self, terms):
        return -terms.advantages * terms.ratio, {"ratio": rlx.masked_mean(terms.ratio, terms.mask)}


@broken("constants_detached", "advantage")
@dataclass
class AdvantageWithGradient(rlx.Advantage):
    """Multiplies advantages by the ratio inside the loss."""

    requires = frozenset({"logp_old"})

    def __call__(self, batch):
        return {"advantages": batch.spread(batch.rewards)}

    def in_loss(self, terms):
        return terms.advantages * terms.log_ratio().exp()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@broken("gradient", "clip")
@dataclass
class WrongBackward(rlx.Clip):
    """Has a backward pass of its own, twice too large."""

    def __call__(self, terms):
        return -terms.advantages * Twice.apply(terms.ratio)


@broken("gradient", "ratio")
@dataclass
class NoGradient(rlx.Ratio):
    """Detaches all that matters."""

    requires = frozenset({"logp_old"})

    def __call__(self, terms):
        return terms.log_ratio().exp().detach() + 0 * terms.log_ratio()


class InStepOrder(rlx.Sampler):
    """Draws by the hash of step and place."""

    capabilities = frozenset({"choose_prompts"})

    def draw(self, n, ctx):
        keys = list(ctx.prompts)
        return [keys[int(ctx.uniform("toy/draw", i) * len(keys))] for i in range(n)]


@broken("trains_unscorable", "sampler")
@dataclass
class AddsUpRewards(InStepOrder):
    """Adds up rewards, and one may be None."""

    def observe(self, groups, ctx):
        ctx.log("sampler/toy", sum(r.reward for g in groups for r in g.done()))


@broken("repeats", "sampler")
@dataclass
class GlobalPrompts(rlx.Sampler):
    """Draws prompts from the global generator."""

    capabilities = frozenset({"choose_prompts"})

    def draw(self, n, ctx):
        return random.sample(list(ctx.prompts), n)


@broken("resumes", "sampler")
@dataclass
class ForgetsItsPlace(rlx.Sampler):
    """Keeps its place outside the state."""

    capabilities = frozenset({"choose_prompts"})
    place = 0

    def draw(self, n, ctx):
        keys = list(ctx.prompts)
        self.place += n
        return [keys[(self.place + i) % len(keys)] for i in range(n)]


@broken("resumes", "advantage")
@dataclass
class GrowsUnseen(rlx.Advantage):
    """Scales advantages with calls that it counts outside the state."""

    calls = 0

    def __call__(self, batch):
        self.calls += 1
        return {"advantages": batch.spread(batch.rewards * self.calls)}


@broken("resumes", "sampler")
@dataclass
class KeepsAPath(InStepOrder):
    """Has a state that is not read back without running code."""

    folder: Path = rlx.state(factory=Path)


@broken("within_max_tokens", "hint")
@dataclass
class Lengthens(rlx.Hint):
    """Gives every rollout more tokens."""

    def prepare(self, new, groups, ctx):
        for r in new:
            r.max_tokens += 4


@broken("loses_no_rollout", "allocator")
@dataclass
class KeepsTwo(rlx.Allocator):
    """Takes rollouts out of their group."""

    capabilities = frozenset({"rounds"})

    def more(self, idle, ctx):
        new = []
        for g in idle:
            if g.rollouts:
                g.rollouts = g.rollouts[:2]
            else:
                new += g.start(ctx.group_size)
        return new


@broken("loses_no_rollout", "pruner")
@dataclass
class ForgetsTheParked(rlx.Pruner):
    """Ends generation early and drops what is unfinished."""

    capabilities = frozenset({"until_group", "abort"})
    ends_generation = True

    def intake(self, need, ctx):
        return [], 2 * need

    def enough(self, ready, ctx):
        return len(ready) >= ctx.groups


@broken("drafts", "drafter")
@dataclass
class DraftsTooMuch(rlx.Drafter):
    """Proposes one token more than asked for."""

    def draft(self, row_key, tokens, prompt_len, k):
        return [1] * (k + 1)


@broken("wraps_a_model", "quant")
@dataclass
class CutsTheGradient(rlx.Quant):
    """Rounds the outputs, through which no gradient flows."""

    def wrap(self, model):
        model.register_forward_hook(lambda module, given, out: (out * 16).round() / 16)
        return model
