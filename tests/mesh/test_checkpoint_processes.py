"""Checkpoints of several processes: each reads its own, all of them write one folder, and none waits for ever."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_worker import MLP
from on_mesh import arrays

import lazymods as lm

pytestmark = pytest.mark.slow  # processes that are started, and wait for each other

WORKER = Path(__file__).with_name("checkpoint_worker.py")
SPECS = {"fc1.kernel": "(None, 'data')", "fc2.kernel": "(('data', 'model'),)", "fc1.bias": "('model',)"}
SPECS["fc2.bias"] = "()"


def run(folder: Path, *jobs: str, count: int = 2) -> list[dict[str, Any]]:
    """Run jobs in processes of two devices each; return what each of them gave."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(Path(lm.__file__).parents[1]), *map(os.path.abspath, sys.path)])
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    commands = [[sys.executable, WORKER, folder, rank, count, port, *jobs] for rank in range(count)]
    logs = [open(folder / f"log-{rank}", "w+") for rank in range(count)]
    children = [
        subprocess.Popen([str(part) for part in c], env=os.environ | flags, stdout=log, stderr=subprocess.STDOUT)
        for c, log in zip(commands, logs, strict=True)
    ]
    try:
        for child in children:
            child.wait(240)
    finally:
        for child in children:
            child.kill()
        for log in logs:
            log.close()
    texts = [(folder / f"log-{rank}").read_text()[-3000:] for rank in range(count)]
    assert [child.returncode for child in children] == [0] * count, texts
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(count)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """The folder, what its files hold, and what two processes have made of them."""
    folder, model = tmp_path_factory.mktemp("processes"), MLP(5, lazy=False)
    for name in ("model.safetensors", "model.npz", "orbax"):
        lm.save(model, folder / name)
    want = {name: np.asarray(array) for name, array in arrays(model).items()}
    return folder, want, run(folder, "files", "refused", "state", "unplaceable", "absent")


def assert_shards(folder: Path, tag: str, want: dict[str, Any], split: tuple[str, ...]) -> None:
    """What the processes hold are parts of ``want``, which is all held, and no process holds all of what is split."""
    covered = {name: np.zeros(value.shape, int) for name, value in want.items()}
    for rank in range(2):
        here = {name: np.zeros(value.shape, bool) for name, value in want.items()}
        for key, value in np.load(folder / f"{tag}-{rank}.npz").items():
            name, ends, _ = json.loads(key)
            index = tuple(slice(*e) for e in ends)
            assert value.tobytes() == want[name][index].tobytes(), (tag, name)
            covered[name][index] += 1
            here[name][index] = True
        assert not any(here[name].all() for name in split)
    assert all(count.min() > 0 and count.min() == count.max() for count in covered.values())


TAGS = ["modelsafetensors", "modelnpz", "orbax", "saved_again", "later_again", "state", "kept"]


@pytest.mark.slow
@pytest.mark.parametrize("tag", TAGS)
def test_each_process_has_its_part(ran: Any, tag: str) -> None:
    folder, want, results = ran
    assert all(isinstance(result["files"], list) and isinstance(result["state"], list) for result in results), results
    assert_shards(folder, tag, want, ("fc2.kernel", "fc1.kernel"))


def test_a_save_has_ended_in_every_process_when_its_folder_is_there(ran: Any) -> None:
    assert [result["files"] for result in ran[2]] == [[["saved"], [True, True]]] * 2


def test_one_file_of_several_processes_is_refused(ran: Any) -> None:
    folder, _, results = ran
    for result, (i, suffix) in itertools.product(results, enumerate((".safetensors", ".npz"))):
        assert result["refused"][i].splitlines()[-4:] == [
            f"refused{suffix}: fc2.kernel",
            "  got:    an array that is spread over several processes",
            "  needed: values that this process has, for a single file: Orbax writes a folder from all of them",
            f"  write:  lm.save(model, '{folder / 'refused'}')  # in every process",
        ]
    assert not list(folder.glob("*refused*"))


def test_a_training_state_with_what_each_process_has_for_itself(ran: Any) -> None:
    for result in ran[2]:
        step, name, same_key, placed = result["state"]
        assert (step, name, same_key) == (3, "run", True)
        expected = {"step": "()", "opt_state.0.count": "()"}
        expected |= {f"opt_state.0.{m}.{name}": spec for m in ("mu", "nu") for name, spec in SPECS.items()}
        assert {n: s.removeprefix("PartitionSpec").removeprefix("P") for n, s in placed.items()} == expected


def test_every_process_is_told_that_a_folder_is_not_in_its_place(ran: Any) -> None:
    _, _, results = ran
    assert results[0]["unplaceable"] == ["OSError: No space left on device"] * 2
    assert results[1]["unplaceable"] == [
        "OSError: the first process could not put the folder in its place; it says why"
    ] * 2


def test_a_process_that_does_not_save_is_missed_and_not_waited_for_for_ever(ran: Any) -> None:
    folder, _, results = ran
    assert results[0]["absent"] == [
        f"{folder / 'absent'}\n"
        "  got:    a process that is missing where the save begins: 2.0 s were not enough for all 2\n"
        f"  needed: a call of lm.save for {folder / 'absent'} in every process, in the same order\n"
        "  write:  lm.save(model, path)  # in every process",
        False,
    ]
    assert results[1]["absent"] == ["", False]
