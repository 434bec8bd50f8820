"""A client of `stockade serve`: runs at a service, one at a time or thousands.

It repeats only what is known not to have started, and waits as long as the service says. Each
call has a connection of its own; `map` alone starts threads, which end with it. An early end of
a call, by Ctrl-C too, cancels what it began.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import _request, _wire
from ._batches import Batches, Progress, encoded, of_problem, pause, result_of, text_of
from ._errors import BadRequest
from ._exec import checked
from ._result import Result
from ._wire import Address, Call, Problem

if TYPE_CHECKING:
    import os
    import ssl

    from typing_extensions import Unpack

    from ._answer import Answer
    from ._request import RunOptions


#: How often a stream that was cut is asked for again without anything new in it.
TRIES, RETRY_INTERVAL = 3, 1.0


class Client:
    """Runs code at a service. Safe to use from several threads."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        *,
        policy: str | None = None,
        retries: int = 5,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """`url` is `unix:/PATH`, `http://HOST:PORT` or `https://HOST`; `key` the token, or
        `key_file` a file with it that others cannot read (default: the variable
        STOCKADE_KEY_FILE). `policy` is one of the key's; `retries` how often a run that has not
        started is tried again.
        """
        self._address = Address(url, _wire.read_key(key, key_file), ssl_context)
        self._policy = policy
        self._retries = retries

    def __repr__(self) -> str:
        return f"Client({self._address.url!r})"

    @_request.in_help
    def run(
        self,
        code: str | bytes | Mapping[str, Any],
        *,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        **options: Unpack[RunOptions],
    ) -> Result:
        """Runs `code`, or a request with `code` in it, and returns its result.

        `on_stdout` and `on_stderr` get what the program prints while it runs; a slow one misses
        parts, which the result has. Raises `BadRequest` or `SandboxError` where nothing could be
        run.
        """
        return self._run(Call(self._address), code, on_stdout, on_stderr, options)

    def _run(
        self,
        call: Call,
        code: str | bytes | Mapping[str, Any],
        on_stdout: Callable[[str], object] | None,
        on_stderr: Callable[[str], object] | None,
        options: RunOptions,
    ) -> Result:
        request = encoded(code, options)
        listeners = {"stdout": on_stdout, "stderr": on_stderr}
        for attempt in range(self._retries + 1):
            try:
                return checked(self._run_once(call, request, listeners))
            except Problem as problem:
                if call.aborted.is_set() or attempt == self._retries or not problem.may_be_repeated:
                    return checked(of_problem(problem))
                call.aborted.wait(pause(problem, attempt))
        raise AssertionError("the last try returns")

    def _run_once(self, call: Call, request: bytes, listeners: Mapping[str, Callable[[str], object] | None]) -> Result:
        url, path = self._address.url, "/v1/run" + _wire.query(policy=self._policy)
        call.number = None
        try:
            answer = call.send("POST", path, request, accept=_wire.EVENTS, kind="application/json")
            if answer.kind != _wire.EVENTS:
                return result_of(url, _wire.whole(url, answer))
            seen = tries = 0
            while True:
                cut = _wire.lost(url, "it ended the stream", started=True)
                try:
                    for event in _wire.lines(url, answer):
                        if (result := self._heard(call, event, listeners)) is not None:
                            return result
                        if type(event.get("seq")) is int and event["seq"] > seen:
                            seen, tries = event["seq"], 0
                except _wire.Cut as error:
                    cut = _wire.lost(url, error, started=True)
                tries += 1
                answer = self._go_on(call, seen, tries, cut)
        except Problem:
            raise
        except BaseException:
            # Ctrl-C, or an error of a listener: a run whose caller has gone is not to go on.
            self._cancel_quietly(call.number)
            raise
        finally:
            call.close()

    def _heard(
        self, call: Call, event: Mapping[str, Any], listeners: Mapping[str, Callable[[str], object] | None]
    ) -> Result | None:
        """The result, if the event has it."""
        url, kind = self._address.url, event.get("type")
        if kind == "result":
            return result_of(url, event.get("result"))
        if kind == "problem":
            raise Problem.of(url, event.get("problem"))
        if kind == "accepted":
            if not _is_number(event.get("run")):
                raise _wire.wrong_answer(url, "it accepts a run without a number")
            call.number = event["run"]
        listener = listeners.get(kind) if isinstance(kind, str) else None
        if listener is not None:
            listener(text_of(url, event))
        return None

    def _go_on(self, call: Call, seen: int, tries: int, cut: Problem) -> Answer:
        """The stream after an event, where it was cut: this runs nothing again."""
        while call.number is not None and tries <= TRIES and not call.aborted.wait(RETRY_INTERVAL):
            call.close()
            try:
                path = f"/v1/runs/{call.number}/events{_wire.query(after=str(seen))}"
                return call.send("GET", path, accept=_wire.EVENTS)
            except Problem as problem:
                if problem.reason not in ("server_unreachable", "server_lost"):
                    break
                tries += 1
        raise cut

    def _cancel_quietly(self, number: str | None) -> None:
        if number is not None:
            # To hang up cancels it too, later.
            with contextlib.suppress(Exception):
                self.cancel(number)

    @_request.in_help
    def map(
        self,
        programs: Iterable[str | Mapping[str, Any]],
        *,
        concurrency: int | None = None,
        progress: bool | Callable[[int, int], object] = False,
        **options: Unpack[RunOptions],
    ) -> list[Result]:
        """Runs all programs, and returns their results in the same order.

        Each is code, or a request with `code` in it; `options` are for all that do not have their
        own. `concurrency` is how many are at the service at a time, of which it runs as many as
        the key may (default: up to 1,000). `progress`: True shows a bar (of tqdm, if that is
        installed), or a function gets how many are done, and of how many.

        Never raises for one program: a result whose verdict is `bad_request` or `sandbox_error`
        says why it could not be run. Raises an error where nothing could be run at all, as with a
        wrong key.
        """
        return self._map(threading.Event(), programs, concurrency, progress, options)

    def _map(
        self,
        stop: threading.Event,
        programs: Iterable[str | Mapping[str, Any]],
        concurrency: int | None,
        progress: bool | Callable[[int, int], object],
        options: RunOptions,
    ) -> list[Result]:
        if concurrency is not None and concurrency < 1:
            raise BadRequest(f"concurrency is a number from 1, not {concurrency!r}", reason="request_malformed")
        requests: list[bytes | BadRequest] = []
        for program in programs:
            try:
                requests.append(encoded(program, options))
            except BadRequest as error:
                requests.append(error)
        batches = Batches(self._address, self._policy, self._retries, requests, concurrency, stop)
        with Progress(progress, len(requests)) as show:
            return batches.run(show)

    def runs(self) -> list[Mapping[str, Any]]:
        """The key's runs that wait or run; with the scope `watch` those of all keys."""
        runs = self._ask("GET", "/v1/runs").get("runs")
        if not isinstance(runs, list) or not all(isinstance(one, dict) for one in runs):
            raise _wire.raised(_wire.wrong_answer(self._address.url, "it has no list of runs"))
        return runs

    def cancel(self, run: str) -> bool:
        """Cancels a run of this key by its number; False if it has ended, or is not the key's."""
        if not _is_number(run):
            raise BadRequest(f"{run!r} is no number of a run", reason="no_such_run")
        try:
            self._ask("DELETE", f"/v1/runs/{run}")
        except Problem as problem:
            if problem.status == 404:
                return False
            raise _wire.raised(problem) from None
        return True

    def _ask(self, method: str, path: str) -> Mapping[str, Any]:
        call = Call(self._address)
        try:
            answer = call.send(method, path)
            return {} if method == "DELETE" else _wire.whole(self._address.url, answer)
        except Problem as problem:
            if method == "DELETE":
                raise
            raise _wire.raised(problem) from None
        finally:
            call.close()


