"""Faults to put into a plan: each takes the steps and a random source and returns other steps, or None if it cannot.

    steps = ORDER_FAULTS["drop wait"](list(plan.steps), random)

ORDER_FAULTS only change what is ordered before what; CONTENT_FAULTS change what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from vdnn.memory.plan import STREAMS, Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Record, Wait

Steps = list[Any]
Fault = Callable[[Steps, Random], Steps | None]


def _pick(steps: Steps, random: Random, *kinds: type) -> int | None:
    found = [i for i, step in enumerate(steps) if isinstance(step, kinds)]
    return random.choice(found) if found else None


def _on(*kinds: type) -> Callable[[Callable[[Steps, Random, int], Steps | None]], Fault]:
    """A fault at one step of `kinds`."""

    def decorate(change: Callable[[Steps, Random, int], Steps | None]) -> Fault:
        def fault(steps: Steps, random: Random) -> Steps | None:
            at = _pick(steps, random, *kinds)
            return None if at is None else change(steps, random, at)

        return fault

    return decorate


def _drop(steps: Steps, random: Random, at: int) -> Steps:
    return steps[:at] + steps[at + 1 :]


def _repeat(steps: Steps, random: Random, at: int) -> Steps:
    again = random.randint(at + 1, len(steps))
    return [*steps[:again], steps[at], *steps[again:]]


def _earlier(steps: Steps, random: Random, at: int) -> Steps:
    to = random.randint(max(0, at - 8), at)
    return [*steps[:to], steps[at], *steps[to:at], *steps[at + 1 :]]


def _later(steps: Steps, random: Random, at: int) -> Steps:
    to = random.randint(at, min(len(steps) - 1, at + 8))
    return [*steps[:at], *steps[at + 1 : to + 1], steps[at], *steps[to + 1 :]]


def _to_stream(steps: Steps, random: Random, at: int) -> Steps:
    return [*steps[:at], steps[at]._replace(stream=random.choice(STREAMS)), *steps[at + 1 :]]


def _change(**fields: Callable[[Any, Steps, Random], Any]) -> Callable[[Steps, Random, int], Steps]:
    def change(steps: Steps, random: Random, at: int) -> Steps:
        values = {name: value(steps[at], steps, random) for name, value in fields.items()}
        return [*steps[:at], steps[at]._replace(**values), *steps[at + 1 :]]

    return change


def _drop_record(steps: Steps, random: Random, at: int) -> Steps:
    event = steps[at].event
    return [step for step in steps if not (isinstance(step, Record | Wait) and step.event == event)]


def _swap(steps: Steps, random: Random, at: int) -> Steps:
    other = random.randint(max(0, at - 4), min(len(steps) - 1, at + 4))
    swapped = list(steps)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    return swapped


def _other_storage(step: Any, steps: Steps, random: Random) -> str:
    return random.choice([other.storage for other in steps if isinstance(other, Alloc)])


def _other_event(step: Any, steps: Steps, random: Random) -> int:
    return random.choice([other.event for other in steps if isinstance(other, Record)])


_STREAMED = (Launch, Free, CopyOut, CopyIn, Feed, Fetch, Record, Wait)

ORDER_FAULTS: Mapping[str, Fault] = {
    "drop wait": _on(Wait)(_drop),
    "drop record and its waits": _on(Record)(_drop_record),
    "record too early": _on(Record)(_earlier),
    "wait too late": _on(Wait)(_later),
    "wait for another event": _on(Wait)(_change(event=_other_event)),
    "wait on another stream": _on(Wait)(_to_stream),
    "record on another stream": _on(Record)(_to_stream),
    "copy on another stream": _on(CopyOut, CopyIn)(_to_stream),
    "free on another stream": _on(Free)(_to_stream),
    "feed or fetch on another stream": _on(Feed, Fetch)(_to_stream),
    "feed too early": _on(Feed)(_earlier),
    "feed too late": _on(Feed)(_later),
    "free too early": _on(Free)(_earlier),
    "copy in too early": _on(CopyIn)(_earlier),
    "copy out too late": _on(CopyOut)(_later),
    "swap steps": _on(*_STREAMED)(_swap),
    "launch too early": _on(Launch)(_earlier),
    "launch too late": _on(Launch)(_later),
}

CONTENT_FAULTS: Mapping[str, Fault] = {
    "shift offset": _on(Alloc)(
        _change(offset=lambda step, _, random: step.offset + 256 * random.choice((-2, -1, 1, 2)))
    ),
    "place at random": _on(Alloc)(_change(offset=lambda step, _, random: 256 * random.randint(0, 40))),
    "shift host offset": _on(CopyOut)(
        _change(host_offset=lambda step, _, random: step.host_offset + random.choice((-64, -8, 8, 64)))
    ),
    "free twice": _on(Free)(_repeat),
    "free another": _on(Free)(_change(storage=_other_storage)),
    "no launch": _on(Launch)(_drop),
    "launch twice": _on(Launch)(_repeat),
    "no copy out": _on(CopyOut)(_drop),
    "copy out twice": _on(CopyOut)(_repeat),
    "copy out another": _on(CopyOut)(_change(storage=_other_storage)),
    "no copy in": _on(CopyIn)(_drop),
    "copy in twice": _on(CopyIn)(_repeat),
    "copy in another": _on(CopyIn)(_change(storage=_other_storage)),
    "no feed": _on(Feed)(_drop),
    "fetch twice": _on(Fetch)(_repeat),
    "no alloc": _on(Alloc)(_drop),
    "alloc too late": _on(Alloc)(_later),
}
