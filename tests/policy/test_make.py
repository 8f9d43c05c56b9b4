"""A policy is made from words; a wrong one gives one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stalempi.errors import ConfigError
from stalempi.policy import ASP, BSP, DSSP, SSP, CachedSSP, Policy, make_policy


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (make_policy("bsp"), "bsp()"),
        (make_policy("bsp", backup=1), "bsp(backup=1)"),
        (make_policy("asp"), "asp()"),
        (make_policy("allreduce"), "allreduce()"),
        (make_policy("allreduce", overlap=False), "allreduce(overlap=0)"),
        (make_policy("ssp", bound=3), "ssp(bound=3)"),
        (make_policy("ssp-cached", bound=3), "ssp-cached(bound=3)"),
        (make_policy("dssp", lower=3, upper=15), "dssp(lower=3, upper=15, controller=dyn, predictor=ema, eps=0.005)"),
        (make_policy("dssp", lower=3, upper=15, controller="paper"), "dssp(lower=3, upper=15, controller=paper)"),
        (
            make_policy("dssp", lower=1, upper=9, predictor="mean-std:2", eps=0.1, narrow=(100, 200)),
            "dssp(lower=1, upper=9, controller=dyn, predictor=mean-std:2, eps=0.1, narrow=100:200)",
        ),
    ],
)
def test_a_policy_prints_as_its_options(policy: Policy, text: str) -> None:
    assert str(policy) == text


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: make_policy("sync"), "policy must be one of bsp, asp, ssp, ssp-cached, dssp, allreduce, got 'sync'"),
        (lambda: make_policy("asp", bound=3), "policy asp has no option bound; it takes none"),
        (lambda: make_policy("ssp", lower=3), "policy ssp has no option lower; it takes bound"),
        (lambda: make_policy("dssp", lower=3), "policy dssp needs upper"),
        (lambda: SSP(-1), "bound must be at least 0, got -1"),
        (lambda: SSP(1.5), "bound must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (lambda: SSP(True), "bound must be a whole number, got True"),
        (lambda: CachedSSP(-1), "bound must be at least 0, got -1"),
        (lambda: BSP(backup=-1), "backup must be at least 0, got -1"),
        (lambda: DSSP(-1, 3), "lower must be at least 0, got -1"),
        (lambda: DSSP(3, 1), "lower must not be above upper, got lower=3 and upper=1"),
        (lambda: DSSP(3, "4"), "upper must be a whole number, got '4'"),  # type: ignore[arg-type]
        (
            lambda: DSSP(1, 3, controller="x"),
            "controller must be one of dyn, moment, paper, paper-capped, got 'x'",
        ),
        (lambda: DSSP(1, 3, predictor="x"), "predictor must be one of last, ema, mean-std, got 'x'"),
        (
            lambda: DSSP(1, 3, predictor="ema:1"),
            "b of predictor ema must be a number of at least 0 and below 1, got 1.0",
        ),
        (lambda: DSSP(1, 3, predictor="ema:x"), "predictor ema needs a number after the colon, got 'ema:x'"),
        (lambda: DSSP(1, 3, predictor="last:2"), "predictor last has no parameter, got 'last:2'"),
        (lambda: DSSP(1, 3, eps=-0.1), "eps must be a number of at least 0, got -0.1"),
        (
            lambda: DSSP(1, 3, controller="paper", eps=0.1),
            "controller paper has no option eps; dyn and moment have",
        ),
        (
            lambda: DSSP(1, 3, controller="paper", narrow=(1, 2)),
            "controller paper has no bound to narrow; use paper-capped or dyn",
        ),
        (lambda: DSSP(1, 3, narrow=(2, 1)), "narrow must not end before it begins, got 2 and 1"),
        (lambda: DSSP(1, 3, narrow=(-2, 1)), "begin of narrow must be at least 0, got -2"),
        (lambda: ASP().start(0, 0.0), "a policy needs at least 1 worker, got 0"),
    ],
)
def test_a_wrong_value_gives_one_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == line
