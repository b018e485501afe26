"""The operators: plain functions, and `ALL`, the tuple of every Op behind them."""

from tilewright.kernels.rms_norm import add_rms_norm, add_rms_norm_op, rms_norm, rms_norm_op

__all__ = ["ALL", "add_rms_norm", "rms_norm"]

ALL = (add_rms_norm_op, rms_norm_op)
