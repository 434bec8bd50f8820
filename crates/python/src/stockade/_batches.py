"""Thousands of programs as batches: which is sent when, and what becomes of those without a result.

A program is sent again only if it is known not to have started. Where the service has gone in the
middle of a batch, what it had not answered may have started, and its result says so.
"""

from __future__ import annotations

import base64
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, cast

from . import _request, _result, _wire
from ._errors import BadRequest, SandboxError
from ._result import Result, Verdict
from ._wire import Address, Call, Problem

if TYPE_CHECKING:
    from types import TracebackType

    from ._request import RunOptions

#: Programs and bytes of one batch.
BATCH = 500
BATCH_BYTES = 32 << 20
#: Batches at a time: the next is there when the last programs of one take long.
BATCHES = 2
#: Seconds before another try, where the service does not say.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
#: Seconds between two looks at what has come.
LOOK = 0.1


def encoded(program: str | bytes | Mapping[str, Any], options: RunOptions) -> bytes:
    """A line of JSON: the request of a program, with these options where it has none of its own."""
    if isinstance(program, (str, bytes)):
        return _request.encode(_request.run(program, options))
    own = dict(program)
    code = own.pop("code", None)
    if not isinstance(code, (str, bytes)):
        raise BadRequest("a program is its code, or a mapping with `code` in it", reason="request_malformed")
    return _request.encode(_request.run(code, cast("RunOptions", {**options, **own})))


def of_problem(problem: Problem) -> Result:
    """The result in place of one that a problem kept from being."""
    verdict = Verdict.SANDBOX_ERROR
    if problem.reason == "cancelled":
        verdict = Verdict.CANCELLED
    elif problem.status in (400, 413, 415, 422):
        verdict = Verdict.BAD_REQUEST
    # As the program's stderr would come.
    words = base64.b64encode(problem.detail.encode()).decode() if verdict is Verdict.CANCELLED else problem.detail
    return _result.parse(
        {
            "schema": 1,
            "output": "",
            "error": words,
            "code": 2 if verdict is Verdict.BAD_REQUEST else 125,
            "success": False,
            "verdict": str(verdict),
            "reason": problem.reason,
            "started": problem.started,
        }
    )


def result_of(url: str, data: object) -> Result:
    """The result that a server sent, if it is one."""
    try:
        return _result.parse(data)
    except ValueError as error:
        raise _wire.wrong_answer(url, str(error)) from None


def text_of(url: str, event: Mapping[str, Any]) -> str:
    """What an event says that the program has printed."""
    encoded, text = event.get("base64"), event.get("text", "")
    try:
        if isinstance(encoded, str):
            return base64.b64decode(encoded).decode("utf-8", "replace")
    except ValueError as error:
        raise _wire.wrong_answer(url, f"an event of it is no base64: {error}") from None
    if not isinstance(text, str):
        raise _wire.wrong_answer(url, "the text of an event is none")
    return text


def pause(problem: Problem, attempt: int) -> float:
    """Seconds before another try: as the service says, else more each time. Never the same for all."""
    seconds = problem.retry_after
    if seconds is None:
        seconds = min(FIRST_PAUSE * 2.0**attempt, LONGEST_PAUSE)
    return seconds * random.uniform(1.0, 1.25)


