"""The rules of supervision: when a job is started again, after how long, what is suspect, and when it ends."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from deploy.supervisor.restart_policy import (
    Attempt,
    GiveUp,
    Limits,
    Restart,
    RestartHistory,
    StoreSnapshot,
    backoff,
    decide_restart,
    ending,
)
from store.names import SaveId

A, B, C, D = (SaveId(step, 1) for step in (10, 20, 30, 40))
LIMITS = Limits(restarts=3, least=1.0, most=60.0)
START = RestartHistory()


def seen(
    newest: SaveId | None, resumes: SaveId | None = None, instead: SaveId | None = None, epoch: int = 1
) -> StoreSnapshot:
    return StoreSnapshot(newest, newest.step if newest else -1, resumes or newest, instead, epoch)


def died(before: StoreSnapshot, after: StoreSnapshot | None = None, code: int = 1) -> Attempt:
    """An attempt that attached."""
    return Attempt(code, before, after or replace(before, epoch=before.epoch + 1))


def one(
    attempt: Attempt, history: RestartHistory = START, limits: Limits = LIMITS
) -> tuple[RestartHistory, Restart | GiveUp]:
    return decide_restart(history, attempt, limits, lambda: 0.0)


def verdicts(attempts: list[Attempt], limits: Limits = LIMITS) -> list[Restart | GiveUp]:
    history, found = RestartHistory(), []
    for attempt in attempts:
        history, verdict = one(attempt, history, limits)
        found.append(verdict)
    return found


def test_done_is_done() -> None:
    assert one(died(seen(A), code=0))[1] == GiveUp(0, "the command ended")


def test_preempted_when_told_to_go_whatever_the_launcher_makes_of_it() -> None:
    for code in (75, 1, -15, -9):
        stop = one(replace(died(seen(A), code=code), exit_request=75))[1]
        assert isinstance(stop, GiveUp) and stop.code == 75
    assert one(replace(died(seen(A), code=0), exit_request=75))[1] == GiveUp(0, "the command ended")


def test_interrupted_is_interrupted_whatever_the_code() -> None:
    for code in (0, 1, 130, -2):
        stop = one(replace(died(seen(A), code=code), exit_request=130))[1]
        assert isinstance(stop, GiveUp) and stop.code == 130


def test_preempted_by_others_starts_again_without_being_counted() -> None:
    history = RestartHistory(in_a_row=2, failures=2, step=10, suspected=A, deaths=1)
    went, verdict = one(died(seen(A), seen(B, epoch=2), code=75), history)
    assert verdict == Restart(0.0)
    assert (went.in_a_row, went.failures, went.step) == (0, 2, 20)


def test_preempted_again_and_again_with_nothing_saved_it_ends_and_blames_no_commit() -> None:
    found = verdicts([died(replace(seen(A), instead=B), code=75)] * 4)
    assert found[:3] == [Restart(1.0), Restart(2.0), Restart(4.0)]
    assert isinstance(found[3], GiveUp) and found[3].code == 93
    went, _ = one(died(seen(A), code=75), RestartHistory(in_a_row=1, failures=1, suspected=A, deaths=1))
    assert (went.in_a_row, went.failures, went.suspected, went.deaths) == (2, 1, A, 1)


def test_without_progress_it_ends_after_so_many_restarts() -> None:
    found = verdicts([died(seen(A))] * 4)
    assert [verdict.seconds for verdict in found[:3] if isinstance(verdict, Restart)] == [1.0, 2.0, 4.0]
    assert isinstance(found[3], GiveUp) and found[3].code == 93 and "4 times in a row" in found[3].why
    stop = verdicts([died(seen(None))], Limits(restarts=0))[0]
    assert isinstance(stop, GiveUp) and stop.code == 93 and "once" in stop.why


def test_a_step_further_begins_anew() -> None:
    history, attempt = (
        RestartHistory(in_a_row=3, failures=7, step=10, suspected=A, deaths=1, marked=(D,)),
        died(seen(A), seen(B)),
    )
    went, verdict = one(attempt, history)
    assert went == RestartHistory(failures=8, step=20)
    assert verdict == Restart(1.0)


def test_a_new_commit_of_an_old_step_is_no_progress() -> None:
    """Resumed at 20, back to 10, and again up to 20 for ever."""
    older = SaveId(20, 2)
    history, verdict = one(died(seen(B, resumes=A), seen(older, epoch=2)))
    assert history.in_a_row == 1 and isinstance(verdict, Restart)
    going = [died(seen(SaveId(20, epoch), resumes=A), seen(SaveId(20, epoch + 1))) for epoch in range(1, 9)]
    assert [type(verdict) for verdict in verdicts(going)][:4] == [Restart, Restart, Restart, GiveUp]


def test_the_furthest_step_counts_even_where_its_commit_is_gone() -> None:
    history, _ = one(died(seen(D)))
    went, _ = one(died(seen(A), seen(SaveId(20, 2), epoch=2)), history)
    assert went.in_a_row == 2


def test_total_limit() -> None:
    limits = replace(LIMITS, failures=2)
    steps = [died(seen(A), seen(B)), died(seen(B), seen(C))]
    found = verdicts(steps, limits)
    assert isinstance(found[0], Restart)
    assert isinstance(found[1], GiveUp) and found[1].code == 1 and "failed 2 times" in found[1].why


def test_two_deaths_make_a_suspect() -> None:
    found = verdicts([died(seen(C, instead=B)), died(seen(C, instead=B)), died(seen(C, resumes=B, instead=A))])
    assert [verdict.suspect for verdict in found if isinstance(verdict, Restart)] == [None, C, None]


def test_the_way_down_ends_and_what_did_not_help_is_withdrawn() -> None:
    ladder = [died(seen(C, instead=B))] * 2 + [died(seen(C, resumes=B, instead=A))] * 2 + [died(seen(C, resumes=A))]
    found = verdicts(ladder, replace(LIMITS, restarts=4))
    assert [verdict.suspect for verdict in found if isinstance(verdict, Restart)] == [None, C, None, B]
    assert isinstance(found[4], GiveUp) and (found[4].code, found[4].withdrawn) == (93, (C, B))


def test_marks_stay_where_falling_back_helped() -> None:
    helped = died(seen(C, resumes=B), seen(SaveId(50, 4), epoch=4))
    again = [died(seen(SaveId(50, 4)))] * 4
    found = verdicts([died(seen(C, instead=B))] * 2 + [helped, *again])
    assert isinstance(found[-1], GiveUp) and found[-1].withdrawn == ()


def test_no_suspect_where_it_never_attached() -> None:
    """A missing module, a full GPU: no commit's fault."""
    before = seen(C, instead=B)
    found = verdicts([died(before, before)] * 4)
    assert [verdict.suspect for verdict in found if isinstance(verdict, Restart)] == [None] * 3
    assert isinstance(found[3], GiveUp)


