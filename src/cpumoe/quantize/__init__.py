"""Offline conversion: any format that is read -> group-wise codes in a layout that others read."""

from cpumoe.quantize.convert import SHARD_BYTES, ClassReport, Report, quantize_model
from cpumoe.quantize.importance import calibrate
from cpumoe.quantize.target import FORMATS, Target, find_target

__all__ = [
    "FORMATS",
    "SHARD_BYTES",
    "ClassReport",
    "Report",
    "Target",
    "calibrate",
    "find_target",
    "quantize_model",
]
