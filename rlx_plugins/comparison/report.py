"""The report of a comparison: Markdown with figures, and the same as one HTML file that needs no network."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from ..recipes.run_folder import write_json
from .figures import draw_curves, draw_differences
from .protocol import TOLERANCE
from .results import POWER, Results, as_json
from .runs import Run
from .statistics import Paired

VERDICTS = {
    "better": "**better**",
    "worse": "**worse**",
    "higher": "**higher**",
    "lower": "**lower**",
    "unresolved": "not distinguishable",
    "too_few": "one seed: no interval",
    "no_pairs": "no pair of runs",
}


def write_report(
    folder: Path, results: Results, runs: Mapping[str, Sequence[Run]], *, setting: Sequence[str], command: str = ""
) -> None:
    """Write results.json, curves.png, differences.png, report.md and report.html."""
    counted = {arm: [run for run in of_arm if run.seed in results.seeds] for arm, of_arm in runs.items()}
    draw_curves(counted, folder / "curves.png")
    draw_differences(results, folder / "differences.png")
    write_json(folder / "results.json", as_json(results))
    text = markdown(results, setting=setting, command=command)
    (folder / "report.md").write_text(text)
    (folder / "report.html").write_text(page(text, folder))


def markdown(results: Results, *, setting: Sequence[str], command: str = "") -> str:
    """The report as Markdown; figures by file name."""
    r = results
    family = max(1, sum(o.holm is not None for o in r.outcomes))
    text = (
        _environment()
        .get_template("report.md.j2")
        .render(
            r=r,
            title=f"{', '.join(arm for arm in r.arms if arm != r.baseline)} against {r.baseline}",
            conclusion=conclusion(r),
            planning=[o for o in r.outcomes if o.paired.sd is not None],
            power=POWER,
            alpha=(1 - r.level) / family,
            tolerance=TOLERANCE,
            budget_text=f"Planned: {r.budget} for every arm.",
            matching=matching(r),
            all_seeds=sorted({*r.planned, *(s for of_arm in r.scores[r.metric].values() for s in of_arm)}),
            setting=setting,
            command=command,
            verdicts=VERDICTS,
        )
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page(text: str, folder: Path) -> str:
    """Markdown as one HTML file, its figures (files of `folder`) inlined."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)

    def inlined(found: re.Match[str]) -> str:
        data = base64.b64encode((folder / found[1]).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = re.sub(r'src="([\w.-]+\.png)"', inlined, body)
    title = text.partition("\n")[0].lstrip("# ")
    return _environment(html=True).get_template("page.html.j2").render(title=title, body=Markup(body)) + "\n"


def conclusion(r: Results) -> list[str]:
    """What the comparison says, in sentences; first whether anything can be told apart at all."""
    n = len(r.seeds)
    if not r.seeds:
        return ["**Nothing can be said: no seed has a matched, finished run of every arm.** See *Dropped seeds*."]
    if n == 1:
        return [
            "**One seed gives differences but no interval: nothing can be said about another seed.** Two are the very"
            " least; five or more find anything but large effects."
        ]
    out = []
    if not r.resolved:
        which = "No arm" if len(r.outcomes) > 1 else f"`{r.outcomes[0].arm}`"
        can = "can" if len(r.outcomes) > 1 else "cannot"
        out.append(f"**{which} {can} be told from `{r.baseline}` in {r.metric} with {n} seeds.**")
    else:
        for o in r.resolved:
            low, high = o.paired.lo, o.paired.hi
            out.append(
                f"**`{o.arm}` is {o.verdict} than `{r.baseline}` in {r.metric}: {signed(o.paired.mean)}** "
                f"({percent(r.level)} interval {num(low)} to {num(high)}, p = {pvalue(o.holm)} after Holm's correction,"
                f" {n} seeds)."
            )
        rest = [f"`{o.arm}`" for o in r.outcomes if o not in r.resolved and o.arm not in r.absent]
        if rest:
            out.append(f"**Not distinguishable from `{r.baseline}`: {', '.join(rest)}.**")
    open_ones = [o for o in r.outcomes if o.verdict == "unresolved" and o.paired.mean]
    if open_ones:
        seen = [f"{seeds_text(o.needed, o.paired.mean)} for `{o.arm}` ({signed(o.paired.mean)})" for o in open_ones]
        out.append(
            "That does not show that they are equal. Were the differences seen here the true ones, finding them with"
            f" power {percent(POWER)} would take this many seeds: {', '.join(seen)}."
        )
    left_out = [f"`{arm}`" for arm in r.absent]
    if left_out:
        out.append(f"Left out, because none of its runs ended with a score: {', '.join(left_out)}.")
    if r.dropped:
        many = "s" if len(r.dropped) > 1 else ""
        out.append(f"Dropped for all arms: seed{many} {', '.join(str(d.seed) for d in r.dropped)}.")
    return out


def matching(r: Results) -> list[str]:
    """How it was verified that the arms saw the same data from the same weights, arm by arm."""
    lines = [
        "Every run of a seed has that seed for data order, initial weights and sampling. How it was verified: each run"
        " records a hash of its initial parameters, and for every generation batch a hash of the set of prompts (token"
        " ids); both are compared with the baseline's run of the same seed."
    ]
    for arm in (a for a in r.arms if a != r.baseline):
        of_arm = [m for m in r.matches if m.arm == arm]
        if not of_arm:
            lines.append(f"`{arm}`: nothing to verify, no pair of runs")
            continue
        lines.append(f"`{arm}`: {_weights_text(of_arm)}; {_prompts_text(of_arm)}")
    return lines


def _weights_text(matches: Sequence[Any]) -> str:
    known = [m for m in matches if m.weights is not None]
    if not known:
        return "initial weights not recorded by these runs"
    equal = sum(m.weights for m in known)
    return f"initial weights equal in {equal} of {len(matches)} pairs"


def _prompts_text(matches: Sequence[Any]) -> str:
    known = [m for m in matches if m.same is not None]
    if not known:
        return "prompts not recorded by these runs"
    same, steps = sum(m.same for m in known), sum(m.steps for m in known)
    text = f"prompts equal in {same:,} of {steps:,} generation batches of {len(known)} pairs"
    if same < steps and any(m.own_prompts for m in known):
        text += " (a part of the rollout side draws prompts or drops rollouts: the difference is part of the method)"
    return text


def percent(x: float) -> str:
    return f"{100 * x:g}%"


def num(x: float | None) -> str:
    """Four digits that count; a dash for what is not there."""
    if x is None:
        return "-"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def signed(x: float | None) -> str:
    return num(x) if x is None or x <= 0 else f"+{num(x)}"


def interval(pair: Paired) -> str:
    return "-" if pair.lo is None else f"[{num(pair.lo)}, {num(pair.hi)}]"


def pvalue(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def count(x: float | None) -> str:
    return "not recorded" if x is None else f"{x:,.0f}"


def seeds_text(n: int | None, effect: float | None) -> str:
    if n is not None:
        return f"{n:,}"
    return "none: there is no difference" if not effect else "more than 100,000"


def cell(value: Any) -> str:
    """Text fit for a table cell or a list entry."""
    text = " ".join(str(value).split())
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def _environment(html: bool = False) -> Environment:
    environment = Environment(
        loader=PackageLoader("rlx_plugins.comparison", "templates"),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {f.__name__: f for f in (percent, num, signed, interval, pvalue, count, seeds_text, cell)}
    return environment
