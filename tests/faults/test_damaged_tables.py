"""Damaged and odd tables end in rows or in an error of torchlake, whatever a library raises: draws of damages."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from damaged_tables import DAMAGES, KINDS, Damage, Tables
from sweeps import sweep
from torchlake.outputs import transaction

DRAWS = st.builds(
    Damage,
    kind=st.sampled_from(DAMAGES),
    file=st.integers(0, 99),
    place=st.integers(0, 2**20),
    value=st.integers(0, 2**32 - 1),
)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tables]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction, "PAUSE_S", 0.01)  # no other writer makes progress meanwhile
        yield Tables(tmp_path_factory.mktemp("damaged"))


@pytest.mark.parametrize(
    ("kind", "one"),
    [("folder_output", Damage("value", 40, 973828, 1445881044))],  # the name of a part is a number
)
def test_damages_that_were_found(tables: Tables, kind: str, one: Damage) -> None:
    assert tables.raw_errors(kind, one) == []


@pytest.mark.parametrize("count", sweep([4, 2500], quick={4}))
@pytest.mark.parametrize("kind", KINDS)
def test_no_exception_of_a_library_reaches_a_user(tables: Tables, kind: str, count: int) -> None:
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(DRAWS)
    def draw(one: Damage) -> None:
        assert tables.raw_errors(kind, one) == []

    draw()
