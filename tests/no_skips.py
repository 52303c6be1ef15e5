"""A pytest plugin, `-p tests.no_skips`: a skipped test fails, unless its marker says that it needs a GPU or vLLM."""

from __future__ import annotations

from collections.abc import Generator

import pytest

ALLOWED = {"gpu", "vllm"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the report of a skipped test into a failure."""
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and not ALLOWED & {marker.name for marker in item.iter_markers()}:
        report.outcome = "failed"
        report.longrepr = f"skipped without a marker of {sorted(ALLOWED)}: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module that skips itself while it is collected into a failure."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped as a whole: {report.longrepr}"
    return report
