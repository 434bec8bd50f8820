"""What a type checker must find in a program that uses the package; never run.

An unused `type: ignore` is an error itself, so a mistake here that is not found fails.
"""

import stockade


async def misspelt() -> None:
    """Arguments that do not exist, and one of the wrong type."""
    stockade.Session(polcy="shell")  # type: ignore[call-arg]
    stockade.AsyncSession(polcy="shell")  # type: ignore[call-arg]
    stockade.AsyncSession(policy=1)  # type: ignore[arg-type]
    stockade.Stockade(polcy="shell")  # type: ignore[call-arg]
    stockade.run("pass", timout=1)  # type: ignore[call-arg]
    stockade.Session().run("pass", timout=1)  # type: ignore[call-arg]
    await stockade.AsyncSession().run("pass", timout=1)  # type: ignore[call-arg]
    # The control.
    with stockade.Session(policy="shell", scratch=None, runtimes={}, program=None) as session:
        session.run("pass", timeout=1)
