"""What a job may spend holds, whatever its processes do, die or are told."""

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

import s3_server
from s3_server import BUCKET
from torchlake import failpoints
from torchlake.errors import StorageError
from torchlake.jobs.worker.journal import Journal
from torchlake.runtimes._http.answers import Answer
from torchlake.runtimes._http.requests import Begun
from torchlake.scoring.endpoint.budget import UNLIMITED, Amount, Asked, SpendingBudget, open_account
from torchlake.scoring.endpoint.usage import Price
from torchlake.scoring.endpoint.worker import OpenChunk, mark

PRICE = Price(input=1.0, output=3.0, cached=0.5)


@dataclass(frozen=True)
class Paid:
    """A request, and what the endpoint takes for it."""

    asked: Asked
    prompt: int
    generated: int
    cached: int

    @property
    def amount(self) -> Amount:
        return Amount(PRICE.cost(self.prompt, self.generated, self.cached), self.prompt + self.generated)


@st.composite
def requests(draw: st.DrawFn) -> Paid:
    size, most = draw(st.integers(1, 60)), draw(st.integers(1, 40))
    prompt = draw(st.integers(1, size))
    asked = Asked(body=b"", tokens=size / 4, size=size, most=most)
    return Paid(asked, prompt, draw(st.integers(0, most)), draw(st.integers(0, prompt)))


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["ask", "ask", "end", "lose", "kill"]), requests()),
    min_size=1,
    max_size=30,
)


@given(STEPS, st.integers(20, 500))
def test_no_order_of_requests_answers_and_kills_takes_more_than_the_limits(
    steps: list[tuple[int, str, Paid]], limit: int
) -> None:
    limits = Amount(1.5 * limit / 1e6, limit)
    with TemporaryDirectory() as name:
        account = open_account(name, create=True)
        processes = [SpendingBudget(limits, PRICE, name) for _ in range(3)]
        opened: list[list[tuple[Paid, Amount]]] = [[], [], []]
        paid, lost = Amount(), False
        for number, step, request in steps:
            budget, open_ones = processes[number], opened[number]
            if step == "ask" and (most := budget.set_aside(request.asked)) is not None:
                open_ones.append((request, most))
                paid = paid.plus(request.amount)  # the endpoint takes it whatever becomes of its answer
            elif step in ("end", "lose") and open_ones:
                one, most = open_ones.pop(0)
                answer = Answer(
                    texts=("x",),
                    prompt_tokens=one.prompt,
                    generated_tokens=one.generated,
                    cached_tokens=one.cached,
                )
                budget.settle(most, one.asked, answer if step == "end" else None)
                lost |= step == "lose"
            elif step == "kill":
                budget._account.close()
                processes[number] = SpendingBudget(limits, PRICE, name)
                lost |= bool(open_ones)
                opened[number] = []
            kept = account.read()
            assert paid.tokens <= kept.tokens <= limit
            assert paid.cost <= kept.cost + 1e-12 <= limits.cost + 2e-12
        if not lost and not any(opened):
            assert kept.tokens == paid.tokens, "nothing is set aside for ended requests"
        for one in [account, *(each._account for each in processes)]:
            one.close()


def test_room_may_come_from_processes_that_live(tmp_path: Path) -> None:
    open_account(str(tmp_path), create=True).close()
    limits, asked = Amount(math.inf, 55), Asked(body=b"", tokens=1, size=4, most=10)
    one, other = (SpendingBudget(limits, None, str(tmp_path)) for _ in range(2))
    most = one.set_aside(asked)
    assert most == Amount(0.0, 30.0)
    assert other.set_aside(asked) is None
    assert other.may_get_room()
    one.settle(most, asked, Answer(texts=("x",), prompt_tokens=3, generated_tokens=2))
    assert not other.may_get_room(), "nothing is open"
    assert other.set_aside(asked) == most
    assert one.set_aside(asked) == Amount(0.0, 16.0), "it knows that prompts have 2 more"
    other._account.close()  # killed
    assert one.set_aside(asked) is None
    one.give_up()
    assert one.reached == "max_tokens_total"


