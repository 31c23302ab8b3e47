"""Exactly once, checked against a model (tests/exactly_once.py): a short run here, 2,000 steps in `make faults`."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from exactly_once import ExactlyOnce

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.parametrize("examples", [3, pytest.param(80, marks=pytest.mark.slow)])
def test_the_output_is_that_of_one_version_of_the_input_or_an_error(examples: int) -> None:
    options = settings(max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=CHECKS)
    run_state_machine_as_test(ExactlyOnce, settings=options)
