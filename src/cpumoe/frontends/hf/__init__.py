"""Transformers as the host: its mixture-of-experts layers computed by cpumoe.

>>> import cpumoe.frontends.hf
>>> cpumoe.frontends.hf.register()

Then any model of Transformers v5 whose experts go through its registry runs with
`from_pretrained(..., experts_implementation="cpumoe")`. See docs/frontends/transformers.md.
"""

from __future__ import annotations

from cpumoe.frontends.hf.experts import NAME, experts_forward, register
from cpumoe.frontends.hf.plan import Plan, plan_of

__all__ = ["NAME", "Plan", "experts_forward", "plan_of", "register"]
