"""Named tasks on tables, from a request to a report: what the command line does, in Python."""

from nestfed.workbench.commands import Search, Stopped, Study, compare, cost_table, describe_data, report, run, sweep

__all__ = ["Search", "Stopped", "Study", "compare", "cost_table", "describe_data", "report", "run", "sweep"]
