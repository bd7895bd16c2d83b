"""Work that goes on beside backward, in a thread of its own."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Queue

import torch

Work = tuple[Callable[[], None], Callable[[], None]]


class Background:
    """Does what it is given in the order in which it came; after an error, nothing more until somebody heard of it.

    The thread begins with the first work. It keeps no process alive: who leaves in the middle of a step does not wait
    for ranks that never come.
    """

    def __init__(self) -> None:
        self._queue: Queue[Work | None] = Queue()
        self._errors: list[BaseException] = []
        self._begun = False

    def submit(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        """Have ``work`` done, unless an earlier one failed, and then ``done`` called, whatever happened."""
        if not self._begun:
            self._begun = True
            arguments = self._queue, self._errors
            thread = threading.Thread(target=_serve, args=arguments, name="lightning_compress", daemon=True)
            thread.start()
            weakref.finalize(self, _end, self._queue, thread)
        self._queue.put((work, done))

    @property
    def idle(self) -> bool:
        """Whether everything is done."""
        return not self._queue.unfinished_tasks

    def wait(self) -> None:
        """Wait until everything is done.

        Raises:
            BaseException: what the work that failed raised.
        """
        self._queue.join()
        if self._errors:
            raise self._errors.pop()


def _end(queue: Queue[Work | None], thread: threading.Thread) -> None:
    """Let an idle thread come to its end, also before the interpreter's, which aborts where threads wake up late."""
    idle = not queue.unfinished_tasks
    queue.put(None)
    if idle and thread is not threading.current_thread():
        thread.join(10)


def _serve(queue: Queue[Work | None], errors: list[BaseException]) -> None:
    while (given := queue.get()) is not None:
        work, done = given
        try:
            if not errors:
                with torch.no_grad():
                    work()
        except BaseException as error:  # of whatever kind, it is raised where somebody waits
            errors.append(error)
        finally:
            done()
            queue.task_done()
        del given, work, done  # or they would hold gradients until the next step
