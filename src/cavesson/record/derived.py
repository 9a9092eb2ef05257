"""Columns of a token that follow from recorded ones, declared once for Python and for the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType

import numpy as np

from cavesson.record.precision import Array
from cavesson.record.schema import TOKEN_COLUMNS


@dataclass(frozen=True)
class Derived:
    """One derived column of the tokens; it is computed when read, not recorded."""

    name: str
    formula: str
    """An expression in token columns, ``exp`` and ``expm1`` that reads the same in Python and in TypeScript."""
    doc: str

    @cached_property
    def _code(self) -> CodeType:
        return compile(self.formula, self.name, "eval")

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """The token columns that the formula reads."""
        return tuple(column.name for column in TOKEN_COLUMNS if column.name in self._code.co_names)

    def of(self, tokens: Mapping[str, Array]) -> Array:
        """Return the column of [N] tokens, which have at least the columns in ``needs``; NaN where not measured."""
        columns = {name: tokens[name] for name in self.needs}
        with np.errstate(invalid="ignore", over="ignore"):
            values: Array = eval(self._code, {"exp": np.exp, "expm1": np.expm1}, columns)
        return values


DERIVED = {
    column.name: column
    for column in (
        Derived("kl_k1", "logprob - ref_logprob", "k1 estimate of the KL: Δ = logprob − ref_logprob, in nats"),
        # With exp() − 1, rounding errors would exceed the result for a typical Δ of 0.001.
        Derived(
            "kl_k3",
            "expm1(ref_logprob - logprob) + (logprob - ref_logprob)",
            "k3 estimate of the KL: e^(−Δ) − 1 + Δ, in nats, never negative",
        ),
        Derived(
            "teacher_kl",
            "logprob - teacher_logprob",
            "k1 estimate of the reverse KL to the teacher: logprob − teacher_logprob, in nats",
        ),
        Derived("prob", "exp(logprob)", "probability under the policy before the update"),
        Derived("ref_prob", "exp(ref_logprob)", "probability under the reference policy"),
        Derived("sampler_gap", "logprob - sampler_logprob", "logprob − sampler_logprob, in nats"),
    )
}
"""By name. k1 and k3 follow Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, with
samples from the policy."""
