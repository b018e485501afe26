"""Scaling laws: plan training runs, execute them, fit a law to their losses, and predict larger runs."""

from tilewright.scaling.fit import Fit, fit
from tilewright.scaling.law import Law, Optimum
from tilewright.scaling.runs import Columns, Runs, read_runs

__all__ = ["Columns", "Fit", "Law", "Optimum", "Runs", "fit", "read_runs"]
