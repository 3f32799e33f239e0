"""The score and what is made of it: statistics, audit, report, published folder. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftstill.evaluate.auditing import audit_run
    from draftstill.evaluate.comparison_report import compare_scores, old_score
    from draftstill.evaluate.load import measure_load
    from draftstill.evaluate.publishing import check_published, publish
    from draftstill.evaluate.report import to_markdown, to_terminal, write_reports
    from draftstill.evaluate.scoring import score
    from draftstill.evaluate.sentences import verdict
    from draftstill.evaluate.served_score import score_server
    from draftstill.evaluate.serving import served_acceptance
    from draftstill.evaluate.stats import Interval, paired_ratio, pooled_ratio
    from draftstill.evaluate.tracking import track_score

_HOME = {
    "Interval": "stats", "paired_ratio": "stats", "pooled_ratio": "stats", "verdict": "sentences", "to_markdown": "report",
    "to_terminal": "report", "write_reports": "report", "score": "scoring", "measure_load": "load", "publish": "publishing",
    "check_published": "publishing", "served_acceptance": "serving", "audit_run": "auditing", "score_server": "served_score",
    "compare_scores": "comparison_report", "old_score": "comparison_report", "track_score": "tracking",
}  # fmt: skip
__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    # Lazy, so that --help pays for neither numpy nor the report.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
