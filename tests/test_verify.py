"""The verifier on one small plan, valid in several ways, and on that plan with one fault of every kind."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from plan_small import (
    BACK,
    CAT,
    FEED,
    FETCH,
    FREE_CAT,
    FREE_IMAGES,
    FREE_LOSSES,
    IMAGES,
    LEFT,
    LOSS,
    LOSSES,
    OUT,
    PLAN,
    PROGRAM,
    RIGHT,
    STEPS,
    UPDATE,
    Z2,
    Edit,
    G,
    Z,
    both,
    drop,
    put,
    turn,
)

from vdnn.errors import PlanError
from vdnn.memory.plan import Alloc, CopyIn, CopyOut, Feed, Fetch, Free, Launch, Record, Wait
from vdnn.memory.verify import verify

VALID = {
    "as it stands": lambda steps: steps,
    "launches in another order": both(drop(LEFT), put(RIGHT, LEFT, after=True)),
    "a wait too many": put(Z, Record(9, "out"), Wait(9, "compute")),
    "a storage that no step uses": put(LOSSES, Alloc("g", 1536, 16), Free("g", "in")),
    "a storage copied out before anything is written": both(
        drop(G),
        put(OUT, Alloc("g", 1536, 16), CopyOut("g", 0, "in"), Record(9, "in"), Wait(9, "out")),
        put(BACK, Wait(9, "compute")),
    ),
    "a host copy that is never used, and its bytes taken": put(OUT, CopyOut("cat", 0, "out")),
    "two copies of one storage on the host": put(
        Record(4, "in"), Wait(4, "out"), CopyIn("cat", "out"), Record(9, "out"), Wait(9, "compute"), after=True
    ),
    "a copy in over the bytes it came from": put(
        Z, Wait(2, "in"), CopyIn("cat", "in"), Record(9, "in"), Wait(9, "compute")
    ),
}


@pytest.mark.parametrize("edit", VALID.values(), ids=VALID)
def test_a_valid_plan_is_accepted(edit: Edit) -> None:
    verify(PROGRAM, replace(PLAN, steps=tuple(edit(list(STEPS)))))


FAULTS: dict[str, tuple[Edit, Any, str]] = {
    # name: edit, the step at fault in the edited plan (None: none), what the message must say
    # ---- ops, feeds and fetches
    "op in no step": (drop(UPDATE), None, "op 'update' is in no step"),
    "op twice": (put(LOSS, Z2), 18, "op 'z2' is done a second time, first by step 14 Launch(op='z2'"),
    "unknown op": (put(Z, Launch("q", "compute")), 13, "op 'q' is not in the program"),
    "op on a copy stream": (turn(Z, Launch("z", "in")), 13, "op 'z' runs on stream 'in', expected 'compute'"),
    "unknown stream": (turn(OUT, CopyOut("cat", 0, "up")), 10, "unknown stream 'up', expected one of compute, out, in"),
    "no step": (put(Z, ("Launch", "z", "compute")), 13, "('Launch', 'z', 'compute') is no step"),
    "no feed": (
        drop(FEED),
        4,
        "op 'left' reads 'images': 'images' should hold the feed of 'images', but holds nothing",
    ),
    "feed twice": (put(Record(0, "in"), FEED), 2, "feed 'images' is done a second time, first by step 1 Feed"),
    "feed of what is none": (put(Z, Feed("w", "compute")), 13, "'w' is fed, but is no feed of the program"),
    "feed after its reader": (both(drop(FEED), put(RIGHT, FEED, after=True)), 4, "op 'left' reads 'images'"),
    "no fetch": (drop(FETCH), None, "fetch 'losses' is in no step"),
    "fetch twice": (put(FREE_LOSSES, FETCH), 22, "fetch 'losses' is done a second time, first by step 21 Fetch"),
    "feed beyond the stage": (
        turn(FEED, FEED._replace(stage_offset=9)),
        1,
        "'images' passes through stage bytes 9 to 41, outside of 0 to 40",
    ),
    "fetch before the stage": (
        turn(FETCH, FETCH._replace(stage_offset=-8)),
        21,
        "'losses' passes through stage bytes -8 to 0, outside of 0 to 40",
    ),
    "fetch through the stage of a feed": (
        turn(FETCH, FETCH._replace(stage_offset=31)),
        21,
        "'losses' passes through stage bytes 31 to 39, of which step 1 Feed(tensor='images'",
    ),
    "fetch of what is none": (put(Z, Fetch("w", "compute")), 13, "'w' is fetched, but is no fetch of the program"),
    "fetch before the write": (
        both(drop(FETCH), put(LOSS, FETCH)),
        18,
        "Fetch reads 'losses': 'losses' should hold what op 'loss' wrote, but holds nothing that was written",
    ),
    # ---- events
    "wait before the record": (
        put(IMAGES, Wait(3, "out")),
        0,
        "'out' waits for event 3, which no step before this one",
    ),
    "event recorded twice": (turn(Record(4, "in"), Record(1, "in")), 26, "event 1 is recorded a second time"),
    # ---- versions
    "read before the write": (
        both(drop(Z2), put(LOSS, Z2, after=True)),
        17,
        "op 'loss' reads 'z2': 'z' should hold what op 'z2' wrote, but holds what op 'z' wrote, since step 13 Launch",
    ),
    "read of a part not written": (
        both(drop(RIGHT, FREE_IMAGES), put(Z, RIGHT, FREE_IMAGES, after=True)),
        11,
        "op 'z' reads 'cat': channels 4 to 7 of 'cat' should hold what op 'right' wrote, but holds nothing",
    ),
    "copied out before a part is written": (
        both(drop(RIGHT, FREE_IMAGES), put(Z, Wait(2, "compute"), RIGHT, FREE_IMAGES)),
        30,
        "op 'back' reads 'cat': channels 4 to 7 of 'cat' should hold what op 'right' wrote, but holds nothing that was"
        " written, since step 26 CopyIn",
    ),
    # ---- order of streams
    "read before the feed is over": (
        drop(Wait(0, "compute")),
        4,
        "op 'left' reads 'images' on stream 'compute', but step 1 Feed(tensor='images', stream='in', "
        "stage_offset=0) need not be over"
        " by then: let 'compute' wait for an event recorded on 'in' after it",
    ),
    "read before the copy in is over": (
        drop(Wait(4, "compute")),
        28,
        "op 'back' reads 'cat' on stream 'compute', but step 25",
    ),
    "copy out before the write is over": (
        drop(Wait(1, "out")),
        9,
        "CopyOut reads 'cat' on stream 'out', but step 5 Launch",
    ),
    "copy in before the copy out is over": (
        drop(Wait(2, "in")),
        24,
        "the copy-in of 'cat' on stream 'in', but step 10 CopyOut",
    ),
    "fetch before the write is over": (
        drop(Wait(3, "out")),
        20,
        "Fetch reads 'losses' on stream 'out', but step 18 Launch",
    ),
    "write before the read is over": (
        put(Z2, Record(9, "compute"), Wait(9, "out"), CopyOut("z", 0, "out"), Wait(2, "in")),
        18,
        "op 'z2' writes 'z2' on stream 'compute', but step 16 CopyOut(storage='z'",
    ),
    "write before another write is over": (
        put(Record(4, "in"), CopyIn("cat", "out")),
        26,
        "CopyIn writes 'cat' on stream 'out', but step 25 CopyIn(storage='cat', stream='in') need not be over",
    ),
    "a record before the step it is for": (
        both(drop(Record(0, "in")), put(FEED, Record(0, "in"))),
        5,
        "op 'left' reads 'images' on stream 'compute', but step 2",
    ),
    # ---- places
    "no multiple of the alignment": (
        turn(CAT, Alloc("cat", 520, 256)),
        3,
        "'cat' is put at 520 B, no multiple of 256 B",
    ),
    "too small": (turn(CAT, Alloc("cat", 512, 255)), 3, "'cat' gets 255 B, but needs 256 B"),
    "in the persistent section": (
        turn(CAT, Alloc("cat", 0, 256)),
        3,
        "'cat' is put at bytes 0 to 256, outside of 256 (end of",
    ),
    "beyond the slab": (
        turn(CAT, Alloc("cat", 2048, 256)),
        3,
        "outside of 256 (end of the persistent section) to 2048 (end",
    ),
    "over a live storage": (
        turn(CAT, Alloc("cat", 256, 256)),
        3,
        "'cat' is put at bytes 256 to 512, over 'images', not yet freed",
    ),
    "into the end of a live storage": (
        turn(G, Alloc("g", 1280, 16)),
        27,
        "'g' is put at bytes 1280 to 1296, over 'cat'",
    ),
    "allocated twice": (put(Z, Alloc("cat", 1536, 256)), 13, "'cat' is allocated a second time before it is freed"),
    "never allocated": (drop(LOSSES), 17, "op 'loss' uses 'losses', which was never allocated"),
    "a view": (turn(CAT, Alloc("left", 512, 256)), 3, "'left' is a view of 'cat', expected that storage"),
    "unknown storage": (turn(CAT, Alloc("q", 512, 256)), 3, "'q' is not in the program"),
    "persistent allocated": (
        put(Z, Alloc("w", 1280, 256)),
        13,
        "'w' is persistent: it is never allocated, freed or copied",
    ),
    "persistent freed": (put(Z, Free("w", "compute")), 13, "'w' is persistent"),
    "persistent copied": (put(Z, CopyOut("w", 0, "compute")), 13, "'w' is persistent"),
    # ---- frees
    "never freed": (drop(Free("g", "compute")), None, "storage 'g' is allocated but not freed after its last use"),
    "freed twice": (put(Z, FREE_IMAGES), 13, "Free uses 'images', which was freed by step 8 Free(storage='images'"),
    "freed before a use": (
        both(drop(FREE_IMAGES), put(RIGHT, FREE_IMAGES)),
        7,
        "op 'right' uses 'images', which was freed by step 6 Free",
    ),
    "freed before a copy is over": (
        drop(Wait(2, "compute")),
        15,
        "the Free of 'cat' on stream 'compute', but step 10 CopyOut",
    ),
    "bytes taken before the free is over": (
        turn(FREE_IMAGES, Free("images", "in")),
        8,
        "the Free of 'images' on stream 'in', but step 6 Launch(op='right'",
    ),
    "first write before the free is over": (
        both(
            drop(Wait(2, "compute")),
            turn(FREE_CAT, Record(9, "compute")),
            put(LOSSES, Wait(9, "out"), Free("cat", "out")),
        ),
        19,
        "op 'loss' writes 'losses' on stream 'compute', but step 17 Free(storage='cat', stream='out') need not be over",
    ),
    "first copy out before the free is over": (
        both(drop(G), put(Z, Alloc("g", 256, 16), CopyOut("g", 0, "in"))),
        14,
        "the copy-out of 'g' on stream 'in', but step 8 Free(storage='images'",
    ),
    "free before the free of who was there before": (
        put(Z, Alloc("g", 256, 16), Free("g", "in")),
        14,
        "the Free of 'g' on stream 'in', but step 8 Free(storage='images'",
    ),
    # ---- the host
    "beyond the host slab": (
        turn(OUT, CopyOut("cat", 8, "out")),
        10,
        "'cat' is copied to host bytes 8 to 264, outside of 0 to 256",
    ),
    "never copied out": (drop(OUT), 24, "'cat' is copied in, but was never copied out"),
    "host bytes taken": (
        put(FETCH, CopyOut("z", 0, "out")),
        26,
        "'cat' is copied in from host bytes 0 to 256, of which step 21 CopyOut(storage='z'",
    ),
    "host bytes taken before their copy is over": (
        put(Z2, CopyOut("z", 0, "compute")),
        14,
        "the copy-out of 'z' to host bytes 0 to 256 on stream 'compute', but step 10 CopyOut(storage='cat'",
    ),
    "host bytes taken while they are read": (
        put(Free("z", "compute"), CopyOut("z", 0, "out")),
        31,
        "the copy-out of 'z' to host bytes 0 to 256 on stream 'out', but step 25 CopyIn(storage='cat'",
    ),
}


@pytest.mark.parametrize(("edit", "step", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_with_its_step(edit: Edit, step: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)) as error:
        verify(PROGRAM, replace(PLAN, steps=tuple(edit(list(STEPS)))))
    assert error.value.step == step
    assert str(error.value).startswith(f"plan step {step}: " if step is not None else message)