@pytest.mark.parametrize(
    ("answer", "took"),
    [
        (Answer(texts=("four" * 3,)), 5 + 3),
        (Answer(texts=("",), error="length", prompt_tokens=9, generated_tokens=10), 19),
        (Answer(error="http_503: busy (9 attempts)", final=False), 0),
        (Answer(error="http_400: no"), 0),
        (Answer(error="content_filter: no"), 0),
        (Answer(vector="AAAA"), 5),
        (Answer(error="bad_answer: it is not JSON: <html>"), 20 + 16 + 10),
        (Answer(error="timeout: no whole answer in 1 s, twice", final=False), 20 + 16 + 10),
        (Answer(error="connection: reset (9 attempts)", final=False), 20 + 16 + 10),
    ],
)
def test_what_an_answer_takes(answer: Answer, took: int, tmp_path: Path) -> None:
    """By the endpoint's count, else an estimate; of what may have been paid without an answer the most."""
    account = open_account(str(tmp_path), create=True)
    budget, asked = SpendingBudget(UNLIMITED, None, str(tmp_path)), Asked(body=b"", tokens=5, size=20, most=10)
    most = budget.set_aside(asked)
    assert most is not None
    budget.settle(most, asked, answer)
    assert account.read().tokens == took


def test_each_row_of_a_batch_is_settled_once_whatever_attempts_are_killed(tmp_path: Path) -> None:
    account = open_account(str(tmp_path), create=True)
    asked = {row: Asked(body=b"%d" % row, tokens=1, size=4, most=10) for row in range(4)}

    def attempt() -> OpenChunk:
        journal = Journal(str(tmp_path), "part-0.parquet", {row: mark(one.body) for row, one in asked.items()})
        return OpenChunk(journal, asked, SpendingBudget(UNLIMITED, None, str(tmp_path)))

    first = attempt()
    assert all(first.begin(row, lost=False) for row in asked)
    first.note_batch(Begun("file", "batch"))
    first.journal.close()
    assert account.read().tokens == 4 * (4 + 16 + 10)
    for rows in ((3, 2, 1), (0,)):
        one = attempt()
        assert one.known_batch() == Begun("file", "batch")
        for row in rows:
            one.keep(row, Answer(texts=("x",), prompt_tokens=3, generated_tokens=2))
        one.journal.close()
    assert account.read().tokens == 4 * 5


def test_an_answer_of_a_batch_that_is_not_kept_is_settled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are killed before and after its part of the most is replaced; the account never has less than is due."""
    account = open_account(str(tmp_path), create=True)
    asked = {row: Asked(body=b"%d" % row, tokens=1, size=4, most=10) for row in range(3)}
    most, lost = 4 + 16 + 10, Answer(error="batch: expired", final=False)

    def attempt() -> OpenChunk:
        journal = Journal(str(tmp_path), "part-0.parquet", {row: mark(one.body) for row, one in asked.items()})
        return OpenChunk(journal, asked, SpendingBudget(UNLIMITED, None, str(tmp_path)))

    one = attempt()
    assert all(one.begin(row, lost=False) for row in asked)
    one.note_batch(Begun("file", "batch"))
    one.keep(2, lost)
    monkeypatch.setenv("TORCHLAKE_FAILPOINT", "answer.settle:1:raise")
    monkeypatch.setattr(failpoints, "_hits", {})
    with pytest.raises(RuntimeError, match=r"answer\.settle"):
        one.keep(1, lost)
    one.journal.close()
    assert account.read().tokens == 2 * most
    one = attempt()
    assert one.known_batch() == Begun("file", "batch", frozenset({1, 2}))
    one.keep(0, lost)
    assert account.read().tokens == most, "what the killed attempt has not settled stays"
    one.journal.close()
    one = attempt()
    assert one.known_batch() == Begun("file", "batch", frozenset(asked))
    assert all(one.begin(row, lost=False) for row in asked)
    one.note_batch(Begun("again", "another"))
    one.journal.close()
    one = attempt()
    assert one.known_batch() == Begun("again", "another")
    for row in asked:
        one.keep(row, Answer(texts=("x",), prompt_tokens=3, generated_tokens=2))
    one.journal.close()
    assert account.read().tokens == most + 3 * 5


def test_an_account_in_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server.serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/out/rows"
        with pytest.raises(StorageError, match="its account is gone"):
            open_account(place).change(Amount(0.0, 1.0))
        account, limits = open_account(place, create=True), Amount(math.inf, 1000)
        one, other = open_account(place), open_account(place)
        for _ in range(4):
            assert one.change(Amount(0.0, 20.0), limits) is None
        assert 80 < account.read().tokens < 200, "it adds in advance"
        one.change(Amount(0.0, -15.0))
        assert other.change(Amount(0.0, 900.0), limits) == "max_tokens_total"
        assert other.change(Amount(0.0, 700.0), limits) is None
        one.flush()
        assert account.read().tokens == 65 + 700, "and takes out what it has not used; the other is killed"
        assert open_account(place).change(Amount(0.0, 300.0), limits) == "max_tokens_total"
        assert one.change(Amount(0.0, 30.0), limits) is None, "another task of the same process"
        assert account.read().tokens >= 95 + 700