class Batches:
    """Programs on their way through a service."""

    def __init__(
        self,
        address: Address,
        policy: str | None,
        retries: int,
        requests: Sequence[bytes | BadRequest],
        concurrency: int | None,
        stop: threading.Event,
    ) -> None:
        self._address, self._policy, self._retries, self._stop = address, policy, retries, stop
        self._requests = requests
        self._size = BATCH if concurrency is None else max(1, min(BATCH, concurrency // BATCHES))
        self._at_a_time = min(BATCHES, concurrency or BATCHES)
        self._results: list[Result | None] = [None] * len(requests)
        self._tries = [0] * len(requests)
        self._queue: deque[int] = deque()
        self._not_before = 0.0
        self._done = 0
        self._lock = threading.Lock()
        for index, request in enumerate(requests):
            if isinstance(request, bytes):
                self._queue.append(index)
            else:
                self._settle(index, of_problem(Problem(400, request.reason, str(request), started=False)))
        self._ran_none = self._done

    def run(self, show: Callable[[int], object]) -> list[Result]:
        """Sends all, and gives their results."""
        calls: set[Call] = set()
        running: dict[Future[Problem | None], list[int]] = {}
        with ThreadPoolExecutor(self._at_a_time, thread_name_prefix="stockade") as threads:
            try:
                while len(self._queue) + len(running) > 0:
                    show(self._done)
                    while self._queue and len(running) < self._at_a_time and time.monotonic() >= self._not_before:
                        call, batch = Call(self._address), self._next()
                        calls.add(call)
                        running[threads.submit(self._send, call, batch)] = batch
                    if running:
                        ended, _ = wait(running, timeout=LOOK, return_when=FIRST_COMPLETED)
                        for one in ended:
                            self._after(running.pop(one), one.result())
                    else:
                        time.sleep(LOOK)
                    if self._stop.is_set():
                        raise InterruptedError("the programs are no longer awaited")
            except BaseException:
                # To hang up cancels all of a batch.
                for call in calls:
                    call.abort()
                raise
        show(self._done)
        return [one for one in self._results if one is not None]

    def _next(self) -> list[int]:
        """The programs of the next batch."""
        batch: list[int] = []
        length = 0
        with self._lock:
            while self._queue and len(batch) < self._size:
                length += len(self._requests[self._queue[0]])  # type: ignore[arg-type]
                if batch and length > BATCH_BYTES:
                    break
                batch.append(self._queue.popleft())
        return batch

    def _send(self, call: Call, batch: Sequence[int]) -> Problem | None:
        """None: the service has answered to the end."""
        url = self._address.url
        body = b"".join(cast("bytes", self._requests[index]) for index in batch)
        path = "/v1/batch" + _wire.query(policy=self._policy, order="ended")
        try:
            # It is silent while all its programs run.
            answer = call.send("POST", path, body, accept=_wire.EVENTS, kind=_wire.EVENTS, silence=None)
            if answer.kind != _wire.EVENTS:
                raise _wire.wrong_answer(url, "it is no stream of answers")
            for line in _wire.lines(url, answer):
                if line.get("type") == "end":
                    return None
                place = line.get("index")
                if type(place) is not int:
                    raise _wire.wrong_answer(url, "a line of it is no answer")
                # One behind the last is about the rest of the body.
                if 0 <= place < len(batch):
                    self._take(batch[place], line)
            raise _wire.lost(url, "it ended the stream", started=True)
        except Problem as problem:
            return problem
        except _wire.Cut as error:
            return _wire.lost(url, error, started=True)
        finally:
            call.close()

    def _take(self, index: int, line: Mapping[str, Any]) -> None:
        if self._results[index] is not None:
            return
        url = self._address.url
        try:
            if line.get("problem") is not None:
                raise Problem.of(url, line["problem"])
            self._settle(index, result_of(url, line.get("result")))
        except Problem as problem:
            self._fail(index, problem)

    def _after(self, batch: Sequence[int], problem: Problem | None) -> None:
        """What becomes of the programs of a batch that have no result."""
        if (
            problem is not None
            and self._done == self._ran_none
            and _is_for_all(problem, self._tries[batch[0]] >= self._retries)
        ):
            raise SandboxError(problem.detail, reason=problem.reason)
        queued = set(self._queue)
        left = [index for index in batch if self._results[index] is None and index not in queued]
        if problem is not None and problem.status == 413 and len(batch) > 1:
            self._size = max(1, len(batch) // 2)
            with self._lock:
                self._queue.extendleft(reversed(left))
            return
        # What it has not answered at the end it has not taken.
        problem = problem or Problem(0, "server_lost", "the service did not take the program", started=False)
        for index in left:
            self._fail(index, problem)

    def _fail(self, index: int, problem: Problem) -> None:
        """A program has no result: it is sent again, or that is its result."""
        attempt = self._tries[index]
        if not problem.may_be_repeated or attempt >= self._retries or self._stop.is_set():
            self._settle(index, of_problem(problem))
            return
        with self._lock:
            self._tries[index] += 1
            self._queue.append(index)
            self._not_before = max(self._not_before, time.monotonic() + pause(problem, attempt))

    def _settle(self, index: int, result: Result) -> None:
        with self._lock:
            self._results[index] = result
            self._done += 1


def _is_for_all(problem: Problem, was_last: bool) -> bool:
    """Whether no program could be run, whichever it is."""
    if problem.status in (401, 403, 404, 421) or problem.reason in ("server_not_trusted", "socket_untrusted"):
        return True
    return problem.reason == "server_unreachable" and was_last


class Progress:
    """Shows how many are done: in a bar, in a line or by a function."""

    def __init__(self, wanted: bool | Callable[[int, int], object], total: int) -> None:
        self._wanted, self._total = wanted, total
        self._bar: Any = None
        self._shown = -1

    def __enter__(self) -> Callable[[int], object]:
        if self._wanted is True:
            try:
                from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]
            except ImportError:
                return self._line
            self._bar = tqdm(total=self._total)
            return self._move
        return self._call if callable(self._wanted) else lambda done: None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._wanted is True:
            sys.stderr.write("\n")

    def _move(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

    def _line(self, done: int) -> None:
        if done != self._shown:
            self._shown = done
            sys.stderr.write(f"\r{done}/{self._total}")
            sys.stderr.flush()

    def _call(self, done: int) -> None:
        if done != self._shown and callable(self._wanted):
            self._shown = done
            self._wanted(done, self._total)
