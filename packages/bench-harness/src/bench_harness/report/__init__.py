"""From rows to what a person reads: tables, pictures and one offline page."""

from bench_harness.report.build import Report, Section, build
from bench_harness.report.write import as_json, write

__all__ = ["Report", "Section", "as_json", "build", "write"]