def _is_number(run: object) -> bool:
    """Whether it may be the number of a run, and so a part of a path."""
    return isinstance(run, str) and re.fullmatch("[0-9A-Za-z]{1,64}", run) is not None


class AsyncClient:
    """The same for asyncio. Cancelling the task cancels what it began before the task ends."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        *,
        policy: str | None = None,
        retries: int = 5,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """The arguments are those of `Client`."""
        self._client = Client(url, key, key_file, policy=policy, retries=retries, ssl_context=ssl_context)

    def __repr__(self) -> str:
        return f"Async{self._client!r}"

    @_request.in_help
    async def run(
        self,
        code: str | bytes | Mapping[str, Any],
        *,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        **options: Unpack[RunOptions],
    ) -> Result:
        """As `Client.run`; the functions are called in the thread of the event loop."""
        loop, client = asyncio.get_running_loop(), self._client

        def in_loop(listener: Callable[[str], object] | None) -> Callable[[str], object] | None:
            return None if listener is None else lambda text: loop.call_soon_threadsafe(listener, text)

        call = Call(client._address)
        work = asyncio.ensure_future(
            asyncio.to_thread(client._run, call, code, in_loop(on_stdout), in_loop(on_stderr), options)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.to_thread(client._cancel_quietly, call.number)
            call.abort()
            await asyncio.wait([work])
            work.exception()
            raise

    @_request.in_help
    async def map(
        self,
        programs: Iterable[str | Mapping[str, Any]],
        *,
        concurrency: int | None = None,
        progress: bool | Callable[[int, int], object] = False,
        **options: Unpack[RunOptions],
    ) -> list[Result]:
        """As `Client.map`; `progress` is called in a thread."""
        stop = threading.Event()
        work = asyncio.ensure_future(
            asyncio.to_thread(self._client._map, stop, programs, concurrency, progress, options)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([work])
            work.exception()
            raise

    async def runs(self) -> list[Mapping[str, Any]]:
        """As `Client.runs`."""
        return await asyncio.to_thread(self._client.runs)

    async def cancel(self, run: str) -> bool:
        """As `Client.cancel`."""
        return await asyncio.to_thread(self._client.cancel, run)
