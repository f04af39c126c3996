"""Checkpoints: what is kept, kills at every moment of a save, and the file format against the library."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_tools import same, state, tensors
from safetensors.numpy import load_file

from vdnn.errors import CheckpointError, VdnnError
from vdnn.runtime.checkpoint import check_tensors, latest, load, prune, save, set_aside
from vdnn.runtime.tensor_file import DTYPES, write_tensors


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path):
    folder = tmp_path / "runs" / "checkpoints"
    path = save(folder, tensors(), state(123), keep=2)
    assert path == folder / "step-00000123"
    assert steps(path) == ["state.json", "weights.safetensors"]
    got, after = load(path)
    assert same(got, tensors())
    assert after == state(123)
    got["conv1.weight"] += 1  # memory of its own, not the file's


def test_special_numbers_and_layouts_keep_their_bits(tmp_path):
    odd = np.array([np.nan, -np.nan, np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    given = {"odd": odd, "scalar": np.float32(3) * np.ones((), np.float32), "none": np.zeros((0, 3), np.float32)}
    given["turned"] = np.arange(6.0).reshape(2, 3).T
    given["swapped"] = np.arange(4, dtype=">f4")
    got, _ = load(save(tmp_path, given, state(1), 1))
    assert got["odd"].tobytes() == odd.tobytes()
    assert got["scalar"].shape == ()
    assert got["none"].shape == (0, 3)
    assert np.array_equal(got["turned"], given["turned"])
    assert np.array_equal(got["swapped"], given["swapped"])


def test_the_file_is_read_by_the_safetensors_library_and_hashed_right(tmp_path):
    given = {f"x.{name}": np.arange(5).astype(name) for name in DTYPES}
    digest, nbytes = write_tensors(tmp_path / "a.safetensors", given)
    assert same(load_file(tmp_path / "a.safetensors"), given)
    raw = (tmp_path / "a.safetensors").read_bytes()
    assert (hashlib.sha256(raw).hexdigest(), len(raw)) == (digest, nbytes)
    header = int.from_bytes(raw[:8], "little")
    assert header % 8 == 0
    for entry in json.loads(raw[8 : 8 + header]).values():
        width = (entry["data_offsets"][1] - entry["data_offsets"][0]) // 5
        assert entry["data_offsets"][0] % width == 0
    path = save(tmp_path, given, state(1), 1)
    record = json.loads((path / "state.json").read_text())
    assert record["format"] == 2
    assert record["weights"] == {"sha256": digest, "nbytes": nbytes}


def test_the_newest_are_kept_and_the_one_just_saved_always(tmp_path):
    for step in (5, 100_000_000, 20, 10):
        save(tmp_path, tensors(step), state(step), keep=3)
    assert steps(tmp_path) == ["step-00000010", "step-00000020", "step-100000000"]
    save(tmp_path, tensors(3), state(3), keep=1)
    assert steps(tmp_path) == ["step-00000003"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, tensors(1), state(7), keep=2)
    save(tmp_path, tensors(2), state(7), keep=2)
    assert steps(tmp_path) == ["step-00000007"]
    assert same(load(tmp_path / "step-00000007")[0], tensors(2))


def test_latest_is_by_step_not_by_name_or_time(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (100_000_000, 99_999_999, 5):
        save(tmp_path, tensors(), state(step), keep=9)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-999999999").write_text("a file")
    assert latest(tmp_path) == tmp_path / "step-100000000"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "state.json").write_text('{"format": 2,'),
        lambda path: (path / "weights.safetensors").unlink(),
        lambda path: os.truncate(path / "weights.safetensors", 100),
        lambda path: [entry.unlink() for entry in path.iterdir()],
    ],
    ids=["no state", "half a state", "no weights", "half the weights", "empty"],
)
def test_latest_skips_what_is_incomplete(tmp_path, damage):
    save(tmp_path, tensors(1), state(1), keep=9)
    damage(save(tmp_path, tensors(2), state(2), keep=9))
    assert latest(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, tensors(2), state(2), keep=9)
    assert same(load(tmp_path / "step-00000002")[0], tensors(2))


def test_pruning_spares_one_and_keeps_the_newest_of_the_others(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, tensors(), state(step), keep=9)
    prune(tmp_path, 2, tmp_path / "step-00000002")
    assert steps(tmp_path) == ["step-00000002", "step-00000004"]


def test_the_newest_up_to_a_step(tmp_path):
    for step in (1, 5):
        save(tmp_path, tensors(), state(step), keep=9)
    assert latest(tmp_path, 4) == tmp_path / "step-00000001"
    assert latest(tmp_path, 5) == tmp_path / "step-00000005"
    assert latest(tmp_path, 0) is None


def test_what_is_beyond_a_step_is_set_aside_and_never_the_newest_again(tmp_path):
    assert set_aside(tmp_path / "nowhere", 1) == []
    for step in (1, 2, 3):
        save(tmp_path, tensors(step), state(step), keep=9)
    (tmp_path / "step-00000003").rename(tmp_path / ".replaced-step-00000003")  # as a kill leaves it
    assert latest(tmp_path) == tmp_path / ".replaced-step-00000003"
    moved = set_aside(tmp_path, 1)
    assert moved == [tmp_path / "aside-step-00000002", tmp_path / "aside-step-00000003"]
    assert latest(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, tensors(2), state(2), keep=9)
    assert set_aside(tmp_path, 1) == [tmp_path / "aside-step-00000002-2"]
    assert same(load(tmp_path / "aside-step-00000003")[0], tensors(3))  # nothing is lost


# ---- another network


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("bn1.running_mean"), "expected tensor 'bn1.running_mean', got none"),
        (lambda t: t.update(extra=np.zeros(1)), "expected no tensor 'extra', got one"),
        (lambda t: t.update({"conv1.weight": np.zeros((9, 3, 2))}), "expected shape (10, 3, 2), got (9, 3, 2)"),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(tmp_path, change, words):
    expected = {name: array.shape for name, array in tensors().items()}
    check_tensors(tmp_path, tensors(), expected)
    other = tensors()
    change(other)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(tmp_path, other, expected)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# ---- a save that fails or is killed


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        (np.zeros(3, np.complex64), 1, "expected a dtype of float64"),
        (np.zeros(3, np.float32), np.int64(3), "not JSON serializable"),
        (np.zeros(3, np.float32), float("nan"), "not JSON compliant"),
    ],
)
def test_a_save_that_fails_leaves_nothing_and_harms_nothing(tmp_path, tensor, value, words):
    save(tmp_path, tensors(1), state(1), keep=1)
    with pytest.raises(VdnnError, match=words):
        save(tmp_path, {"a": tensor}, {**state(2), "epoch": value}, keep=1)
    assert steps(tmp_path) == ["step-00000001"]
    assert same(load(tmp_path / "step-00000001")[0], tensors(1))


def test_a_save_into_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(VdnnError, match="cannot be written: ") as caught:
        save(tmp_path / "file" / "checkpoints", tensors(), state(1), keep=1)
    assert caught.value.exit_code == 1


def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path):
    """A limit on the size of files stands for the full disk: write raises OSError in either case."""
    script = """
        import resource, signal, sys
        from pathlib import Path
        import numpy as np
        from vdnn.errors import VdnnError
        from vdnn.runtime.checkpoint import save
        folder = Path(sys.argv[1])
        state = {"step": 2, "network": "lenet"}
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save(folder, {"a": np.zeros(10**6, np.float32)}, state, keep=1)
        except VdnnError as error:
            print(error)
    """
    save(tmp_path, tensors(1), state(1), keep=1)
    done = run(script, tmp_path)
    assert "step-00000002' cannot be written: [Errno 27]" in done.stdout, done.stderr
    assert steps(tmp_path) == ["step-00000001"]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


KILL_AT_EVERY_CALL = """
    import os, random, signal, sys
    from pathlib import Path
    import numpy as np
    from vdnn.runtime.checkpoint import latest, load, save

    def state(step, mark):
        fields = dict(network="lenet", step=step, epoch=mark, position=0, seed=0)
        return fields | dict(schedule={}, algorithms={}, config={})

    def tensors(mark):
        return {"w": np.full(1000, mark, np.float32), "v": np.full(10, mark, np.float64)}

    calls = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
    root = Path(sys.argv[1])
    new_step = int(sys.argv[2])
    finished = False
    kills = 0
    while not finished:
        folder = root / str(kills)
        for step in (1, 2):
            save(folder, tensors(step), state(step, step), keep=2)
        child = os.fork()
        if child == 0:
            left = kills
            def hook(event, arguments):
                global left
                if event in calls:
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
            sys.addaudithook(hook)
            save(folder, tensors(9), state(new_step, 9), keep=2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        finished = os.WIFEXITED(status)
        assert finished or os.WTERMSIG(status) == signal.SIGKILL, status
        # the old checkpoint or the new one, whole; never neither
        found, after = load(latest(folder))
        mark = after["epoch"]
        assert mark in (2, 9), mark
        assert after["step"] == {2: 2, 9: new_step}[mark]
        assert (found["w"] == mark).all() and (found["v"] == mark).all() and len(found) == 2
        # the next save cleans up and keeps two
        save(folder, tensors(10), state(10, 10), keep=2)
        names = sorted(path.name for path in folder.iterdir())
        assert names == [f"step-{after['step']:08d}", "step-00000010"], names
        assert load(latest(folder))[1]["epoch"] == 10
        kills += 1
    print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("new_step", [3, 2], ids=["a new step", "the same step again"])
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path, new_step):
    done = run(KILL_AT_EVERY_CALL, tmp_path, new_step)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15  # so many moments were tried


SAVE_WITHOUT_END = """
    import sys
    from pathlib import Path
    import numpy as np
    from vdnn.runtime.checkpoint import save
    step = int(sys.argv[2])
    while True:
        step += 1
        tensors = {"w": np.full(300_000, step, np.float32)}
        state = dict(network="lenet", step=step, epoch=0, position=0, seed=0, schedule={}, algorithms={}, config={})
        save(Path(sys.argv[1]), tensors, state, keep=2)
        print(step, flush=True)
"""


def test_kills_at_random_moments_never_lose_a_finished_checkpoint(tmp_path):
    rng, finished = random.Random(0), 0
    for _ in range(8):
        command = [sys.executable, "-c", textwrap.dedent(SAVE_WITHOUT_END), str(tmp_path), str(finished)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            said = [child.stdout.readline()]
            time.sleep(rng.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
            said += child.stdout.readlines()
        finished = max(int(line) for line in said if line.endswith("\n"))
        found, after = load(latest(tmp_path))
        assert after["step"] in (finished, finished + 1)
        assert (found["w"] == after["step"]).all()
        finished = after["step"]
    save(tmp_path, tensors(), state(finished + 1), keep=2)
    assert len(steps(tmp_path)) == 2
