"""Cases spread over processes: one that kills its process, or takes too long, is a result too."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

SECONDS = 300.0  # after which a case counts as one that hangs


class _Worker:
    """A process that does one case after the other."""

    def __init__(self, do: Callable[[int], Any]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process that runs JAX hangs
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(do, other), daemon=True)
        self.process.start()
        other.close()
        self.case: int | None = None
        self.since = 0.0

    def start(self, case: int) -> None:
        """Give the process a case."""
        self.case, self.since = case, time.monotonic()
        self.pipe.send(case)

    def result(self, seconds: float) -> Any:
        """Return the result of its case; None if there is none yet."""
        late = time.monotonic() - self.since > seconds
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return ChildProcessError(f"ended its process with {self.process.exitcode}")
        return TimeoutError(f"took over {seconds:.0f} s") if late else None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(do: Callable[[int], Any], pipe: Connection) -> None:
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        pipe.send(do(case))


def spread(
    do: Callable[[int], Any], cases: Iterable[int], workers: int, seconds: float = SECONDS
) -> Iterator[tuple[int, Any]]:
    """Do cases in several processes.

    Args:
        do: Does one case; a function of a module, with a result that pickles.
        cases: Their numbers.
        workers: How many processes.
        seconds: How long a case may take.

    Yields:
        The number and the result of each case, in the order in which they end. If a case ended its process or took
        too long, its result is an ``Exception`` that says so.
    """
    waiting = iter(cases)
    running: dict[_Worker, None] = {}

    def go_on(worker: _Worker) -> None:
        """Give a process the next case; without one, end it."""
        case = next(waiting, None)
        if case is not None:
            running[worker] = worker.start(case)
        else:
            running.pop(worker, None)
            worker.stop()

    try:
        for _ in range(workers):
            go_on(_Worker(do))
        while running:
            wait([w.pipe for w in running], timeout=1.0)
            for worker in list(running):
                found = worker.result(seconds)
                if found is None:
                    continue
                assert worker.case is not None
                yield worker.case, found
                if isinstance(found, (TimeoutError, ChildProcessError)):
                    del running[worker]
                    worker.stop()
                    worker = _Worker(do)
                go_on(worker)
    finally:
        for worker in running:
            worker.stop()
