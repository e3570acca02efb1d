"""Runs independent tasks in worker processes that never outlive this process."""

import logging
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_POLL = 0.2  # seconds


def run_tasks(
    make: Callable[..., Callable[[Task], Result]], arguments: tuple[object, ...], tasks: list[Task], workers: int
) -> Iterator[tuple[Task | None, Result | None]]:
    """Yield (task, result) as tasks finish, and (None, None) a few times a second in between.

    Args:
      make: module-level function, called with `arguments` in each process. Returns the function that runs a task.
      arguments: arguments of `make`. They, the tasks and the results must be picklable.
      tasks: the tasks, in the order in which they start.
      workers: number of processes. 0 runs the tasks in this process.

    Raises:
      ValueError, OSError: raised by a task.
      RuntimeError: a worker died (the system may have killed it for using too much memory), or a task raised another error.
    """
    if not workers or not tasks:
        function = make(*arguments) if tasks else None
        for task in tasks:
            assert function is not None
            yield task, function(task)
        return
    context = multiprocessing.get_context("spawn")  # forking a process with threads may hang
    waiting, done = context.Queue(), context.Queue()
    for number in range(len(tasks)):
        waiting.put(number)
    processes = [
        context.Process(target=_work, args=(make, arguments, tasks, waiting, done), daemon=True)
        for _ in range(min(workers, len(tasks)))
    ]
    try:
        for process in processes:
            process.start()
        left = len(tasks)
        while left:
            try:
                number, result, error = done.get(timeout=_POLL)
            except queue.Empty:
                ended = [process for process in processes if process.exitcode is not None]
                if ended:
                    raise RuntimeError(
                        f"a worker died with exit code {ended[0].exitcode}; the machine may be out of memory. Finished work is "
                        "kept: run the same command again to resume, with fewer workers if necessary."
                    ) from None
                yield None, None
                continue
            if error is not None:
                raise error
            left -= 1
            yield tasks[number], result
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()  # from here on it writes nothing
        for queue_ in (waiting, done):
            queue_.cancel_join_thread()
            queue_.close()


def _work(make, arguments, tasks, waiting, done) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.getLogger("atlasjax").setLevel(logging.ERROR)  # the parent has said it
    try:
        function = make(*arguments)
        while True:
            number = waiting.get()
            done.put((number, function(tasks[number]), None))
    except KeyboardInterrupt:
        pass  # the parent receives it too, and kills this process
    except (ValueError, OSError) as error:
        done.put((None, None, type(error)(str(error)) if isinstance(error, ValueError) else error))
        # The parent would take a process that has ended for one that died.
        time.sleep(60)  # the parent kills this process when it has read this
    except Exception as error:
        done.put((None, None, RuntimeError(f"{type(error).__name__}: {error}")))
        time.sleep(60)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
