"""A signal ends a command quietly, and waits where it would break what runs."""

from __future__ import annotations

import signal

import pytest

from cluster.cli.interrupts import interruptible


def test_a_signal_ends_the_block_quietly_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    reached = []
    with interruptible():
        reached.append("start")
        signal.raise_signal(signal.SIGTERM)
        reached.append("end")
    assert reached == ["start"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_of_the_cleanup_is_seen() -> None:
    def unwind() -> None:
        with interruptible():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                raise ValueError("cleanup")

    with pytest.raises(ValueError, match="cleanup"):
        unwind()


def test_an_error_without_a_signal_is_seen() -> None:
    with pytest.raises(ValueError, match="plain"), interruptible():
        raise ValueError("plain")


def test_a_held_signal_is_raised_where_we_check() -> None:
    reached = []
    with interruptible() as interrupts, interrupts.held():
        interrupts.check()
        signal.raise_signal(signal.SIGHUP)
        reached.append("native code ended in peace")
        interrupts.check_again()
        interrupts.check()
        reached.append("went on")
    assert reached == ["native code ended in peace"]


def test_a_held_signal_is_raised_before_the_work_that_lets_them_through() -> None:
    reached = []
    with interruptible() as interrupts, interrupts.held():
        signal.raise_signal(signal.SIGINT)
        with interrupts.let_through():
            reached.append("went on")
    assert reached == []


def test_a_second_signal_cuts_a_cleanup_that_holds_them() -> None:
    reached = []
    with interruptible() as interrupts, interrupts.held():
        try:
            with interrupts.let_through():
                signal.raise_signal(signal.SIGINT)
        finally:
            interrupts.check_again()
            reached.append("cleanup")
            signal.raise_signal(signal.SIGINT)
            reached.append("still held")
            interrupts.check_again()
            reached.append("went on")
    assert reached == ["cleanup", "still held"]


def test_later_signals_do_not_disturb_the_cleanup() -> None:
    cleaned = []
    with interruptible():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                cleaned.append("all")
    assert cleaned == ["all"]
