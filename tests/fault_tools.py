"""Coarser faults for plans of real networks, beside those of plan_faults, all by name in FAULTS.

steps = FAULTS["swap launches"](list(plan.steps), random)     # other steps, or None where the fault does not apply
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from plan_faults import CONTENT_FAULTS, ORDER_FAULTS, Fault, Steps

from vdnn.memory.plan import ALIGNMENT, STREAMS, Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Record, Wait


def _choose(steps: Steps, random: Random, *kinds: type) -> int | None:
    found = [i for i, step in enumerate(steps) if isinstance(step, kinds)]
    return random.choice(found) if found else None


def _edit(*kinds: type, edit: Callable[[Any, Steps, Random], Any]) -> Fault:
    """Put another step in place of one of `kinds`."""

    def fault(steps: Steps, random: Random) -> Steps | None:
        at = _choose(steps, random, *kinds)
        if at is None:
            return None
        return [*steps[:at], edit(steps[at], steps, random), *steps[at + 1 :]]

    return fault


def _move(*kinds: type, low: int, high: int) -> Fault:
    """Move one step of `kinds` by `low` to `high` places."""

    def fault(steps: Steps, random: Random) -> Steps | None:
        at = _choose(steps, random, *kinds)
        if at is None:
            return None
        to = min(max(at + random.randint(low, high), 0), len(steps) - 1)
        rest = steps[:at] + steps[at + 1 :]
        return [*rest[:to], steps[at], *rest[to:]]

    return fault


def _drop(*kinds: type) -> Fault:
    def fault(steps: Steps, random: Random) -> Steps | None:
        at = _choose(steps, random, *kinds)
        return None if at is None else steps[:at] + steps[at + 1 :]

    return fault


def _swap_neighbours(steps: Steps, random: Random) -> Steps:
    at = random.randrange(len(steps) - 1)
    return [*steps[:at], steps[at + 1], steps[at], *steps[at + 2 :]]


def _swap(*kinds: type) -> Fault:
    """Exchange two steps of `kinds`, which may be far apart."""

    def fault(steps: Steps, random: Random) -> Steps | None:
        found = [i for i, step in enumerate(steps) if isinstance(step, kinds)]
        if len(found) < 2:
            return None
        a, b = random.sample(found, 2)
        swapped = list(steps)
        swapped[a], swapped[b] = steps[b], steps[a]
        return swapped

    return fault


def _swap_near_launches(steps: Steps, random: Random) -> Steps:
    launches = [i for i, step in enumerate(steps) if isinstance(step, Launch)]
    at = random.randrange(len(launches) - 1)
    a, b = launches[at], launches[at + 1]
    swapped = list(steps)
    swapped[a], swapped[b] = steps[b], steps[a]
    return swapped


def _exchange_places(steps: Steps, random: Random) -> Steps | None:
    """Two allocations take each other's offset."""
    found = [i for i, step in enumerate(steps) if isinstance(step, Alloc)]
    a, b = random.sample(found, 2)
    swapped = list(steps)
    swapped[a] = steps[a]._replace(offset=steps[b].offset)
    swapped[b] = steps[b]._replace(offset=steps[a].offset)
    return swapped


def _another(kind: type, field: str) -> Callable[[Any, Steps, Random], Any]:
    """The step with the `field` of some other step of `kind`."""

    def edit(step: Any, steps: Steps, random: Random) -> Any:
        return step._replace(**{field: getattr(random.choice([s for s in steps if isinstance(s, kind)]), field)})

    return edit


def _shift(lowest: int, highest: int) -> Callable[[Any, Steps, Random], Any]:
    """The allocation, `lowest` to `highest` alignments up or down."""

    def edit(step: Any, steps: Steps, random: Random) -> Any:
        return step._replace(offset=step.offset + ALIGNMENT * random.choice((-1, 1)) * random.randint(lowest, highest))

    return edit


def _to_stream(step: Any, steps: Steps, random: Random) -> Any:
    return step._replace(stream=random.choice([s for s in STREAMS if s != step.stream]))


def _smaller(step: Any, steps: Steps, random: Random) -> Any:
    return step._replace(nbytes=max(step.nbytes - ALIGNMENT * random.randint(1, 8), 1))


_STREAMED = (Free, Launch, CopyOut, CopyIn, Record, Wait, Feed, Fetch)

COARSE_FAULTS: Mapping[str, Fault] = {
    "shift offset a little": _edit(Alloc, edit=_shift(1, 4)),
    "shift offset far": _edit(Alloc, edit=_shift(5, 4000)),
    "take another's place": _edit(Alloc, edit=_another(Alloc, "offset")),
    "exchange places": _exchange_places,
    "too few bytes": _edit(Alloc, edit=_smaller),
    "free far too early": _move(Free, low=-200, high=-5),
    "free too late": _move(Free, low=1, high=40),
    "no free": _drop(Free),
    "alloc far too late": _move(Alloc, low=5, high=60),
    "alloc too early": _move(Alloc, low=-40, high=-1),
    "swap neighbours": _swap_neighbours,
    "swap any two": _swap(Alloc, *_STREAMED),
    "swap launches": _swap(Launch),
    "swap near launches": _swap_near_launches,
    "swap copies": _swap(CopyOut, CopyIn),
    "launch on another stream": _edit(Launch, edit=_to_stream),
    "any step on another stream": _edit(*_STREAMED, edit=_to_stream),
    "copy out over another's copy": _edit(CopyOut, edit=_another(CopyOut, "host_offset")),
    "copy in far too early": _move(CopyIn, low=-200, high=-5),
    "copy in too late": _move(CopyIn, low=1, high=40),
    "copy out too early": _move(CopyOut, low=-40, high=-1),
    "feed too late": _move(Feed, low=1, high=40),
    "fetch too early": _move(Fetch, low=-40, high=-1),
    "no fetch": _drop(Fetch),
    "wait far too late": _move(Wait, low=2, high=60),
    "record far too early": _move(Record, low=-60, high=-2),
    "drop another wait": _drop(Wait),
}

FAULTS: Mapping[str, Fault] = {**ORDER_FAULTS, **CONTENT_FAULTS, **COARSE_FAULTS}
