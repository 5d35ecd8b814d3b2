"""Hyper-parameters: types, bounds, immutability; state: saved whole, restored whole."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest

import rlx_plugins as rlx
from rlx_plugins.core import registry


@pytest.fixture(scope="module")
def Sample():
    @rlx.register("clip", "sample")
    @dataclass
    class Sample(rlx.Clip):
        share: float = rlx.param(0.5, ge=0, lt=1)
        steps: int = rlx.param(4, gt=0)
        mode: Literal["row", "batch"] = "row"
        weights: tuple[float, ...] = rlx.param((), ge=0)
        pair: tuple[int, float] = (1, 2.0)
        table: dict[str, float] = rlx.param(factory=dict, le=1)
        limit: float | None = None
        on: bool = True
        seen: dict = rlx.state(factory=dict)
        ema: float = rlx.state(0.0)

        def check(self):
            if self.limit is not None and self.limit < self.share:
                raise rlx.ConfigError(f"clip sample.limit: must be at least share ({self.share}), got {self.limit}")

        def __call__(self, terms):
            return terms.ratio

    yield Sample
    registry.forget("clip", "sample")


def test_values_are_coerced_to_the_declared_type(Sample):
    part = Sample(share=0, steps=8.0, weights=[1, 2], pair=[3, 4], table={"a": 1}, limit=1)
    assert (part.share, part.steps, part.weights, part.pair) == (0.0, 8, (1.0, 2.0), (3, 4.0))
    assert isinstance(part.share, float) and isinstance(part.steps, int) and isinstance(part.limit, float)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": "half"}, r"clip sample\.share: expected float, got 'half'"),
        ({"share": True}, r"sample\.share: expected float"),
        ({"share": 1}, r"sample\.share: must be < 1, got 1\.0"),
        ({"share": -0.1}, r"sample\.share: must be >= 0"),
        ({"share": math.nan}, r"sample\.share: NaN is not a value"),
        ({"steps": 2.5}, r"sample\.steps: expected int, got 2\.5"),
        ({"steps": 0}, r"sample\.steps: must be > 0"),
        ({"mode": "bach"}, r"sample\.mode: expected one of 'row', 'batch', got 'bach'; did you mean 'batch'"),
        ({"weights": [1, -2]}, r"sample\.weights\[1\]: must be >= 0"),
        ({"weights": 1.0}, r"sample\.weights: expected tuple"),
        ({"pair": [1]}, r"sample\.pair: expected"),
        ({"table": {"a": 2}}, r"sample\.table\['a'\]: must be <= 1"),
        ({"limit": "x"}, r"sample\.limit: expected float or None"),
        ({"limit": 0.1}, r"sample\.limit: must be at least share"),
        ({"on": 1}, r"sample\.on: expected bool, got 1"),
    ],
)
def test_a_bad_value_names_the_field(Sample, given, message):
    with pytest.raises(rlx.ConfigError, match=message):
        Sample(**given)


def test_an_unknown_parameter_names_the_close_match_and_what_is_accepted(Sample):
    with pytest.raises(rlx.ConfigError, match=r"unknown parameter 'step'; did you mean 'steps'.*accepts share, steps"):
        rlx.create("clip", "sample", step=1)


def test_state_is_not_a_parameter(Sample):
    with pytest.raises(rlx.ConfigError, match="unknown parameter 'ema'"):
        rlx.create("clip", "sample", ema=1.0)


def test_parameters_stay_what_they_were_and_state_may_change(Sample):
    part = Sample()
    part.ema = 2.0
    with pytest.raises(rlx.ConfigError, match=r"sample\.share: parameters do not change"):
        part.share = 0.1
    other = part.replace(share=0.25)
    assert (part.share, other.share, other.ema) == (0.5, 0.25, 0.0)


def test_state_is_a_copy_and_comes_back_whole(Sample):
    part = Sample()
    part.seen["p"] = [1]
    saved = part.state_dict()
    part.seen["p"].append(2)
    other = Sample()
    other.load_state_dict(saved)
    assert (other.seen, other.ema) == ({"p": [1]}, 0.0)


def test_state_of_another_shape_is_refused_and_changes_nothing(Sample):
    part = Sample()
    part.ema = 3.0
    with pytest.raises(rlx.ConfigError, match=r"missing \['ema'\], unknown \['old'\]"):
        part.load_state_dict({"seen": {}, "old": 1})
    assert part.ema == 3.0