def test_no_suspect_where_nothing_else_is_there_or_it_is_not_to_blame() -> None:
    found = verdicts([died(seen(C, instead=None))] * 3)
    assert [verdict.suspect for verdict in found if isinstance(verdict, Restart)] == [None] * 3


def test_no_suspect_where_deaths_are_not_in_a_row() -> None:
    committed = died(seen(C, instead=B), seen(SaveId(25, 2), epoch=2))
    found = verdicts([died(seen(C, instead=B)), committed, died(seen(C, instead=B))])
    assert [verdict.suspect for verdict in found if isinstance(verdict, Restart)] == [None] * 3


def test_an_unreadable_store_tells_nothing_and_ends_all_the_same() -> None:
    blind = StoreSnapshot(trouble="input/output error")
    for before, after in ((blind, seen(D)), (seen(A), blind), (blind, blind)):
        found = verdicts([Attempt(1, before, after)] * 4)
        assert [type(verdict) for verdict in found] == [Restart, Restart, Restart, GiveUp]
        assert all(verdict.suspect is None for verdict in found[:3] if isinstance(verdict, Restart))


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True), st.floats(0, 1e4), st.floats(0, 1e6))
def test_back_off_is_bounded(row: int, drawn: float, least: float, most: float) -> None:
    limits = Limits(least=least, most=max(least, most))
    assert least / 2 <= backoff(row, limits, lambda: drawn) <= limits.most
    assert backoff(row + 1, limits, lambda: drawn) >= backoff(row, limits, lambda: drawn)


def anything(random: Random) -> StoreSnapshot:
    def save() -> SaveId | None:
        return random.choice([None, SaveId(random.randint(0, 30), random.randint(1, 3))])

    newest = save()
    step = random.randint(newest.step if newest else -1, 30)
    return StoreSnapshot(newest, step, save(), save(), random.randint(0, 5), random.choice(["", "", "gone"]))


@given(st.integers(0, 1 << 32))
def test_whatever_happens_it_ends_unless_it_gets_further(seed: int) -> None:
    """There are 31 steps, so no sequence of failures goes on for ever."""
    random, codes = Random(seed), [1, 2, -9, 137]
    found = verdicts([Attempt(random.choice(codes), anything(random), anything(random)) for _ in range(4 * 32)])
    assert any(isinstance(verdict, GiveUp) and verdict.code == 93 for verdict in found)


def test_how_it_ended_in_words() -> None:
    assert (ending(3), ending(-9), ending(-77)) == ("exit code 3", "SIGKILL", "signal 77")
