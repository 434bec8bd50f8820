"""What screening finds, and what waits for approval, as the client tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

import stockade

CODE = "import subprocess; print(subprocess.run(['echo', 'ran'], capture_output=True, text=True).stdout, end='')"


@pytest.fixture(autouse=True)
def _registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # What waits is kept for a while; here it goes with the test.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_what_waits_runs_once_with_its_token():
    held = stockade.run(CODE, policy="review")
    assert (held.verdict, held.code, held.started, held.output) == ("approval_required", 126, False, "")
    assert held.error.startswith("policy `review`")
    assert {(finding.rule, finding.action) for finding in held.findings} == {("process", "approve")}
    assert held.approval is not None
    assert 0 < held.approval.seconds_left <= 900
    assert held.approval.approvers == ()
    assert held.approval.token not in repr(held)
    ran = stockade.run(CODE, policy="review", approve=held.approval.token)
    assert (ran.output, ran.approval) == ("ran\n", None)
    with pytest.raises(stockade.BadRequest) as refused:
        stockade.run(CODE, policy="review", approve=held.approval.token)
    assert refused.value.reason == "approval_used"


def test_a_session_approves_what_it_has_held_back():
    with stockade.Session(policy="review") as session:
        held = session.run(CODE)
        assert held.approval is not None
        assert session.run(CODE, approve=held.approval.token).output == "ran\n"


def test_what_is_denied_says_why_in_words():
    denied = stockade.run("import shutil; shutil.rmtree('/')", policy="review")
    assert (denied.verdict, denied.approval) == ("screened", None)
    assert "shutil.rmtree" in denied.error
