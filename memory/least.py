"""The values of variables for which a sum of costs is least, where each cost knows a few of the variables.

    chain = [Factor(("a",), {("x",): 0, ("y",): 1}), Factor(("a", "b"), {("x", "x"): 5, ("x", "y"): 2, ...})]
    least(["a", "b"], ("x", "y"), chain)     # {"a": "x", "b": "y"}

Variables are eliminated one after another (Bertele and Brioschi, "Nonserial Dynamic Programming", 1972): on a chain
this is the shortest path, on a graph of forks and joins it is as exact. The work grows with the number of variables
that one elimination joins; where that is more than MOST_JOINED the variable with the most neighbours is fixed at its
own cheapest value first, which is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

MOST_JOINED = 9
"""Variables in one table: 3^9 sums take a fraction of a second."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A cost for every combination of values of the variables in `scope`."""

    scope: tuple[str, ...]
    costs: Mapping[tuple[str, ...], float]

    def fixed(self, variable: str, value: str) -> Factor:
        """The same cost with one variable known."""
        place = self.scope.index(variable)
        scope = self.scope[:place] + self.scope[place + 1 :]
        return Factor(scope, {k[:place] + k[place + 1 :]: cost for k, cost in self.costs.items() if k[place] == value})


def least(variables: Sequence[str], values: Sequence[str], factors: Sequence[Factor]) -> dict[str, str]:
    """A value for each variable, so that the sum of all factors is least; of equal sums one of the earlier values.

    Args:
        factors: over `variables` without repeats in a scope; each has a cost for every combination of `values`.
    """
    left = dict.fromkeys(variables)
    decided: list[tuple[str, tuple[str, ...], dict[tuple[str, ...], str]]] = []
    fixed: dict[str, str] = {}
    knowing: dict[str, list[Factor]] = {v: [] for v in variables}
    for factor in factors:
        for v in factor.scope:
            knowing[v].append(factor)
    near = {v: _neighbours(v, knowing[v]) for v in variables}

    def exchange(old: Sequence[Factor], new: Sequence[Factor]) -> None:
        """Other factors in place of some, and the neighbours of all who knew them."""
        gone = set(map(id, old))
        touched = dict.fromkeys(v for f in (*old, *new) for v in f.scope)
        for v in touched:
            knowing[v] = [f for f in knowing[v] if id(f) not in gone] + [f for f in new if v in f.scope]
        for v in touched:
            near[v] = _neighbours(v, knowing[v])

    while left:
        variable = min(left, key=lambda v: len(near[v]))
        scope, joined = near[variable], knowing[variable]
        if len(scope) >= MOST_JOINED:
            widest = max(left, key=lambda v: len(near[v]))
            fixed[widest] = _cheapest(widest, values, knowing[widest])
            exchange(knowing[widest], [f.fixed(widest, fixed[widest]) for f in knowing[widest]])
            del left[widest]
            continue
        best: dict[tuple[str, ...], str] = {}
        costs: dict[tuple[str, ...], float] = {}
        for combination in product(values, repeat=len(scope)):
            known = dict(zip(scope, combination, strict=True))
            sums = {
                value: sum(f.costs[tuple(value if v == variable else known[v] for v in f.scope)] for f in joined)
                for value in values
            }
            best[combination] = min(sums, key=sums.__getitem__)
            costs[combination] = sums[best[combination]]
        decided.append((variable, scope, best))
        exchange(joined, [Factor(scope, costs)])
        del left[variable]
    found = dict(fixed)
    for variable, scope, best in reversed(decided):
        found[variable] = best[tuple(found[v] for v in scope)]
    return found


def _neighbours(variable: str, pool: Sequence[Factor]) -> tuple[str, ...]:
    """The other variables that the costs of one know."""
    return tuple(dict.fromkeys(v for f in pool if variable in f.scope for v in f.scope if v != variable))


def _cheapest(variable: str, values: Sequence[str], pool: Sequence[Factor]) -> str:
    """The value with the least of the costs that know nothing else."""
    own = [f for f in pool if f.scope == (variable,)]
    return min(values, key=lambda value: sum(f.costs[(value,)] for f in own))
