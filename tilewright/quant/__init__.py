"""Quantising models: `quantize(model, format)` replaces float weights by quantised ones, layer by layer, and reports the
errors."""

from tilewright.quant.convert import check_card, convert_layer, find_layers, quantize
from tilewright.quant.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "check_card", "convert_layer", "find_layers", "quantize"]
