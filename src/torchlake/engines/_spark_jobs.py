"""Spark jobs in their own threads, named and tagged, so that they can be canceled together."""

import secrets
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from threading import Thread

from torchlake.engines._spark_session import Session


class TaggedJobs:
    """Threads whose Spark jobs have the caller's properties (pool, description, tags) and share one more tag."""

    def __init__(self, session: Session, description: str) -> None:
        self._session, self._description = session, description
        self._tag = f"torchlake-{secrets.token_hex(6)}"
        self._threads: list[Thread] = []

    def start(self, run: Callable[[], None], ended: Callable[[Exception | None], None]) -> None:
        """Call `run` in a new thread, then `ended` with its exception or None."""
        from pyspark.util import InheritableThread

        def target() -> None:
            failure = None
            try:
                self._describe()
                run()
            except Exception as error:
                failure = error
            ended(failure)

        takes_session = "session" in signature(InheritableThread).parameters  # from Spark 4 on
        thread: Thread = InheritableThread(target, **({"session": self._session.get()} if takes_session else {}))
        thread.daemon = True
        self._threads.append(thread)
        thread.start()

    def close(self, timeout_s: float) -> None:
        """Cancel the jobs that are still running, and wait for their threads."""
        if any(thread.is_alive() for thread in self._threads):
            with suppress(Exception):  # the session may have been stopped
                if self._session.is_connect:
                    self._session.get().interruptTag(self._tag)
                else:
                    self._session.context.cancelJobsWithTag(self._tag)
        for thread in self._threads:
            thread.join(timeout_s)

    def _describe(self) -> None:
        """Name this thread's jobs in Spark's user interface, in addition to the caller's own description."""
        if self._session.is_connect:
            self._session.get().addTag(self._tag)
            return
        context = self._session.context
        own = context.getLocalProperty("spark.job.description")
        group = context.getLocalProperty("spark.jobGroup.id")
        text = f"{own}: {self._description}" if own else self._description
        context.setJobGroup(group or self._tag, text, interruptOnCancel=True)
        context.addJobTag(self._tag)
